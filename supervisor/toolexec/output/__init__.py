"""The output of a tool: its log, the log's files, and readers."""
