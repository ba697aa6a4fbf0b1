"""Sockets that the service manager opens for the host (sd_listen_fds(3)).

They come as descriptors from 3 on.  They are moved at once, because 3 is the number of a
child's door and the two must not be confused.
"""

from __future__ import annotations

import fcntl
import os
import socket

FIRST = 3
"""Number of the first passed descriptor."""

MOVED_TO = 64
"""Lowest number after the move: above all numbers of a child's door."""


def take_activated() -> dict[str, list[socket.socket]]:
    """Return the passed sockets by the names in their unit, and unset the variables.

    A second call returns nothing.

    Raises:
        OSError: an announced descriptor is not open, or no socket.
    """
    environ = os.environ
    pid, number = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not (number.isascii() and number.isdigit()):
        return {}
    found: dict[str, list[socket.socket]] = {}
    for index in range(int(number)):
        fd = FIRST + index
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, MOVED_TO)
        os.close(fd)
        sock = socket.socket(fileno=moved)
        sock.setblocking(False)
        name = names[index] if index < len(names) and names[index] else "unknown"
        found.setdefault(name, []).append(sock)
    return found
