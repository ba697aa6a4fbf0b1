"""The base of all parts: threads, listeners, journal, log, the kernel's calls."""
