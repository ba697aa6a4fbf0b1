"""The listeners of a child's namespace, also later ones (spec NET12).

1. A later listener is made of a socket from the stock: the host binds it from outside.
   Where the stock lacks one, the launchpad makes more.
2. A port that is not granted any more refuses connections; its sockets stay bound, for
   sockets are few, and listen again when it is granted again.
3. Where port 53 or 3128 is granted later, the host's own listener there is replaced: two
   of them cannot listen on one port.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from supervisor.network.settings import DNS_PORT, OWN_PORTS
from supervisor.network.sockets import close_socket, reset_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import trio

    from hostlib.listener_set import ListenerSet
    from supervisor.network.forwarder import Forwarder
    from supervisor.network.inner_sockets import InnerSockets

BACKLOG = 1024
"""Connections that wait to be accepted; the kernel has a bound of its own as well."""

_ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # noqa: S104 - the child's
_LOOPBACK = "127.0.0.1"


class Ports:
    """Listens for one child.

    Args:
        closed: ports that refuse connections, of a child that is taken over.
    """

    def __init__(
        self,
        sockets: InnerSockets,
        forwarder: Forwarder,
        listeners: ListenerSet,
        closed: Iterable[int] = (),
    ) -> None:
        self._sockets = sockets
        self._forwarder = forwarder
        self._listeners = listeners
        self._closed = set(closed)
        self._handle: Callable[[socket.socket], None] | None = None
        for sock in self._open_sockets():
            # Connections that have ended would keep it from listening again for 60 s.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def start(self, nursery: trio.Nursery) -> None:
        """Begin to accept; connections are served in a nursery."""

        def handle(sock: socket.socket) -> None:
            reset_at_exit(sock)
            nursery.start_soon(self._forwarder.serve, sock)

        self._handle = handle
        for sock in self._open_sockets():
            self._serve(sock)

    def stop(self) -> None:
        """Accept no more."""
        for sock in self._open_sockets():
            self._listeners.remove(sock)
        self._handle = None

    async def prepare(self, ports: Iterable[int]) -> None:
        """Have the sockets that `change` needs, until something is awaited.

        Raises:
            OSError: they cannot be made; its `filename` is a port.
        """
        new = {*ports} - self._sockets.listeners.keys()
        try:
            await self._sockets.reserve(len(new), self._sockets.families)
        except OSError as why:
            raise OSError(why.errno, why.strerror, str(min(new))) from None

    def change(self, ports: Iterable[int]) -> None:
        """Listen on some ports, and on no others.

        Raises:
            OSError: a port is taken in the namespace, or nothing is left of the stock;
                nothing is changed then. Its `filename` is the port.
        """
        wanted = frozenset(ports)
        begun: list[int] = []
        port = 0
        try:
            for port in sorted(wanted - self._listening()):
                self._open(port)
                begun.append(port)
        except OSError as why:
            for other in begun:
                self._close(other)
            raise OSError(why.errno, why.strerror, str(port)) from None
        for port in self._listening() - wanted:
            self._close(port)

    def closed(self) -> tuple[int, ...]:
        """Return the ports that were listened on, and refuse connections now."""
        return tuple(self._closed)

    def _open_sockets(self) -> set[socket.socket]:
        """Return the sockets that listen; one may be of a granted port and the host's own."""
        granted = (self._sockets.listeners[port] for port in self._listening())
        return {self._sockets.dns_stream, self._sockets.proxy}.union(*granted)

    def _listening(self) -> frozenset[int]:
        return frozenset(self._sockets.listeners.keys() - self._closed)

    def _open(self, port: int) -> None:
        if port in self._closed:
            for sock in self._sockets.listeners[port]:
                sock.listen(BACKLOG)
            self._closed.discard(port)
        else:
            self._sockets.listeners[port] = self._make_listeners(port)
        for sock in self._sockets.listeners[port]:
            self._serve(sock)

    def _close(self, port: int) -> None:
        if port in OWN_PORTS:
            return  # the host's own listener is one of them; the rules refuse the rest
        for sock in self._sockets.listeners[port]:
            self._listeners.remove(sock)
            sock.shutdown(socket.SHUT_RDWR)
        self._closed.add(port)

    def _make_listeners(self, port: int) -> tuple[socket.socket, ...]:
        made = []
        try:
            if self._sockets.has_v6:
                made.append(self._bind(socket.AF_INET6, port))
            # Last: where it replaces one of the host's own, nothing may fail afterwards.
            v4 = self._bind_own(port) if port in OWN_PORTS else None
            made.insert(0, v4 or self._bind(socket.AF_INET, port))
        except OSError:
            for sock in made:
                self._sockets.discard(sock)
            raise
        return tuple(made)

    def _bind(self, family: socket.AddressFamily, port: int) -> socket.socket:
        sock = self._sockets.take(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((_ANY[family], port))
            sock.listen(BACKLOG)
        except OSError:
            self._sockets.discard(sock)
            raise
        return sock

    def _bind_own(self, port: int) -> socket.socket:
        """Put a listener for all addresses in the place of the host's own."""
        new = self._sockets.take(socket.AF_INET)
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        is_dns = port == DNS_PORT
        old = self._sockets.dns_stream if is_dns else self._sockets.proxy
        self._listeners.remove(old)
        close_socket(old)
        self._sockets.discard(old)
        if is_dns:
            self._sockets.dns_stream = new
        else:
            self._sockets.proxy = new
        try:
            new.bind((_ANY[socket.AF_INET], port))
        except OSError:
            # The child has taken the port on some other address.
            new.bind((_LOOPBACK, port))
            new.listen(BACKLOG)
            self._serve(new)
            raise
        new.listen(BACKLOG)
        return new

    def _serve(self, sock: socket.socket) -> None:
        if self._handle is not None:
            self._listeners.add(sock, self._handle)
