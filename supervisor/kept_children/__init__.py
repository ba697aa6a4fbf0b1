"""Children that a daemon keeps: by name, restarted, with their logs."""
