"""The output of a tool: its log, the files of it, and the way to its readers."""
