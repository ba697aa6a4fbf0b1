"""Connections that come to addresses of a child's names, and where each is to go.

A connection's target is the address and port it came to, independent of its bytes (spec
NET5): on 127.0.0.1 the child's DNS and its proxy, elsewhere a name's server.
"""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from supervisor.network.connections import Connection
from supervisor.network.proxy_server import ProxyServer
from supervisor.network.settings import DNS_PORT
from supervisor.network.sockets import own_end, reset_socket, send_at_once

if TYPE_CHECKING:
    import socket

    from supervisor.network.access import Access
    from supervisor.network.connections import Connections
    from supervisor.network.credential_server import CredentialServer
    from supervisor.network.dns_sockets import DnsSockets
    from supervisor.network.outbound import Outbound

LOOPBACK = IPv4Address("127.0.0.1")


class Forwarder:
    """Serves what one child connects to."""

    def __init__(
        self,
        access: Access,
        connections: Connections,
        outbound: Outbound,
        dns: DnsSockets,
        credentials: CredentialServer,
    ) -> None:
        self._access = access
        self._connections = connections
        self._outbound = outbound
        self._dns = dns
        self._proxy = ProxyServer(access, outbound)
        self._credentials = credentials

    async def serve(self, sock: socket.socket) -> None:
        """Serve a connection that was just accepted, and close it."""
        try:
            address, port = own_end(sock)
            send_at_once(sock)
        except OSError:  # it was reset before it was looked at
            reset_socket(sock)
            return
        if address == LOOPBACK and port == DNS_PORT:
            await self._dns.serve_connection(sock)
            return
        handle = self._forward
        if address == LOOPBACK and port == self._proxy.port:
            handle = self._proxy.serve
        name = self._access.pool.name_of(address)
        await self._connections.serve(Connection(sock, name or address, port), handle)

    async def _forward(self, connection: Connection) -> None:
        """Connect to the name that a connection came to, and pass bytes on."""
        host, port = connection.host, connection.port
        if not isinstance(host, str):
            host = connection.host = self._access.host_at(host, port)
        if self._credentials.answers_at(host, port):
            await self._credentials.serve(connection)
            return
        grant = self._access.decide(host, port)
        hello = b""
        if grant.checks_tls:
            hello = await self._outbound.read_hello(connection, grant)
        outer = await self._outbound.connect(connection)
        await self._outbound.join(connection, outer, hello)
