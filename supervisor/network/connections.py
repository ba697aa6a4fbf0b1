"""The open connections of one child: their number, bytes and ends.

1. A connection counts from the moment it is accepted, against its child and every
   ancestor of it (spec NET14).
2. Whatever goes wrong with one resets that one, and is told by its name.
3. Bytes of a fleet child are passed on only while its lease is held (spec FL6).
"""

from __future__ import annotations

import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import trio

from hostlib.listener import contain_fault
from supervisor.fleet.fence import FencedError
from supervisor.network.access import DeniedError
from supervisor.network.proxy_dialogue import ProxyTarget
from supervisor.network.reasons import NetworkRefusal, Reason
from supervisor.network.sockets import close_socket, receive, reset_socket, send_all
from supervisor.network.tunnel import READ_BYTES, FilterError, MeterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from hostlib.accounts import Account
    from hostlib.log import Log
    from supervisor.network.hosts import Address
    from supervisor.network.notices import Notices
    from supervisor.network.pace import Pace
    from supervisor.network.rule import Rule
    from supervisor.network.traffic import ChildTraffic, ConnectionCounts

REPLY_TIMEOUT_S = 2.0
"""How long a program may take to read why it is refused."""
MAX_CONNECTIONS = 1024
"""Open connections of a child for which nothing else is said."""


class UnreachableError(Exception):
    """A host that is allowed, and cannot be connected to.

    Attributes:
        reason: the symbol of an error.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LeaseOverError(MeterError):
    """The lease of a fleet child is over; the text says so."""


class Connection:
    """A connection that a child has made, or one to a port that it publishes.

    Args:
        host: it is for; the address that it came to, before more is known.

    Attributes:
        scope: ends it, by reset.
        sni: the name in its ClientHello, where that was read.
        server: the server that is dialled in place of the host, if there is one.
        addresses: the addresses of the host or the server.
        outer: sockets to it; several while it is dialled.
        last_words: bytes for the child before the connection is closed.
    """

    def __init__(
        self,
        inner: socket.socket,
        host: str | Address,
        port: int,
        *,
        is_inbound: bool = False,
    ) -> None:
        self.inner = inner
        self.is_inbound = is_inbound
        self.host = host
        self.port = port
        self.scope = trio.CancelScope()
        self.sni: str | None = None
        self.server: Rule | None = None
        self.addresses: Sequence[Address] = ()
        self.outer: set[socket.socket] = set()
        self.last_words = b""

    @property
    def target(self) -> ProxyTarget:
        """The host and the port that are connected to."""
        if self.server is None:
            return ProxyTarget(self.host, self.port)
        return ProxyTarget(str(self.server.target), self.server.ports[0])


class ConnectionMeter:
    """Counts the bytes of one connection, and against what its child may have."""

    def __init__(
        self,
        counts: Sequence[ConnectionCounts],
        account: Account[int] | None,
        check_effect: Callable[[], None],
    ) -> None:
        self._counts = counts
        self._account = account
        self._check_effect = check_effect

    def add_received(self, size: int) -> None:
        """Count bytes for the child."""
        self._charge(size)
        for counts in self._counts:
            counts.bytes_in += size

    def add_sent(self, size: int) -> None:
        """Count bytes of the child."""
        try:
            self._check_effect()
        except FencedError as why:
            raise LeaseOverError(str(why)) from None
        self._charge(size)
        for counts in self._counts:
            counts.bytes_out += size

    def _charge(self, size: int) -> None:
        if self._account is not None and not self._account.charge(size):
            raise MeterError(Reason.LIMIT_NET_BYTES.value)


class Connections:
    """The table of those that are open.

    Args:
        places: the account of connections.
        size: the account of bytes; None for no bound.

    Attributes:
        pace: the same.
        check_effect: raises FencedError where the lease of a fleet child is over.
    """

    def __init__(
        self,
        traffic: ChildTraffic,
        notices: Notices,
        log: Log,
        pace: Pace,
        places: Account[int],
        size: Account[int] | None = None,
    ) -> None:
        self._traffic = traffic
        self._notices = notices
        self._log = log
        self.pace = pace
        self._places = places
        self._size = size
        self._open: dict[Connection, None] = {}
        self.check_effect: Callable[[], None] = _allow

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._open))

    @contextmanager
    def counted(self, connection: Connection) -> Iterator[ConnectionMeter]:
        """Count a connection that was made, while it is open.

        One that the child has made is counted by its host and port as well.
        """
        counts = [self._traffic.total]
        if not connection.is_inbound:
            counts.append(self._traffic.row(connection.host, connection.port))
        for row in counts:
            row.connections += 1
            row.open += 1
        try:
            yield ConnectionMeter(counts, self._size, self.check_effect)
        finally:
            for row in counts:
                row.open -= 1

    async def serve(
        self,
        connection: Connection,
        handle: Callable[[Connection], Awaitable[None]],
    ) -> None:
        """Serve a connection until it has ended; reset it if ``handle`` leaves it open."""
        try:
            self.check_effect()
        except FencedError as why:
            self._log.write("WARNING", f"Connection refused: {why}")
            reset_socket(connection.inner)
            return
        if not self._places.charge(1):
            refused = NetworkRefusal(Reason.LIMIT_CONNECTIONS)
            self._notices.tell_refused(connection.host, connection.port, refused)
            reset_socket(connection.inner)
            return
        self._open[connection] = None
        try:
            with contain_fault(self._log, "a child's connection"), connection.scope:
                await self.pace.wait_turn()
                await self._attempt(connection, handle)
                if connection.last_words:
                    await _take_leave(connection)
        finally:
            del self._open[connection]
            self._places.charge(-1)
            reset_socket(connection.inner)

    async def _attempt(
        self,
        connection: Connection,
        handle: Callable[[Connection], Awaitable[None]],
    ) -> None:
        try:
            await handle(connection)
        except DeniedError as why:
            self._notices.tell_refused(why.host, why.port, why.refused)
        except LeaseOverError as why:
            self._log.write("WARNING", f"Connection cut: {why}")
        except MeterError:
            refused = NetworkRefusal(Reason.LIMIT_NET_BYTES)
            self._notices.tell_refused(connection.host, connection.port, refused)
        except UnreachableError as why:
            self._notices.tell_failed(connection.host, connection.port, why.reason)
        except (OSError, FilterError):
            pass  # the child has reset it, or sent bytes that are left unread


def _allow() -> None:
    """Let all connections of a child that is in no fleet begin."""


async def _take_leave(connection: Connection) -> None:
    """Send the last words of a connection, and close it once they were read."""
    sock = connection.inner
    with trio.move_on_after(REPLY_TIMEOUT_S), suppress(OSError):
        await send_all(sock, connection.last_words)
        sock.shutdown(socket.SHUT_WR)
        # A close with bytes unread would be a reset, and take the words away.
        while await receive(sock, READ_BYTES):
            pass
        close_socket(sock)
