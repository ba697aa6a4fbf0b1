"""The socket pairs by which a starting child sends descriptors to the host."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from supervisor.spawn.launchpad import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.spawn.launchpad.layers.loopback import (
        LoopbackOrder,
        Networks,
        SocketOrder,
    )

LOOPBACK = "127.0.0.1"


class InnerPair:
    """The way of descriptors from a child to its host.

    Raises:
        OSError: there is no descriptor for the pair.
    """

    def __init__(self) -> None:
        # A message is whole or absent, and says where it ends.
        self.ours, self.theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )

    @property
    def way(self) -> int:
        """The descriptor that travels with the order."""
        return self.theirs.fileno()

    def forget(self) -> None:
        """Close what came from a child that did not start.

        Precondition: that child has ended.
        """
        while (received := self._next()) is not None:
            for fd in received[1]:
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
        return self.ours, self.theirs

    def _next(self) -> tuple[tuple[Any, ...], list[int]] | None:
        """Return what came next; without descriptors for which there was no room."""
        try:
            return wire.receive_message(self.ours)
        except BlockingIOError:
            return None


# Sockets in a child's own net namespace, on their way to the host.
#
# The pair of sockets by which a child that is being started hands them over, and what has
# come by that.
#
# Rules.
#
# 1. A child that makes none, because it has no net namespace, is as good a child, unless
#    they are needed: nothing here waits.
# 2. The pair is closed when the child has been started, or was not.


class _Wanted(NamedTuple):
    """Sockets that one service wants.

    Attributes:
        sockets: in the order in which they are made.
        serve: is given them, non-blocking, and whether the namespace has v6; owns them.
        is_needed: a child without them is not to start.
    """

    sockets: tuple[SocketOrder, ...]
    serve: Callable[[list[socket.socket], bool], None]
    is_needed: bool


class InnerListener(InnerPair):
    """Listeners that services want of a child.

    Raises:
        OSError: there is no descriptor for the pair.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wanted: list[_Wanted] = []
        self._ports: set[int] = set()
        self._addresses: Networks = ()
        self._networks: Networks = ()
        self._came: list[socket.socket] = []
        self._has_v6 = True

    def want(self, port: int, serve: Callable[[socket.socket], None]) -> int:
        """Have one more listener on 127.0.0.1, and return its port.

        Args:
            port: which that is, if no other service has it: the child's environment names
                it before the child is there.
            serve: is given the listener, non-blocking, and owns it.
        """
        while port in self._ports:
            port += 1
        self._ports.add(port)
        order = (int(socket.AF_INET), int(socket.SOCK_STREAM), LOOPBACK, port)
        self._wanted.append(_Wanted((order,), lambda made, _: serve(*made), False))
        return port

    def add_sockets(
        self,
        order: LoopbackOrder,
        serve: Callable[[list[socket.socket], bool], None],
    ) -> None:
        """Have addresses, routes and sockets, without which the child is not to start.

        Args:
            order: nobody has asked for one of its ports before.
            serve: is given the sockets in that order, without those of v6 if the
                namespace has none, and whether it has; they are non-blocking, and owned.
        """
        sockets, addresses, networks = order
        self._ports.update(port for *_, port in sockets if port)
        self._addresses += addresses
        self._networks += networks
        self._wanted.append(_Wanted(sockets, serve, is_needed=True))

    def order(self) -> LoopbackOrder:
        """Return what the child is to make."""
        sockets = tuple(one for wanted in self._wanted for one in wanted.sockets)
        return sockets, self._addresses, self._networks

    @property
    def is_needed(self) -> bool:
        """Whether the child is not to start without them."""
        return any(wanted.is_needed for wanted in self._wanted)

    def receive(self) -> None:
        """Take in what the child has made, if it has.

        Precondition: the child is its program by now.

        Raises:
            OSError: it has, and this process may open no more.
        """
        received = self._next()
        if received is None:
            return
        (self._has_v6,), fds = received
        self._came = [socket.socket(fileno=fd) for fd in fds]
        for sock in self._came:
            sock.setblocking(False)
        if not self._is_complete():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def hand_on(self) -> None:
        """Give what has come to what serves it; close the pair.

        Raises:
            OSError: what is needed has not come, or cannot be served.
        """
        is_complete = self._is_complete()
        came, self._came = self._came, []
        self.close()
        if not is_complete:  # it is unknown which were received
            for sock in came:
                sock.close()
            if self.is_needed:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return
        try:
            for wanted in self._wanted:
                count = sum(map(self._is_made, wanted.sockets))
                given, came = came[:count], came[count:]
                wanted.serve(given, self._has_v6)
        finally:  # of a service that cannot serve, and of those after it
            for sock in came:
                sock.close()

    def _is_complete(self) -> bool:
        sockets, _, _ = self.order()
        return len(self._came) == sum(map(self._is_made, sockets))

    def _is_made(self, order: SocketOrder) -> bool:
        return self._has_v6 or order[0] != socket.AF_INET6

    def _held(self) -> tuple[socket.socket, ...]:
        return (*super()._held(), *self._came)


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
        received = self._next()
        if received is None or not received[1]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return received[1]
