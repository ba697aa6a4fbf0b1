"""The kernel, called and read: system calls, /proc, groups of processes, mounts."""
