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

    def close_received(self) -> None:
        """Close the descriptors that a child sent before its start failed.

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


class _ServiceSockets(NamedTuple):
    """Sockets of one service.

    Attributes:
        sockets: in the order in which they are made.
        serve: is called with them, non-blocking, and whether the namespace has v6; owns
            them then.
        is_needed: a child without them is not to start.
    """

    sockets: tuple[SocketOrder, ...]
    serve: Callable[[list[socket.socket], bool], None]
    is_needed: bool


class InnerListener(InnerPair):
    """Sockets of services in a child's net namespace, on their way to the host.

    Nothing here waits: a child without a net namespace makes none, and starts unless one
    is needed.

    Raises:
        OSError: there is no descriptor for the pair.
    """

    def __init__(self) -> None:
        super().__init__()
        self._service_sockets: list[_ServiceSockets] = []
        self._ports: set[int] = set()
        self._addresses: Networks = ()
        self._networks: Networks = ()
        self._received: list[socket.socket] = []
        self._has_v6 = True

    def add_listener(self, port: int, serve: Callable[[socket.socket], None]) -> int:
        """Add a listener on 127.0.0.1, and return its port.

        Args:
            port: of it, or the next one that no other service has: the child's environment
                names it before the child is there.
            serve: is called with the listener, non-blocking, and owns it then.
        """
        while port in self._ports:
            port += 1
        self._ports.add(port)
        order = (int(socket.AF_INET), int(socket.SOCK_STREAM), LOOPBACK, port)
        self._service_sockets.append(
            _ServiceSockets((order,), lambda made, _: serve(*made), False)
        )
        return port

    def add_sockets(
        self,
        order: LoopbackOrder,
        serve: Callable[[list[socket.socket], bool], None],
    ) -> None:
        """Add addresses, routes and sockets, without which the child is not to start.

        Args:
            order: none of its ports was added before.
            serve: is called with the sockets in that order, without those of v6 if the
                namespace has no v6, and whether it has; they are non-blocking, and its own.
        """
        sockets, addresses, networks = order
        self._ports.update(port for *_, port in sockets if port)
        self._addresses += addresses
        self._networks += networks
        self._service_sockets.append(_ServiceSockets(sockets, serve, is_needed=True))

    def order(self) -> LoopbackOrder:
        """Return what the child is to make."""
        sockets = tuple(
            one for service in self._service_sockets for one in service.sockets
        )
        return sockets, self._addresses, self._networks

    @property
    def is_needed(self) -> bool:
        """Whether the child is not to start without them."""
        return any(service.is_needed for service in self._service_sockets)

    def receive(self) -> None:
        """Receive the sockets that the child has made, if any.

        Precondition: the child is its program by now.

        Raises:
            OSError: some were lost: this process may open no more.
        """
        received = self._next()
        if received is None:
            return
        (self._has_v6,), fds = received
        self._received = [socket.socket(fileno=fd) for fd in fds]
        for sock in self._received:
            sock.setblocking(False)
        if not self._is_complete():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def serve_received(self) -> None:
        """Give the received sockets to their services; close the pair.

        Raises:
            OSError: a needed one was not received, or cannot be served.
        """
        is_complete = self._is_complete()
        left, self._received = self._received, []
        self.close()
        if not is_complete:  # it is unknown which were received
            for sock in left:
                sock.close()
            if self.is_needed:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return
        try:
            for service in self._service_sockets:
                count = sum(map(self._is_made, service.sockets))
                given, left = left[:count], left[count:]
                service.serve(given, self._has_v6)
        finally:  # of a service that cannot serve, and of those after it
            for sock in left:
                sock.close()

    def _is_complete(self) -> bool:
        sockets, _, _ = self.order()
        return len(self._received) == sum(map(self._is_made, sockets))

    def _is_made(self, order: SocketOrder) -> bool:
        return self._has_v6 or order[0] != socket.AF_INET6

    def _held(self) -> tuple[socket.socket, ...]:
        return (*super()._held(), *self._received)


class InnerMounts(InnerPair):
    """Mounts that a child makes in its user namespace, on their way to the host."""

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
