"""Ports of a child that the host's other programs reach on 127.0.0.1 (spec NET10).

1. A connection into the namespace is made with a socket of the stock, for the host has
   no other way in. Such a socket is used again once its connection is over.
2. While all of them are in use, the launchpad makes more; there are `MAX_IN_USE` at most,
   and the next connections wait.
"""

from __future__ import annotations

import socket
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING

import trio

from hostlib.linux.tcp import disconnect, is_closed, is_to_be_reset
from supervisor.network.connections import Connection
from supervisor.network.inner_sockets import socket_of
from supervisor.network.ports import BACKLOG
from supervisor.network.sockets import (
    close_socket,
    connect,
    reset_at_exit,
    send_at_once,
)
from supervisor.network.statistics import PublishedRow
from supervisor.network.tunnel import Tunnel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hostlib.listener_set import ListenerSet
    from supervisor.network.connections import Connections
    from supervisor.network.hosts import Address
    from supervisor.network.inner_sockets import InnerSockets
    from supervisor.network.settings import Publication
    from supervisor.network.tunnel import Pipes

CLOSE_TIMEOUT_S = 60.0
"""How long a child may take to read what was sent before the end of a connection."""

_LOOPBACK = IPv4Address("127.0.0.1")
_INNER: tuple[tuple[socket.AddressFamily, Address], ...] = (
    (socket.AF_INET, _LOOPBACK),
    (socket.AF_INET6, IPv6Address("::1")),
)
_FIRST_LOOK_S = 0.005


MAX_IN_USE = 256
"""Sockets of a child for connections to its ports at once; they stay until its end."""


class SocketStock:
    """Sockets of a child's namespace, each used for one connection after another."""

    def __init__(self, sockets: InnerSockets) -> None:
        self._sockets = sockets
        self._used: set[socket.socket] = set()
        self._freed = trio.Event()
        self._growing = trio.Lock()

    async def take(self, family: socket.AddressFamily) -> socket.socket:
        """Return an unbound socket, a new one where all are in use.

        Waits while `MAX_IN_USE` are, or no more can be made.
        """
        while True:
            try:
                sock = self._sockets.take(family)
            except OSError:
                freed = self._freed
                if not await self._grow(family):
                    await freed.wait()
            else:
                self._used.add(sock)
                return sock

    async def _grow(self, family: socket.AddressFamily) -> bool:
        """Have more sockets made; tell whether there may be one now."""
        async with self._growing:
            if len(self._used) >= MAX_IN_USE:
                return False
            try:
                await self._sockets.reserve(1, [family])
            except OSError:
                return False
            return True

    def give_back(self, sock: socket.socket) -> None:
        """Make a socket ready for others, and reset its connection."""
        self._used.discard(sock)
        try:
            disconnect(sock)
        except OSError:
            self._sockets.discard(sock)
            return
        self._sockets.stock.append(sock)
        self._freed.set()
        self._freed = trio.Event()

    def descriptors(self) -> Iterator[int]:
        """Yield what is in use of the host's descriptors."""
        yield from (sock.fileno() for sock in self._used)


class Publisher:
    """Listens for one child on the host.

    Args:
        taken_over: listeners as `snapshot` returned them, in the place of publications.

    Raises:
        OSError: a port of the host is taken; its `filename` is the port.
    """

    def __init__(
        self,
        publications: Iterable[Publication],
        sockets: InnerSockets,
        connections: Connections,
        pipes: Pipes,
        listeners: ListenerSet,
        taken_over: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        self._has_v6 = sockets.has_v6
        self._stock = SocketStock(sockets)
        self._connections = connections
        self._pipes = pipes
        self._watched_by = listeners
        self._listeners = [(port, socket_of(fd)) for port, fd in taken_over or ()]
        for publication in publications if taken_over is None else ():
            try:
                listener = _listen(publication.host_port or 0)
            except OSError as why:
                self.close()
                port = publication.host_port
                raise OSError(why.errno, why.strerror, str(port)) from None
            self._listeners.append((publication.port, listener))

    def rows(self) -> tuple[PublishedRow, ...]:
        """Return where each port is reached."""
        return tuple(
            PublishedRow(port, f"{_LOOPBACK}:{listener.getsockname()[1]}")
            for port, listener in self._listeners
        )

    def snapshot(self) -> list[tuple[int, int]]:
        """Return (port of the child, descriptor of the listener)."""
        return [(port, listener.fileno()) for port, listener in self._listeners]

    def sockets_in_use(self) -> tuple[int, ...]:
        """Return the descriptors of those taken from the stock."""
        return tuple(self._stock.descriptors())

    def start(self, nursery: trio.Nursery) -> None:
        """Begin to accept; connections are served in a nursery."""
        for port, listener in self._listeners:
            self._watched_by.add(listener, partial(self._begin, nursery, port))

    def _begin(self, nursery: trio.Nursery, port: int, sock: socket.socket) -> None:
        reset_at_exit(sock)
        nursery.start_soon(self._serve, port, sock)

    def stop(self) -> None:
        """Accept no more."""
        for _, listener in self._listeners:
            self._watched_by.remove(listener)

    def descriptors(self) -> Iterator[int]:
        """Yield what is held of the host's descriptors."""
        yield from (listener.fileno() for _, listener in self._listeners)
        yield from self._stock.descriptors()

    def close(self) -> None:
        """Close the listeners."""
        for _, listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _serve(self, port: int, sock: socket.socket) -> None:
        send_at_once(sock)
        connection = Connection(sock, _LOOPBACK, port, is_inbound=True)
        await self._connections.serve(connection, partial(self._carry, port))

    async def _carry(self, port: int, connection: Connection) -> None:
        """Connect to a port of the child, and pass bytes on.

        Raises:
            OSError: nothing listens there.
        """
        last = OSError()
        for family, address in _INNER[: 1 + self._has_v6]:
            line = await self._stock.take(family)
            try:
                await self._join(connection, line, address, port)
            except OSError as why:
                last = why
            else:
                return
            finally:
                self._stock.give_back(line)
        raise last

    async def _join(
        self,
        connection: Connection,
        line: socket.socket,
        address: Address,
        port: int,
    ) -> None:
        """Use a socket of the stock for one connection."""
        inner = line.dup()  # the tunnel closes it
        try:
            send_at_once(inner)
            reset_at_exit(inner)
            await connect(inner, address, port)
        except BaseException:
            close_socket(inner)
            raise
        with self._connections.counted(connection) as meter:
            await Tunnel(inner, connection.inner, meter, self._pipes).run()
        if not is_to_be_reset(line):
            await _wait_closed(line)


async def _wait_closed(sock: socket.socket) -> None:
    """Wait until a peer has read all; nothing but the clock says when to look."""
    pause_s = _FIRST_LOOK_S
    with trio.move_on_after(CLOSE_TIMEOUT_S):
        while not is_closed(sock):
            await trio.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)


def _listen(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((str(_LOOPBACK), port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
