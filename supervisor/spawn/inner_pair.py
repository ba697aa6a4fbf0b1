"""The sockets by which a child that is being started sends descriptors to the host.

Rules:
 1. One pair serves all attempts to start one child. What an attempt has sent that failed
    is closed before the next one.
 2. A child sends before its exec, so what it has sent is there once it has started.
"""

from __future__ import annotations

import os
import socket

from supervisor.spawn.launchpad import wire


class InnerPair:
    """The way of descriptors from a child to its host.

    Raises:
        OSError: there is no descriptor for the pair.
    """

    def __init__(self) -> None:
        # A message is whole or absent, and says where it ends.
        self._ours, self._theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )

    @property
    def way(self) -> int:
        """The descriptor that travels with the order."""
        return self._theirs.fileno()

    def forget(self) -> None:
        """Close what came from a child that did not start.

        Precondition: that child has ended.
        """
        while (fds := self._next()) is not None:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close what this holds."""
        for sock in self._held():
            sock.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        numbers = (sock.fileno() for sock in self._held())
        return tuple(number for number in numbers if number >= 0)

    def _held(self) -> tuple[socket.socket, ...]:
        return self._ours, self._theirs

    def _next(self) -> list[int] | None:
        """Return the descriptors of what came next, none if there was no room for it."""
        try:
            received = wire.receive_message(self._ours)
        except BlockingIOError:
            return None
        return None if received is None else received[1]
