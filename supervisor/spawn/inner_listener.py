"""Listeners on loopback of a child's own net namespace, on their way to the host.

The pair of sockets by which a child that is being started hands them over, and what has
come by that.

Rules of this file.

1. A child that makes none, because it has no net namespace, is as good a child: nothing
   here waits.
2. The pair is closed when the child has been started, or was not.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from supervisor.spawn.inner_pair import InnerPair

if TYPE_CHECKING:
    from collections.abc import Callable


class InnerListener(InnerPair):
    """What services want a child to listen on.

    Raises:
        OSError: there is no descriptor for the pair.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wanted: dict[int, Callable[[socket.socket], None]] = {}
        self._listeners: list[socket.socket] = []

    def want(self, port: int, serve: Callable[[socket.socket], None]) -> int:
        """Have one more, and return its port.

        Args:
            port: which that is, if no other service has it: the child's environment names
                it before the child is there.
            serve: is given the listener, non-blocking, and owns it.
        """
        while port in self._wanted:
            port += 1
        self._wanted[port] = serve
        return port

    @property
    def ports(self) -> tuple[int, ...]:
        """Where it is to listen."""
        return tuple(self._wanted)

    def receive(self) -> None:
        """Take in what the child has made, if it has.

        Precondition: the child is its program by now.

        Raises:
            OSError: it has, and this process may open no more.
        """
        fds = self._next()
        if fds is None:
            return
        self._listeners = [socket.socket(fileno=fd) for fd in fds]
        for listener in self._listeners:
            listener.setblocking(False)
        if len(fds) < len(self._wanted):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def hand_on(self) -> None:
        """Give what has come to what serves it; close the pair."""
        listeners, self._listeners = self._listeners, []
        self.close()
        if len(listeners) < len(self._wanted):  # nobody knows which has come
            for listener in listeners:
                listener.close()
            return
        for listener, serve in zip(listeners, self._wanted.values(), strict=True):
            serve(listener)

    def _held(self) -> tuple[socket.socket, ...]:
        return (*super()._held(), *self._listeners)
