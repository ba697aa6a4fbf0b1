"""Mounts that a child makes in its user namespace, on their way to the host.

What it is: the pair of sockets by which a child that is being started sends descriptors of
its overlays, and what has come by that. What it is not: making them
(``launchpad.overlay``), or what the host does with them (``child``).

Rules of this file.

1. One pair serves all attempts to start one child. What an attempt has sent that failed
   is closed before the next one.
2. A child sends before its exec, so what it has sent is there once it has started.
"""

from __future__ import annotations

import errno
import os
import socket

from supervisor.launchpad import wire


class InnerMounts:
    """The way of a child's mounts to the host.

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

    def receive(self) -> list[int]:
        """Return a descriptor of each mount, in the order of the request; the caller's.

        Precondition: the child is its program by now.

        Raises:
            OSError: this process may open no more.
        """
        fds = self._next()
        if not fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return fds

    def close(self) -> None:
        """Close the pair."""
        self._ours.close()
        self._theirs.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        numbers = (sock.fileno() for sock in (self._ours, self._theirs))
        return tuple(number for number in numbers if number >= 0)

    def _next(self) -> list[int] | None:
        """Return the descriptors of what came next, none if there was no room for it."""
        try:
            received = wire.receive_message(self._ours)
        except BlockingIOError:
            return None
        return None if received is None else received[1]
