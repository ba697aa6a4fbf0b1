"""Messages to the service manager: ready, reloading, stopping (sd_notify(3)).

Each is one datagram to the socket that ``$NOTIFY_SOCKET`` names.

Rules of this file.

1. Without ``$NOTIFY_SOCKET`` every call does nothing.
2. A message that cannot be sent is dropped; the manager notices by itself.
3. Only the main process sends (NotifyAccess=main): children do not get the variable.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from hostlib.messages import printable

EXTENSION_S = 30.0
"""Time for the next child to start once the unit's TimeoutStartSec is over: an exec from
a slow disk takes seconds."""


class Notifier:
    """Sends messages to one service manager.

    Args:
        address: a path, or ``@NAME`` in the abstract namespace; None to send nothing.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._sock: socket.socket | None = None
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
        """Send that the start or a reload is complete."""
        self.send(READY=1, STATUS=status)

    def reloading(self) -> None:
        """Send that a reload begins; ``ready`` ends it (Type=notify-reload)."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send(RELOADING=1, MONOTONIC_USEC=now_us, STATUS="reloading")

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
