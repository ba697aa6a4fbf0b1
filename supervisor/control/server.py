"""The control socket: a host answers those who may ask, one JSON line each way.

1. SO_PEERCRED decides: the host's own user, or root.
2. A question is at most ``LINE_BYTES`` and ``DEADLINE_S`` long; then a connection may
   idle. Of too many connections the one that idles longest is closed.
3. Answers are made one at a time, in slices: a client's READ waits for one slice.
4. An order or stream has a connection of its own, and ends with its client. Streams and
   orders that wait have a bound of their own, so they keep no other order out. A client
   that does not read waits in its own send, without a buffer.
5. An order begins only while its client is there; journal and log name it.
6. Such a connection gets a space every ``BEAT_S``: silence means a hanging host.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from hostlib.listener import OUT_OF_RESOURCES, Server, make_room
from hostlib.log import place_of
from hostlib.messages import printable
from hostlib.readiness import wait_readable
from hostlib.unix_listener import identity_of, listen_at, listen_on
from supervisor.control.answers import Answers
from supervisor.control.client import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostlib.journal import Journal
    from hostlib.log import Log
    from supervisor.host import Host

LINE_BYTES = 65_536
"""Longest question: as long as a request line on FD 3."""

DEADLINE_S = 10.0
"""Longest time from the first byte of a question until its answer is taken."""

MAX_CONNECTIONS = 16
"""Most connections; a question needs one for a few milliseconds."""

MAX_ORDERS = 64
"""Most orders at the same time, without those that wait."""

MAX_WAITING = 256
"""Most streams and orders that wait at the same time."""

BEAT_S = 3.0
"""Time between two heart-beats; a client waits for more than three of them."""

READING = frozenset({"logs", "events", "workspace-patch", "workspace-export"})
"""Streams that change nothing: the journal omits them."""

_ERROR_CHARS = 10_000
"""Longest error: a fault of a configuration names two paths of up to 4,096 bytes
each."""
_RECEIVE_BYTES = 4096
_UCRED = struct.Struct("3i")  # unix(7): pid, uid, gid
_ENCODER = msgspec.json.Encoder()
_NAME_CHARS = 64  # of a child's name: the longest that is one


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """One question on the wire."""

    v: int
    do: str
    args: dict[str, Any] = {}


class OrderError(Exception):
    """An order that cannot be done; the text says why."""


class UnavailableOrderError(OrderError):
    """An order that cannot be done now; the same may be given again."""


Order = Callable[[dict[str, Any]], Awaitable[object]]
"""Does an order and returns a result; raises ``OrderError``."""

Serve = Callable[[trio.SocketStream, bytes], Awaitable[None]]
"""Has a connection from its answer on, with what came behind the question."""

Link = Callable[[dict[str, Any]], tuple[object, Serve]]
"""Returns an order's result, and the function that serves its connection; raises
``OrderError``."""

Send = Callable[[object], Awaitable[None]]
Stream = Callable[[dict[str, Any], Send], Awaitable[None]]
"""Sends items until it ends; raises ``OrderError``."""


class ConnectionKind(Enum):
    """The kinds of what has a connection of its own."""

    ORDER = "orders"
    WAITING = "streams and waiting orders"
    LINK = "links"


_MOST = {ConnectionKind.ORDER: MAX_ORDERS, ConnectionKind.WAITING: MAX_WAITING}
"""Links have no bound here: a daemon has one, and refuses others."""


@dataclass(slots=True)
class Orders:
    """The orders and streams of a control socket; empty for an embedded host.

    Attributes:
        orders: change something, and may take long.
        waiting: those that wait for something else; they count as streams do.
        streams: send items.
        links: take a connection over, with bytes of their own both ways.
        stats: functions whose figures are added to ``stats``.
        reading: by order or stream, returns whether its arguments change nothing.
        listener: (descriptor, identity of the socket's file if the host made it), while
            the socket is served.
    """

    orders: dict[str, Order] = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()
    streams: dict[str, Stream] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    stats: list[Callable[[], dict[str, object]]] = field(default_factory=list)
    reading: dict[str, Callable[[dict[str, Any]], bool]] = field(default_factory=dict)
    listener: tuple[int, tuple[int, int] | None] | None = None

    def kind_of(self, do: str, arguments: dict[str, Any]) -> ConnectionKind | None:
        """Return what bounds a request; None if it is no order, stream or link.

        A stream that changes something, such as a stop, counts as an order.
        """
        if do in self.links:
            return ConnectionKind.LINK
        is_read = do in self.streams and self.is_reading(do, arguments)
        if is_read or do in self.waiting:
            return ConnectionKind.WAITING
        return ConnectionKind.ORDER if do in self.orders or do in self.streams else None

    def is_reading(self, do: str, arguments: dict[str, Any]) -> bool:
        """Return whether an order or a stream changes nothing."""
        tell = self.reading.get(do)
        return do in READING if tell is None else tell(arguments)


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A socket that listens already, from the service manager or the program before.

    Attributes:
        sock: owned by the server.
        identity: identifies its file, if the host has to remove it.
    """

    sock: socket.socket
    identity: tuple[int, int] | None = None


async def serve_control(
    host: Host,
    path: str,
    orders: Orders | None = None,
    given: ListeningSocket | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a host's control socket until cancelled; then its file is removed.

    Args:
        host: answers.
        path: the path of the socket; its directory must exist.
        orders: its orders and streams.
        given: a socket that listens already; None for one of its own.
        task_status: started when the socket accepts connections.

    Raises:
        OSError: the socket cannot be made; ``filename`` is the path, ``strerror`` the
            reason and the remedy.
    """
    orders = orders or Orders()
    is_own = given is None or given.identity is not None
    own = (
        listen_at(path)
        if given is None
        else listen_on(given.sock, path, given.identity)
    )
    async with own as listener:
        server = ControlServer(host, listener, orders)
        server.answers = Answers(host, [server.row, *orders.stats]).known
        orders.listener = (
            listener.socket.fileno(),
            identity_of(path) if is_own else None,
        )
        host.holders.add(server.descriptors)
        try:
            task_status.started()
            await server.run()
        finally:
            host.holders.discard(server.descriptors)


class _Connection:
    """One connection.

    Attributes:
        refusal: the answer where it is not served; None if it is.
        kind: of its order, stream or link; None while it asks questions.
        idle_since: None while a question is under way.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.scope = trio.CancelScope()
        self.refusal: bytes | None = None
        self.kind: ConnectionKind | None = None
        self.idle_since: float | None = trio.current_time()


class Recorder(Protocol):
    """Where a server writes what was ordered, and its faults: a host has both."""

    @property
    def journal(self) -> Journal:
        """For events."""
        ...

    @property
    def log(self) -> Log:
        """For lines."""
        ...


class ControlServer:
    """The connections of a control socket, and their orders.

    Args:
        host: whose log and journal are written.
        listener: owned by the caller.
        orders: the handlers of orders and streams.

    Attributes:
        answers: the functions that answer at once, by question.
    """

    def __init__(
        self, host: Recorder, listener: trio.SocketListener, orders: Orders
    ) -> None:
        self.answers: dict[str, Callable[[], Awaitable[object]]] = {}
        self._host = host
        self._orders = orders
        self._listener = listener
        self._server = Server(
            listener, self._enter, self._serve, host.log, "the control socket"
        )
        self._answering = trio.Lock()  # rule 3

    def row(self) -> dict[str, object]:
        """Return the fields of ``stats`` about the socket."""
        served = [one for one in self._server.connections if one.refusal is None]
        return {"control_connections": len(served)}

    def descriptors(self) -> Iterable[tuple[int, str]]:
        """Yield the server's descriptors of the host."""
        yield self._listener.socket.fileno(), "control socket"
        for fd in self._server.descriptors():
            yield fd, "control connection"

    async def run(self) -> None:
        """Accept connections and serve them until cancelled."""
        await self._server.run()

    def _enter(self, stream: trio.SocketStream) -> _Connection:
        """Return a new connection; close an idle one for it, or set its refusal."""
        connection = _Connection(stream)
        asking = [
            one
            for one in self._server.connections
            if one.refusal is None and one.kind is None
        ]
        if not _may_ask(stream):
            connection.refusal = _error("it answers its own user and root only")
        elif len(asking) >= MAX_CONNECTIONS and make_room(asking) is None:
            text = f"it has {MAX_CONNECTIONS} questions to answer; try again"
            connection.refusal = _error(text, is_unavailable=True)
        return connection

    async def _serve(self, connection: _Connection) -> None:
        if connection.refusal is None:
            await self._converse(connection)
            return
        with trio.move_on_after(DEADLINE_S):
            await connection.stream.send_all(connection.refusal)

    async def _converse(self, connection: _Connection) -> None:
        stream = connection.stream
        pending = bytearray()
        while True:
            connection.idle_since = trio.current_time()
            if not pending and not await _receive(stream, pending):
                return
            connection.idle_since = None
            with trio.fail_after(DEADLINE_S):
                line = await _receive_line(stream, pending)
                if line is None:
                    return
                reply, question = _understand(line)
                kind = None if question is None else self._kind_of(question)
                if question is not None and kind is None:
                    reply = await self._reply(question)
                if reply is not None:
                    await stream.send_all(reply)
            if question is None:
                return
            if kind is not None:
                await self._take_time(connection, kind, question, bytes(pending))

    def _kind_of(self, question: Question) -> ConnectionKind | None:
        if question.v != VERSION:
            return None
        return self._orders.kind_of(question.do, question.args)

    async def _reply(self, question: Question) -> bytes:
        """Answer a question."""
        if question.v != VERSION:
            said = f"it speaks version {VERSION}, not {question.v}"
            return _error(f"{said}; use its own sandhost")
        answer = self.answers.get(question.do)
        if answer is None:
            orders = self._orders
            known = ", ".join(
                (*self.answers, *orders.orders, *orders.streams, *orders.links)
            )
            hint = "" if orders.orders else "; orders are for `sandhost serve`"
            return _error(f"it does not know {question.do!r}, only {known}{hint}")
        try:
            async with self._answering:
                result = await answer()
        except Exception as why:  # noqa: BLE001 - children outlive a fault of an answer
            return self._fault(question, why)
        return _result(result)

    def _fault(self, question: Question, why: Exception) -> bytes:
        """Write a fault to the log; return the answer for the client."""
        self._host.log.write("ERROR", f"Fault doing {question.do!r}: {place_of(why)}")
        if isinstance(why, OSError) and why.errno in OUT_OF_RESOURCES:
            text = f"it cannot now: {why.strerror}; try again"
            return _error(text, is_unavailable=True)
        return _error(f"internal error: {type(why).__name__}; see the host's log")

    async def _take_time(
        self,
        connection: _Connection,
        kind: ConnectionKind,
        question: Question,
        behind: bytes,
    ) -> None:
        """Do an order or send a stream until its client is gone (rule 4).

        Args:
            connection: on which it was asked.
            kind: of what was asked.
            question: of the client.
            behind: bytes that came with it.
        """
        stream = connection.stream
        most = _MOST.get(kind, math.inf)
        if sum(one.kind is kind for one in self._server.connections) >= most:
            text = f"it has {most} {kind.value} under way; end one, or try again"
            await stream.send_all(_error(text, is_unavailable=True))
            return
        connection.kind = kind
        if not self._is_wanted(stream, question):
            connection.scope.cancel()
            return
        if kind is ConnectionKind.LINK:
            with suppress(trio.BrokenResourceError, trio.TooSlowError):
                await self._link(stream, question, behind)
            connection.scope.cancel()
            return
        sender = _Sender(stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_end, stream, nursery.cancel_scope)
            nursery.start_soon(sender.beat)
            # Caught here: exceptions leave a nursery in a group.
            with suppress(trio.BrokenResourceError, trio.TooSlowError):
                refusal = await self._attempt(sender, question)
                if refusal is not None:
                    with trio.move_on_after(DEADLINE_S):
                        await sender.send(refusal)
            nursery.cancel_scope.cancel()
        # A connection serves one long order or stream.
        connection.scope.cancel()

    async def _link(
        self, stream: trio.SocketStream, question: Question, behind: bytes
    ) -> None:
        """Answer, and give the connection to what serves it until its other end is gone."""
        try:
            result, serve = self._orders.links[question.do](question.args)
        except (OrderError, msgspec.ValidationError) as why:
            with trio.fail_after(DEADLINE_S):
                await stream.send_all(_refusal(why))
            return
        with trio.fail_after(DEADLINE_S):
            await stream.send_all(_result(result))
        await serve(stream, behind)

    def _is_wanted(self, stream: trio.SocketStream, question: Question) -> bool:
        """Return whether the client is there; log and journal its order (rule 5)."""
        is_there = not _has_hung_up(stream)
        if self._orders.is_reading(question.do, question.args):
            return is_there
        pid, uid = _peer(stream)
        do, name = question.do, question.args.get("name")
        name = name[:_NAME_CHARS] if isinstance(name, str) else None
        event, level, said = "host.ordered", "INFO", "Order"
        if not is_there:
            event, level = "host.order_dropped", "WARNING"
            said = "Not done, its client is gone: order"
        self._host.journal.write(event, order=do, name=name, uid=uid, pid=pid)
        what = do if name is None else f"{do} {name}"
        text = f"{said} {what} of uid {uid}, pid {pid}"
        more = {} if name is None else {"child": name}
        self._host.log.write(level, text, order=do, **more, by_uid=uid, by_pid=pid)
        return is_there

    async def _attempt(self, sender: _Sender, question: Question) -> bytes | None:
        """Do an order or send a stream; return the answer of a refusal, if any."""
        try:
            await self._do(sender, question)
        except (trio.BrokenResourceError, trio.TooSlowError):
            raise  # gone, or too slow to get an answer
        except (OrderError, msgspec.ValidationError) as why:
            return _refusal(why)
        except Exception as why:  # noqa: BLE001 - children outlive a fault of an order
            return self._fault(question, why)
        return None

    async def _do(self, sender: _Sender, question: Question) -> None:
        order = self._orders.orders.get(question.do)
        if order is not None:
            result = await order(question.args)
            with trio.fail_after(DEADLINE_S):
                await sender.send(_result(result))
            return

        async def send(item: object) -> None:
            line = _ENCODER.encode({"v": VERSION, "item": item})
            await sender.send(line + b"\n")

        await self._orders.streams[question.do](question.args, send)
        await sender.send(_ENCODER.encode({"v": VERSION, "end": True}) + b"\n")


class _Sender:
    """The one writer of a connection with an order or a stream (rule 6)."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._sending = trio.Lock()

    async def send(self, data: bytes) -> None:
        """Send whole lines, or one heart-beat."""
        async with self._sending:
            await self._stream.send_all(data)

    async def beat(self) -> None:
        """Send heart-beats until cancelled; none during another send."""
        with suppress(trio.BrokenResourceError):
            while True:
                await trio.sleep(BEAT_S)
                if not self._sending.locked():
                    await self.send(b" ")


def _understand(line: bytes) -> tuple[bytes | None, Question | None]:
    """Return the question; or the refusal, after which the connection is closed."""
    if len(line) > LINE_BYTES:
        return _error(f"a question has at most {LINE_BYTES} bytes"), None
    try:
        return None, msgspec.json.decode(line, type=Question)
    except (ValueError, RecursionError) as why:
        return _error(f"that is no question: {why}"), None


async def _cancel_at_end(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancel when the other end is gone; discard all that it sends meanwhile."""
    with suppress(trio.BrokenResourceError):
        while await _receive(stream, bytearray()):
            pass
    scope.cancel()


def _result(result: object) -> bytes:
    return _ENCODER.encode({"v": VERSION, "ok": True, "result": result}) + b"\n"


def _refusal(why: OrderError | msgspec.ValidationError) -> bytes:
    return _error(str(why), is_unavailable=isinstance(why, UnavailableOrderError))


def _error(text: str, *, is_unavailable: bool = False) -> bytes:
    answer = {"v": VERSION, "ok": False, "error": printable(text[:_ERROR_CHARS])}
    if is_unavailable:
        answer["unavailable"] = True
    return _ENCODER.encode(answer) + b"\n"


def _peer(stream: trio.SocketStream) -> tuple[int, int]:
    """Return pid and uid of the process that connected."""
    credentials = stream.socket.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size
    )
    pid, uid, _ = _UCRED.unpack(credentials)
    return pid, uid


def _may_ask(stream: trio.SocketStream) -> bool:
    _, uid = _peer(stream)
    return uid in {0, os.geteuid()}


def _has_hung_up(stream: trio.SocketStream) -> bool:
    """Return whether the other end is closed, and does not only end its sending."""
    poll = select.poll()
    poll.register(stream.socket.fileno(), 0)  # POLLHUP is always reported (poll(2))
    return bool(poll.poll(0))


async def _receive(stream: trio.SocketStream, pending: bytearray) -> bool:
    """Receive more bytes; return False at the end of the stream."""
    await wait_readable(stream.socket)
    data = await stream.receive_some(_RECEIVE_BYTES)
    pending += data
    return bool(data)


async def _receive_line(stream: trio.SocketStream, pending: bytearray) -> bytes | None:
    """Return the next line without its LF.

    Returns:
        None at the end of the stream; more than ``LINE_BYTES`` where no LF is in them.
    """
    searched = 0
    while (end := pending.find(b"\n", searched)) < 0:
        searched = len(pending)
        if searched > LINE_BYTES:
            return bytes(pending)
        if not await _receive(stream, pending):
            return None
    line = bytes(pending[:end])
    del pending[: end + 1]
    return line
