"""What every part stands on: threads, listeners, journal, log, and the kernel's calls."""
