"""The server: a unix socket for each child, one TCP port for the host.

1. A connection is a task in its listener's nursery, and ends with it.
2. A listener has ``MAX_CONNECTIONS``. A new one replaces the oldest without a whole
   request; without such a one, it is refused: connecting alone excludes no other
   client.
3. A listener has ``MAX_REFUSED`` refusals, and one more that was awaited earlier; later
   clients wait in the kernel's queue, without a descriptor.
4. During an exchange, clients wait there for the next program and its restored state.
5. On a shared listener a child has ``PER_CHILD`` connections with an execution.

Sources: unix(7), RFC 9112.
"""

from __future__ import annotations

import _socket
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from hostlib.fairness import Share
from hostlib.listener import accept_socket, make_room
from protocol.toolexec.requests import BUSY
from supervisor.toolexec.connection import Connection, hold_no_place
from supervisor.toolexec.slots import MAX_CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.toolexec.context import Context
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.reply_task import Task

MAX_REFUSED = 8
"""Most connections of one listener that are being refused: a client that reads the
refusal leaves in a millisecond, another one holds its place for the wire's
``DRAIN_S``."""

PER_CHILD = MAX_CONNECTIONS // 4
"""Most connections with an execution that one child has on a shared listener: as many
as its executions by default. Others are short and not counted, so that it can always
signal its tools."""

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A machine that is silent for half a minute is gone; connections get this from their
listener, tcp(7). With output in flight the kernel gives up after a quarter of an hour:
TCP_USER_TIMEOUT would also end slow readers."""

NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
"""A piece of output does not wait for the last one's acknowledgement."""


class Server:
    """One listener and its connections.

    Args:
        context: of the host's ToolExec.
        listener: owned.
        is_shared: whether it serves all children.

    Attributes:
        is_shared: as above.
        connections: the served ones, by descriptor.
        heads: the turn for parsing large heads.
    """

    def __init__(
        self, context: Context, listener: trio.SocketListener, *, is_shared: bool
    ) -> None:
        self._context = context
        self._listener = listener
        self.is_shared = is_shared
        if listener.socket.family in {socket.AF_INET, socket.AF_INET6}:
            for option in (*KEEPALIVE, NO_DELAY):
                listener.socket.setsockopt(*option)
        self.heads = Share(context.heads)
        self.connections: dict[int, Connection] = {}
        self.places_held: dict[ChildExecutions, int] = {}
        self._refused: dict[int, Connection] = {}
        self._room = trio.Event()
        self.rested = trio.lowlevel.ParkingLot()  # one task at most
        self.nursery: trio.Nursery | None = None

    async def run(
        self, task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept and serve until cancelled."""
        # The same descriptor: accepted sockets need no stream of Trio's.
        beneath = self._listener.socket
        plain = _socket.socket(beneath.family, beneath.type, 0, beneath.fileno())
        places = self._context.places
        places.listeners += 1
        places.descriptors.hold(1)
        try:
            async with self._listener, trio.open_nursery() as self.nursery:
                task_status.started(self)
                await self._serve_in_turn(plain, self.nursery)
        finally:
            plain.detach()
            places.listeners -= 1
            places.descriptors.hold(-1)

    def resume_connection(
        self, connection: Connection, task: Task | None, unsent: bytes
    ) -> None:
        """Continue a connection of the program before; see ``Connection.serve``."""
        if self.nursery is None:
            raise RuntimeError("a server that does not run has no connections")
        # Before its task begins: others may be accepted until then.
        self._context.places.take(1)
        self.connections[connection.wire.sock.fileno()] = connection
        self.nursery.start_soon(self._own, connection, task, unsent)

    async def _serve_in_turn(
        self, plain: _socket.socket, nursery: trio.Nursery
    ) -> None:
        """Accept a connection and serve it, while another task accepts the next.

        It is served at once, and not a turn of the loop later, as it would be with
        ``hostlib.listener.Server`` (ADR 9). A task that has served accepts next if no
        other waits; so no new task is made.
        """
        while True:
            sock = await self._next_socket(plain)
            if not self.rested.unpark():
                nursery.start_soon(self._serve_in_turn, plain, nursery)
            await self._serve(sock)
            if self.rested:
                return
            await self.rested.park()

    async def _next_socket(self, plain: _socket.socket) -> socket.socket:
        await self._context.gate.wait_open()
        while len(self._refused) >= MAX_REFUSED and not self._can_make_room():
            self._room = trio.Event()
            await self._room.wait()
        return await accept_socket(plain, self._context.shortages.tell)

    async def _serve(self, sock: socket.socket) -> None:
        hold_place = self._hold_place if self.is_shared else hold_no_place
        connection = Connection(self._context, sock, self.heads, hold_place)
        places, among = self._context.places, self.connections
        if places.has_one(len(among)) or make_room(among.values()) is not None:
            places.take(1)
            among[sock.fileno()] = connection
            await self._own(connection)
        else:
            await self._refuse(connection)

    def _can_make_room(self) -> bool:
        among = self.connections
        return self._context.places.has_one(len(among)) or any(
            one.idle_since is not None for one in among.values()
        )

    async def _own(
        self, connection: Connection, task: Task | None = None, unsent: bytes = b""
    ) -> None:
        number = connection.wire.sock.fileno()
        try:
            await connection.serve(task, unsent)
        finally:
            del self.connections[number]
            self._context.places.take(-1)
            self._room.set()

    async def _refuse(self, connection: Connection) -> None:
        number = connection.wire.sock.fileno()
        self._refused[number] = connection
        self._context.places.descriptors.hold(1)
        try:
            await connection.refuse_at_once(BUSY)
        finally:
            del self._refused[number]
            self._context.places.descriptors.hold(-1)
            self._room.set()

    @contextmanager
    def _hold_place(self, owner: ChildExecutions) -> Iterator[bool]:
        """Hold a place for a request, if its child may have one more (rule 5)."""
        held = self.places_held.get(owner, 0)
        if held >= PER_CHILD:
            yield False
            return
        self.places_held[owner] = held + 1
        try:
            yield True
        finally:
            self.places_held[owner] -= 1
            if not self.places_held[owner]:
                del self.places_held[owner]

    @property
    def listener_fd(self) -> int:
        """The descriptor of the listener."""
        return self._listener.socket.fileno()

    def everybody(self) -> Iterator[Connection]:
        """Yield its connections, those under refusal included."""
        yield from self.connections.values()
        yield from self._refused.values()

    def descriptors(self) -> tuple[int, ...]:
        """Return its descriptors of the host."""
        return (self.listener_fd, *self.connections, *self._refused)
