"""How much children use: samples of their processes, limits, sizes of workspaces."""
