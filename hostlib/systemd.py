"""The service manager: messages to it, and the sockets that it opens for the host.

A message (ready, reloading, stopping) is one datagram to ``$NOTIFY_SOCKET``; sockets come
as descriptors from 3 on. Sources: sd_notify(3), sd_listen_fds(3).

1. Without ``$NOTIFY_SOCKET`` every call does nothing.
2. A message that cannot be sent is dropped; the manager notices by itself.
3. Only the main process sends (NotifyAccess=main): children do not get the variable.
4. A reload before the first READY is not told: its end would tell that the host is ready.
5. Passed sockets are moved at once: 3 is the number of a child's door.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time

from hostlib.messages import printable

EXTENSION_S = 30.0
"""Time for the next child to start once the unit's TimeoutStartSec is over: an exec from
a slow disk takes seconds."""

FIRST = 3
"""Number of the first passed descriptor."""

MOVED_TO = 64
"""Lowest number after the move: above all numbers of a child's door."""


class Notifier:
    """Sends messages to one service manager.

    Args:
        address: a path, or ``@NAME`` in the abstract namespace; None to send nothing.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._sock: socket.socket | None = None
        self._is_ready = False
        if address:
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
            self._sock = socket.socket(socket.AF_UNIX, kind)
            self._sock.setblocking(False)

    @property
    def address(self) -> str | None:
        """The address of the manager's socket."""
        return self._address

    def descriptors(self) -> tuple[tuple[int, str], ...]:
        """Return the descriptor of the socket, with a word for it."""
        return () if self._sock is None else ((self._sock.fileno(), "notify socket"),)

    def send(self, **fields: object) -> None:
        """Send assignments: ``send(READY=1, STATUS="7 children")``."""
        if self._sock is None or self._address is None:
            return
        lines = (f"{key}={printable(str(value))}" for key, value in fields.items())
        target = self._address
        if target.startswith("@"):
            target = "\0" + target[1:]
        with contextlib.suppress(OSError):  # rule 2
            self._sock.sendto("\n".join(lines).encode(), target)

    def starting(self, begun: int, of: int) -> None:
        """Send the progress of the start, and extend its timeout.

        The caller sends it only after progress, so a start that hangs is not extended.
        """
        self.send(
            STATUS=f"starting {begun} of {of}",
            EXTEND_TIMEOUT_USEC=round(EXTENSION_S * 1_000_000),
        )

    def ready(self, status: str) -> None:
        """Send that the start is complete."""
        self._is_ready = True
        self.send(READY=1, STATUS=status)

    def reloading(self) -> None:
        """Send that a reload begins; ``reloaded`` ends it (Type=notify-reload)."""
        if not self._is_ready:  # rule 4
            return
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send(RELOADING=1, MONOTONIC_USEC=now_us, STATUS="reloading")

    def reloaded(self, status: str) -> None:
        """Send that a reload is complete."""
        if self._is_ready:  # rule 4
            self.ready(status)

    def stopping(self, status: str) -> None:
        """Send that the host is stopping."""
        self.send(STOPPING=1, STATUS=status)

    def alive(self) -> None:
        """Send that the host is alive, for the watchdog."""
        self.send(WATCHDOG=1)

    def close(self) -> None:
        """Close the socket."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def watchdog_interval_s() -> float | None:
    """Return half of the watchdog's timeout, seconds; None if there is no watchdog.

    Source: sd_watchdog_enabled(3).
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        return None
    pid = os.environ.get("WATCHDOG_PID")
    if pid and pid != str(os.getpid()):
        return None
    return int(text) / 2 / 1_000_000


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
