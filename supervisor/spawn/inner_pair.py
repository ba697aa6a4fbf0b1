"""The sockets by which a child that is being started sends descriptors to the host.

Rules:
 1. One pair serves all attempts to start one child. What an attempt has sent that failed
    is closed before the next one.
 2. A child sends before its exec, so what it has sent is there once it has started.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from supervisor.spawn.launchpad import wire

if TYPE_CHECKING:
    from collections.abc import Callable


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


# Listeners on loopback of a child's own net namespace, on their way to the host.
#
# The pair of sockets by which a child that is being started hands them over, and what has
# come by that.
#
# Rules.
#
# 1. A child that makes none, because it has no net namespace, is as good a child: nothing
#    here waits.
# 2. The pair is closed when the child has been started, or was not.


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


# Mounts that a child makes in its user namespace, on their way to the host.
#
# They are made in ``launchpad.overlay``; what the host does with them is in ``child``.


class InnerMounts(InnerPair):
    """The way of a child's mounts to the host."""

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
