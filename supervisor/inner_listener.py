"""A listener on loopback of a child's own net namespace, on its way to the host.

What it is: the pair of sockets by which a child that is being started hands it over, and
what has come by that. What it is not: making it (``launchpad.namespaces``), asking for it
(``sandbox.walled``), or serving it, which is a service's.

Rules of this file.

1. One pair serves all attempts to start one child. What an attempt has sent that failed
   is closed before the next one: only a child that lives has a listener.
2. A child that makes none, because it has no net namespace, is as good a child: nothing
   here waits.
3. The pair is closed when the child has been started, or was not.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from supervisor.launchpad import wire

if TYPE_CHECKING:
    from collections.abc import Callable


class InnerListener:
    """What a service wants a child to listen on.

    Args:
        port: on which: the child's environment names it before the child is there.
        serve: is given the listener, non-blocking, and owns it.

    Raises:
        OSError: there is no descriptor for the pair.
    """

    def __init__(self, port: int, serve: Callable[[socket.socket], None]) -> None:
        self.port = port
        self._serve = serve
        # A message is whole or absent, and says where it ends.
        self._ours, self._theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._listener: socket.socket | None = None

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

    def receive(self) -> None:
        """Take in what the child has made, if it has.

        Precondition: the child is its program by now.

        Raises:
            OSError: it has, and this process may open no more.
        """
        fds = self._next()
        if fds is not None:
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._listener = socket.socket(fileno=fds[0])
            self._listener.setblocking(False)

    def hand_on(self) -> None:
        """Give it to whoever serves it, if there is one; close the pair."""
        listener, self._listener = self._listener, None
        self.close()
        if listener is not None:
            self._serve(listener)

    def close(self) -> None:
        """Close what nobody took over."""
        for sock in (self._ours, self._theirs, self._listener):
            if sock is not None:
                sock.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        held = (self._ours, self._theirs, self._listener)
        numbers = (sock.fileno() for sock in held if sock is not None)
        return tuple(number for number in numbers if number >= 0)

    def _next(self) -> list[int] | None:
        """Return the descriptors of what came next, none if there was no room for it."""
        try:
            received = wire.receive_message(self._ours)
        except BlockingIOError:
            return None
        return None if received is None else received[1]
