"""The way of a child's request to a connection: rules, ClientHello, addresses.

1. Nothing is dialled before all of it was allowed, by the rules of that moment.
2. The addresses that are dialled are those that were judged: no name is looked up
   between (spec NET6).
3. Behind a proxy of the host's own the proxy resolves names, and NET3 is its affair;
   addresses that a child names itself are judged here all the same.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from supervisor.network import clienthello
from supervisor.network.access import DeniedError
from supervisor.network.addresses import PRIVATE, closed_ranges
from supervisor.network.clienthello import HelloError, HelloReader
from supervisor.network.connections import UnreachableError
from supervisor.network.dialer import dial, dial_through
from supervisor.network.reasons import NetworkRefusal, Reason
from supervisor.network.resolver import THREADS_PER_CHILD, ResolverError
from supervisor.network.rule import TLS_PORT
from supervisor.network.rules import Grant
from supervisor.network.sockets import receive, reset_socket
from supervisor.network.tunnel import READ_BYTES, Tunnel
from supervisor.network.used_rules import UsedRules

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from supervisor.network.access import Access
    from supervisor.network.connections import Connection, Connections
    from supervisor.network.hosts import Address
    from supervisor.network.resolver import Resolver
    from supervisor.network.settings import NetworkSettings
    from supervisor.network.tunnel import Filter, Pipes
    from supervisor.network.used_rules import LearnedState

CONNECT_TIMEOUT_S = 30.0
"""Longest look-up and connect, all addresses together."""


class Outbound:
    """Makes the connections of one child.

    Attributes:
        learned: the uses in the mode `learn`; else None.
    """

    def __init__(
        self,
        settings: NetworkSettings,
        access: Access,
        connections: Connections,
        resolver: Resolver,
        pipes: Pipes,
        used: LearnedState | None = None,
    ) -> None:
        self._upstream = settings.upstream
        self._access = access
        self._connections = connections
        self._resolver = resolver
        self._pipes = pipes
        self._look_ups = trio.CapacityLimiter(THREADS_PER_CHILD)
        self.learned = UsedRules(used) if settings.mode == "learn" else None

    def is_allowed(self, connection: Connection) -> bool:
        """Tell whether a connection that was made would be made now."""
        try:
            grant = self._access.decide(connection.host, connection.port)
            self._judge_addresses(connection, grant)
            self._check_hello(connection, grant)
        except (DeniedError, UnreachableError):
            return False
        return True

    async def check(self, connection: Connection, deadline_s: float) -> None:
        """Look a connection's host up, and judge what is known before its bytes.

        Args:
            connection: of the child.
            deadline_s: of the look-up, by Trio's clock.

        Raises:
            DeniedError: it is not allowed.
            UnreachableError: it is not known what the name stands for.
        """
        with self._attempt(connection, deadline_s):
            await self._check(connection)

    async def read_hello(
        self, connection: Connection, grant: Grant, data: bytes = b""
    ) -> bytes:
        """Return what a child sends first, up to the end of its ClientHello (NET7).

        Args:
            connection: its name is noted.
            grant: the rules that allow the connection.
            data: bytes that were read already.

        Raises:
            DeniedError: it is no ClientHello, or for a name that is not allowed.
            OSError: the child has reset the connection.
        """
        reader = HelloReader()
        try:
            with trio.move_on_after(clienthello.TIMEOUT_S):
                sni = reader.receive(data) if data else None
                while sni is None:
                    sni = reader.receive(await receive(connection.inner, READ_BYTES))
                connection.sni = sni
        except HelloError as why:
            refused = NetworkRefusal(why.reason)
            raise DeniedError(connection.host, connection.port, refused) from None
        self._check_hello(connection, grant)
        return bytes(reader.held)

    async def connect(
        self, connection: Connection, deadline_s: float | None = None
    ) -> socket.socket:
        """Return a connection to the host that a child asks for; the caller's.

        Args:
            connection: of the child.
            deadline_s: by Trio's clock; None for `CONNECT_TIMEOUT_S` from now.

        Raises:
            DeniedError: it is not allowed.
            UnreachableError: it cannot be had.
        """
        if deadline_s is None:
            deadline_s = trio.current_time() + CONNECT_TIMEOUT_S
        with self._attempt(connection, deadline_s):
            grant = await self._check(connection)
            self._check_hello(connection, grant)
            try:
                outer = await self._dial(connection)
            except OSError as why:
                raise UnreachableError(_symbol(why)) from None
        self._note_use(connection)
        return outer

    async def join(
        self,
        connection: Connection,
        outer: socket.socket,
        first: bytes = b"",
        outgoing: Filter | None = None,
    ) -> None:
        """Pass bytes on until both sides have ended; both are closed.

        Args:
            connection: of the child.
            outer: connected to its host; owned.
            first: bytes that the child has sent already.
            outgoing: sees all of it, where it has to be seen.

        Raises:
            TunnelError: the child may not send or receive more.
        """
        if outgoing is None and self._is_to_be_learned(connection):
            outgoing = _HelloWatch(self._note_tls, connection)
        try:
            await self._connections.pace.wait_turn()
        except trio.Cancelled:
            reset_socket(outer)
            raise
        with self._connections.counted(connection) as meter:
            tunnel = Tunnel(connection.inner, outer, meter, self._pipes)
            await tunnel.run(first, outgoing)

    @contextmanager
    def _attempt(self, connection: Connection, deadline_s: float) -> Iterator[None]:
        """Bound the time of what is done inside, and note a use that fails (NET13)."""
        try:
            with trio.fail_at(deadline_s):
                yield
        except trio.TooSlowError:
            self._note_use(connection)
            raise UnreachableError(errno.errorcode[errno.ETIMEDOUT]) from None
        except UnreachableError:
            self._note_use(connection)
            raise

    async def _check(self, connection: Connection) -> Grant:
        self._access.decide(connection.host, connection.port)
        connection.addresses = await self._find(connection.target.host)
        # Anew, for the rules may have changed meanwhile.
        grant = self._access.decide(connection.host, connection.port)
        self._judge_addresses(connection, grant)
        return grant

    async def _find(self, host: str | Address) -> tuple[Address, ...]:
        if not isinstance(host, str):
            await trio.lowlevel.checkpoint()
            return (host,)
        if self._upstream is not None:
            await trio.lowlevel.checkpoint()
            return ()
        return await self._resolve(host)

    async def _resolve(self, name: str) -> tuple[Address, ...]:
        try:
            return await self._resolver.resolve(name, self._look_ups)
        except ResolverError as why:
            raise UnreachableError(why.reason) from None

    async def _dial(self, connection: Connection) -> socket.socket:
        upstream, asked = self._upstream, connection.target
        if upstream is None:
            return await dial(connection.addresses, asked.port, connection.outer)
        host = upstream.host
        addresses = await self._resolve(host) if isinstance(host, str) else (host,)
        return await dial_through(addresses, upstream.port, asked, connection.outer)

    def _judge_addresses(self, connection: Connection, grant: Grant) -> None:
        asked = connection.target
        if self._upstream is not None and isinstance(asked.host, str):
            return
        if connection.server is not None:  # its own rule says what it may stand for
            grant = Grant(asked.port, (connection.server,))
        try:
            self._access.check_answer(grant, asked.host, connection.addresses)
        except OSError as why:  # the host's own addresses are not known
            raise UnreachableError(_symbol(why)) from why

    def _check_hello(self, connection: Connection, grant: Grant) -> None:
        if not grant.checks_tls:
            return
        if connection.sni is None:
            refused = NetworkRefusal(Reason.TLS_NO_HELLO)
            raise DeniedError(connection.host, connection.port, refused)
        self._access.check_sni(grant, connection.host, connection.sni)

    def _note_use(self, connection: Connection) -> None:
        """Note what was allowed, for a child that learns (spec NET13)."""
        if self.learned is not None and connection.server is None:
            ranges = (
                closed
                for address in connection.addresses
                for closed in closed_ranges(address)
            )
            is_private = any(closed in PRIVATE for closed in ranges)
            self.learned.add(connection.host, connection.port, private=is_private)

    def _is_to_be_learned(self, connection: Connection) -> bool:
        """Tell whether it is not known yet that a connection speaks TLS to its name."""
        is_tls = isinstance(connection.host, str) and connection.port == TLS_PORT
        return self.learned is not None and is_tls and connection.sni is None

    def _note_tls(self, connection: Connection) -> None:
        if self.learned is not None:
            self.learned.add(connection.host, connection.port, any_tls=True)


def _symbol(why: OSError) -> str:
    return errno.errorcode.get(why.errno or 0, "EIO")


class _HelloWatch:
    """Looks whether a connection begins with a ClientHello for its name."""

    def __init__(
        self, note_other: Callable[[Connection], None], connection: Connection
    ) -> None:
        self._note_other = note_other
        self._connection = connection
        self._reader = HelloReader()
        self.is_needed = True

    def forward(self, data: bytes) -> bytes:
        """Return the bytes as they are."""
        if data and self.is_needed:
            try:
                sni = self._reader.receive(data)
            except HelloError:
                sni = ""
            if sni is not None:
                self.is_needed = False
                if sni != self._connection.host:
                    self._note_other(self._connection)
        return data
