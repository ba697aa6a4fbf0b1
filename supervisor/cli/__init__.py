"""The command line: what each command takes, and those that only show something."""
