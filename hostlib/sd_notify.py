"""Telling the service manager: ready, reloading, stopping, alive (sd_notify(3)).

One datagram a message to the socket that ``$NOTIFY_SOCKET`` names.

Rules of this file.

1. Without ``$NOTIFY_SOCKET`` every call does nothing.
2. A message that cannot be sent stops nothing: the manager will notice by itself.
3. Only the main process speaks (NotifyAccess=main): children never see the variable.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

EXTENSION_S = 30.0
"""Until the next child has to have begun once the unit's own TimeoutStartSec is over: an
exec from a slow disk takes seconds."""


class Notifier:
    """One manager's ear.

    Args:
        address: a path, or ``@NAME`` in the abstract namespace; None for nobody.
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
        """Where the manager listens."""
        return self._address

    def descriptors(self) -> tuple[tuple[int, str], ...]:
        """Return what this holds of the host's descriptors."""
        return () if self._sock is None else ((self._sock.fileno(), "notify socket"),)

    def send(self, **fields: object) -> None:
        """Send assignments: ``send(READY=1, STATUS="7 children")``."""
        if self._sock is None or self._address is None:
            return
        lines = (f"{key}={_line(str(value))}" for key, value in fields.items())
        target = self._address
        if target.startswith("@"):
            target = "\0" + target[1:]
        with contextlib.suppress(OSError):  # rule 2
            self._sock.sendto("\n".join(lines).encode(), target)

    def starting(self, begun: int, of: int) -> None:
        """Say how far the start is, and that it takes longer.

        Said only when the start has gone on: one that hangs is not extended.
        """
        self.send(
            STATUS=f"starting {begun} of {of}",
            EXTEND_TIMEOUT_USEC=round(EXTENSION_S * 1_000_000),
        )

    def ready(self, status: str) -> None:
        """Say that everything is up, also after a reload."""
        self.send(READY=1, STATUS=status)

    def reloading(self) -> None:
        """Say that a reload begins; ``ready`` ends it (Type=notify-reload)."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.send(RELOADING=1, MONOTONIC_USEC=now_us, STATUS="reloading")

    def stopping(self, status: str) -> None:
        """Say that the end has begun."""
        self.send(STOPPING=1, STATUS=status)

    def alive(self) -> None:
        """Feed the watchdog."""
        self.send(WATCHDOG=1)

    def close(self) -> None:
        """Close the socket."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def watchdog_interval_s() -> float | None:
    """Return how often the watchdog wants to be fed: half its patience; None for never.

    Source: sd_watchdog_enabled(3).
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        return None
    pid = os.environ.get("WATCHDOG_PID")
    if pid and pid != str(os.getpid()):
        return None
    return int(text) / 2 / 1_000_000


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
