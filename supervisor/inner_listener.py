"""Listeners on loopback of a child's own net namespace, on their way to the host.

What it is: the pair of sockets by which a child that is being started hands them over, and
what has come by that. What it is not: making them (``launchpad.namespaces``), asking for them
(``sandbox.walled``), or serving one, which is a service's.

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
    """What services want a child to listen on.

    Raises:
        OSError: there is no descriptor for the pair.
    """

    def __init__(self) -> None:
        self._wanted: dict[int, Callable[[socket.socket], None]] = {}
        # A message is whole or absent, and says where it ends.
        self._ours, self._theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
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
        if fds is None:
            return
        self._listeners = [socket.socket(fileno=fd) for fd in fds]
        for listener in self._listeners:
            listener.setblocking(False)
        if len(fds) < len(self._wanted):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def hand_on(self) -> None:
        """Give what has come to whoever serves it; close the pair."""
        listeners, self._listeners = self._listeners, []
        self.close()
        if len(listeners) < len(self._wanted):  # nobody knows which has come
            for listener in listeners:
                listener.close()
            return
        for listener, serve in zip(listeners, self._wanted.values(), strict=True):
            serve(listener)

    def close(self) -> None:
        """Close what nobody took over."""
        for sock in (self._ours, self._theirs, *self._listeners):
            sock.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        held = (self._ours, self._theirs, *self._listeners)
        numbers = (sock.fileno() for sock in held)
        return tuple(number for number in numbers if number >= 0)

    def _next(self) -> list[int] | None:
        """Return the descriptors of what came next, none if there was no room for it."""
        try:
            received = wire.receive_message(self._ours)
        except BlockingIOError:
            return None
        return None if received is None else received[1]
