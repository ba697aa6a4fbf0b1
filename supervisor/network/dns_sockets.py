"""The sockets at which a child's DNS questions come (spec NET5).

1. Questions beyond the child's rate wait in the kernel's queue, which drops those that it
   has no room for: a flood costs the host a few looks a second.
2. Connections are few; one more takes the place of that which idles longest.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from hostlib.listener import contain_fault, make_room
from hostlib.readiness import wait_readable
from supervisor.network import dns
from supervisor.network.sockets import close_socket, receive, send_all

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from hostlib.log import Log
    from supervisor.network.access import Access
    from supervisor.network.notices import Notices
    from supervisor.network.pace import Pace

PAUSE_S = 0.02
"""How long a child that asks too fast waits: as long as 20 questions take to be earned."""

_BATCH = 8  # packets that are answered before others have their turn
_READ_BYTES = 8192


class DnsConnection:
    """A TCP connection of a child to its DNS.

    Attributes:
        sock: of it.
        scope: ends it.
        idle_since: when the last question was answered.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.scope = trio.CancelScope()
        self.idle_since: float | None = trio.current_time()


class DnsSockets:
    """Answers one child."""

    def __init__(
        self,
        access: Access,
        notices: Notices,
        log: Log,
        pace: Pace,
        *,
        has_v6: bool,
    ) -> None:
        self._pace = pace
        self._access = access
        self._notices = notices
        self._log = log
        self._server = dns.NameServer(access.pool, has_v6=has_v6)
        self._connections: set[DnsConnection] = set()

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    async def serve_datagrams(self, sock: socket.socket) -> None:
        """Answer questions that come by UDP, until cancelled.

        Args:
            sock: non-blocking; the caller's to close.
        """
        while True:
            await wait_readable(sock)
            await self._wait_for_turn()
            await self._pace.wait_turn()
            for _ in range(_BATCH):
                if self._is_too_fast() or not self._answer_datagram(sock):
                    break

    async def serve_connection(self, sock: socket.socket) -> None:
        """Answer questions of one connection, and close it."""
        is_full = len(self._connections) >= dns.MAX_CONNECTIONS
        if is_full and make_room(self._connections) is None:
            close_socket(sock)
            return
        connection = DnsConnection(sock)
        self._connections.add(connection)
        try:
            with (
                contain_fault(self._log, "a child's DNS"),
                connection.scope,
                suppress(OSError, ValueError),
            ):
                await self._converse(connection)
        finally:
            self._connections.discard(connection)
            close_socket(sock)

    def descriptors(self) -> Iterator[int]:
        """Yield what the connections hold of the host's descriptors."""
        yield from (connection.sock.fileno() for connection in self._connections)

    async def _converse(self, connection: DnsConnection) -> None:
        sock = connection.sock
        reader = dns.QuestionReader()
        deadline = trio.current_time() + dns.IDLE_S
        while True:
            data = b""
            with trio.move_on_at(deadline):
                data = await receive(sock, _READ_BYTES)
            if not data:
                return
            reader.receive(data)
            while (packet := reader.next_question()) is not None:
                connection.idle_since = None
                await self._wait_for_turn()
                answer = self._answer(packet)
                deadline = trio.current_time() + dns.IDLE_S
                with trio.move_on_at(deadline) as scope:
                    await send_all(sock, dns.frame(answer) if answer else b"")
                if scope.cancelled_caught:
                    return
            connection.idle_since = trio.current_time()

    def _answer_datagram(self, sock: socket.socket) -> bool:
        """Answer the next packet, malformed ones too; tell whether there was one."""
        try:
            packet, peer = sock.recvfrom(dns.MAX_QUESTION_BYTES + 1)
        except BlockingIOError:
            return False
        except OSError:
            return True  # an answer before did not arrive
        with contain_fault(self._log, "a child's DNS"):
            answer = self._answer(packet)
            if answer is not None:
                with suppress(OSError):  # it is lost, as packets are
                    sock.sendto(answer, peer)
        return True

    def _answer(self, packet: bytes) -> bytes | None:
        answer = self._server.answer(packet, self._access.rules, trio.current_time())
        if answer.refused is not None:
            self._notices.tell_refused(answer.name, None, answer.refused)
        return answer.packet

    def _is_too_fast(self) -> bool:
        return self._server.is_used_up(trio.current_time())

    async def _wait_for_turn(self) -> None:
        """Wait while the child asks faster than it is answered."""
        while self._is_too_fast():  # noqa: ASYNC110 - it is time that earns a turn
            await trio.sleep(PAUSE_S)
