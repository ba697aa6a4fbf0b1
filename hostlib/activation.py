"""Sockets that the service manager opened before the host was started (sd_listen_fds(3)).

They come as descriptors from 3 on.  They are moved away at once: 3 is the number of a
child's door, and nothing may take one for the other; and none is left open that nobody
takes.
"""

from __future__ import annotations

import fcntl
import os
import socket

FIRST = 3
"""The first of them."""

MOVED_TO = 64
"""The lowest number that they have afterwards: beyond all numbers of a child's door."""


def take_activated() -> dict[str, list[socket.socket]]:
    """Return the sockets by the names that their unit gave them; for one call.

    The variables that announced them are gone afterwards.

    Raises:
        OSError: what was announced is not there, or no socket.
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
