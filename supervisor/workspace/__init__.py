"""A base directory seen through a copy-on-write layer; its changes, commits and branches."""
