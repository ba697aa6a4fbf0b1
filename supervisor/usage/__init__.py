"""How much children use: samples of their processes, limits, sizes of workspaces.

Public: `limits`, `samples`, `workspace_sizes`.
"""
