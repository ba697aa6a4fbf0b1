"""Serving clients: at a unix socket for each child, at one TCP port for the host.

Rules of this file.

1. A connection is a task in the nursery of its listener, and ends with it.
2. A listener has ``MAX_CONNECTIONS`` at once.  For one more that makes room which has been
   there longest without a whole request; if none is, the one more is told that the
   server is busy.  So nobody shuts others out by connecting only.
3. Of those that are told so a listener has ``MAX_REFUSED`` at once, and one more if that
   was awaited when there was still room. A later one waits in the kernel's queue, where
   it takes no descriptor of the host.
4. A client that comes during an exchange waits in that queue for the next program, and
   there until all that was handed over has been entered.
5. On a listener that children share each has ``PER_CHILD`` connections that can last.

Sources: unix(7), RFC 9112.
"""

from __future__ import annotations

import _socket
import socket
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from hostlib.fairness import Share
from hostlib.listener import accept_socket, make_room
from protocol.toolexec.requests import BUSY, Exec, Notify, Replay
from supervisor.toolexec.connection import Connection
from supervisor.toolexec.slots import MAX_CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.toolexec.requests import Refusal, Request
    from supervisor.toolexec.context import Context
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.replies import Task

MAX_REFUSED = 8
"""Connections of one listener that are being told that it is busy: who reads that and
goes takes a millisecond, who does not holds its place for the wire's ``DRAIN_S``."""

PER_CHILD = MAX_CONNECTIONS // 4
"""Connections with an execution that one child has on a listener of all children: as
many as its executions by default.  The others, of which none lasts, are not counted, so
that it can always signal what it runs."""

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A machine that does not answer for half a minute is gone, with its client; connections
have this from their listener, tcp(7).  With output on its way to it the kernel gives up after
a quarter of an hour: TCP_USER_TIMEOUT would be quicker, and end who only reads slowly."""

NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
"""A piece of output does not wait until the one before is acknowledged; likewise."""


class Server:
    """One listener and its connections.

    Args:
        context: of the host's ToolExec.
        listener: owned.
        is_shared: all children come here, and not one.

    Attributes:
        connections: those that are served, by descriptor.
        heads: the turn in which the large heads that come here are parsed.
    """

    def __init__(
        self, context: Context, listener: trio.SocketListener, *, is_shared: bool
    ) -> None:
        self._context = context
        self._listener = listener
        self._is_shared = is_shared
        if listener.socket.family in {socket.AF_INET, socket.AF_INET6}:
            for option in (*KEEPALIVE, NO_DELAY):
                listener.socket.setsockopt(*option)
        self.heads = Share(context.heads)
        self.connections: dict[int, Connection] = {}
        self._lasting: dict[ChildExecutions, int] = {}
        self._refused: dict[int, Connection] = {}
        self._room = trio.Event()
        self._rested = trio.lowlevel.ParkingLot()  # one task at most
        self._nursery: trio.Nursery | None = None

    async def run(
        self, task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept and serve until cancelled."""
        # The same descriptor: what is accepted at it needs no stream of Trio's.
        beneath = self._listener.socket
        plain = _socket.socket(beneath.family, beneath.type, 0, beneath.fileno())
        places = self._context.places
        places.listeners += 1
        places.descriptors.hold(1)
        try:
            async with self._listener, trio.open_nursery() as self._nursery:
                task_status.started(self)
                await self._serve_in_turn(plain, self._nursery)
        finally:
            plain.detach()
            places.listeners -= 1
            places.descriptors.hold(-1)

    def go_on(self, connection: Connection, task: Task | None, unsent: bytes) -> None:
        """Go on with a connection of the program before; see ``Connection.serve``."""
        if self._nursery is None:
            raise RuntimeError("a server that does not run has no connections")
        number = self._take_place(connection)
        self._nursery.start_soon(self._own, connection, number, task, unsent)

    async def _serve_in_turn(
        self, plain: _socket.socket, nursery: trio.Nursery
    ) -> None:
        """Accept a connection and serve it, while another task accepts the next.

        So it is served at once, and not a turn of the loop later. A task that has
        served is the next to accept, and no task is made for that, if no other one
        waits for it.
        """
        while True:
            sock = await self._next_socket(plain)
            if not self._rested.unpark():
                nursery.start_soon(self._serve_in_turn, plain, nursery)
            await self._serve(sock)
            if self._rested:
                return
            await self._rested.park()

    async def _next_socket(self, plain: _socket.socket) -> socket.socket:
        await self._context.gate.wait_open()
        while len(self._refused) >= MAX_REFUSED and not self._can_make_room():
            self._room = trio.Event()
            await self._room.wait()
        return await accept_socket(plain, self._tell_of_shortage)

    async def _serve(self, sock: socket.socket) -> None:
        make = partial(_Shared, self) if self._is_shared else Connection
        connection = make(self._context, sock, self.heads)
        if self._has_place() or make_room(self.connections.values()) is not None:
            await self._own(connection, self._take_place(connection))
        else:
            await self._refuse(connection)

    def _has_place(self) -> bool:
        return self._context.places.has_one(len(self.connections))

    def _can_make_room(self) -> bool:
        among = self.connections.values()
        return self._has_place() or any(one.idle_since is not None for one in among)

    def _tell_of_shortage(self, why: OSError) -> None:
        if self._context.places.is_shortage_news():
            text = f"toolexec: cannot accept a connection: {why.strerror}"
            text = f"{text}; those that come wait"
            self._context.log("ERROR", text, reason=why.strerror)

    def _take_place(self, connection: Connection) -> int:
        """Count a connection before its task begins: more may be accepted until then."""
        number = connection.wire.sock.fileno()
        self.connections[number] = connection
        self._context.places.take(1)
        return number

    async def _own(
        self,
        connection: Connection,
        number: int,
        task: Task | None = None,
        unsent: bytes = b"",
    ) -> None:
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
    def lasting(self, owner: ChildExecutions) -> Iterator[bool]:
        """Hold a connection that lasts, if its child may have one more (rule 5)."""
        held = self._lasting.get(owner, 0)
        if held >= PER_CHILD:
            yield False
            return
        self._lasting[owner] = held + 1
        try:
            yield True
        finally:
            self._lasting[owner] -= 1
            if not self._lasting[owner]:
                del self._lasting[owner]

    @property
    def listener_fd(self) -> int:
        """The descriptor that it listens on."""
        return self._listener.socket.fileno()

    def everybody(self) -> Iterator[Connection]:
        """Yield its connections, those included that are told that it is busy."""
        yield from self.connections.values()
        yield from self._refused.values()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return (self.listener_fd, *self.connections, *self._refused)


class _Shared(Connection):
    """A connection of a listener that children share.

    Those that a program of this host hands to the next are not counted there: no more
    of them come.
    """

    def __init__(
        self, server: Server, context: Context, sock: socket.socket, heads: Share
    ) -> None:
        super().__init__(context, sock, heads)
        self._server = server

    async def _answer(self, request: Request) -> Refusal | None:
        owner = self._owner
        if owner is None or not isinstance(request, Exec | Replay | Notify):
            return await super()._answer(request)
        with self._server.lasting(owner) as is_admitted:
            return await super()._answer(request) if is_admitted else BUSY
