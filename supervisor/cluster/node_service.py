"""A node actor at work: the link to its daemon, and the requests of its door.

It decides nothing: messages pass between the daemon, whose `Node` decides, and the
directory. Rules of this file.

1. Messages may be lost: while there is no link, those for the daemon are thrown away.
2. Of another node it asks only that node's actor, never the daemon there.
"""

from __future__ import annotations

import math
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
import trio

from hostlib.threads import in_thread
from supervisor.cluster import daemon_socket
from supervisor.cluster.daemon_socket import DaemonError, UnavailableDaemonError
from supervisor.cluster.requests import (
    FleetUnavailableError,
    Nothing,
    RequestError,
    Requests,
    read,
    result_of,
)
from supervisor.control.client import VERSION as CONTROL_VERSION
from supervisor.control.server import MAX_WAITING
from supervisor.fleet.link import (
    LEAVE_REQUEST,
    ActorReader,
    LinkArgs,
    LinkError,
    encode_frame,
    request_line,
)
from supervisor.fleet.messages import (
    VERSION,
    FromDirectory,
    Joined,
    Refused,
    Renewed,
    decode_from_directory,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from hostlib.log import Log
    from supervisor.cluster.orders import NodeOrder

RELINK_S = 0.1
"""Time from a lost link to the next attempt; children live 4 s without a link."""

MOST_WAITING = 10_000
"""Most messages that wait for a daemon; further ones are dropped, and sent again."""

MOST_READERS = MAX_WAITING
"""Most streams that are read of this daemon at once: as many as it gives."""

READER_S = 30.0
"""Time without a request of its reader after which a stream is closed."""

KEEP_S = READER_S / 3
"""Time between two signs of life for a stream: a pager takes its items slowly."""

MOST_ITEMS = 16
"""Most items of a stream that are kept for its reader, and given at once."""

LONGEST_READ_S = 5.0
"""Longest wait of one request for the next items of a stream."""

END_S = 0.5
"""Time until this process ends itself; the answer to that request leaves before."""


class FleetPeers(Protocol):
    """The other parts of the fleet, as a node actor reaches them.

    Each method raises `RequestError` where the other part refuses, `FleetUnavailableError`
    where it is not reached.
    """

    def send(self, messages: list[bytes]) -> None:
        """Send messages of the node to the directory; they may be lost."""
        ...

    async def ask_directory(self, do: str, args: bytes) -> bytes:
        """Return the directory's answer as JSON."""
        ...

    async def ask_node(self, node: str, do: str, args: bytes) -> bytes:
        """Return the answer of another node's actor as JSON."""
        ...


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `control` and `open-stream`: a request to the node's daemon."""

    do: str
    args: dict[str, Any] = {}


class ReadStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `read-stream`, `keep-stream` and `close-stream`."""

    stream: int
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_READ_S)] = LONGEST_READ_S


class StreamItems(msgspec.Struct, frozen=True):
    """The answer of `read-stream`: the next items, and whether no more will come."""

    items: tuple[msgspec.Raw, ...]
    is_over: bool


class JoinState(msgspec.Struct, frozen=True):
    """The answer of `join-state`: how far the node has come into the fleet.

    Attributes:
        is_up: the directory has it as a member.
        reason: why it is none.
        is_final: that will not change by itself.
    """

    is_up: bool
    reason: str = ""
    is_final: bool = False

    def refusal(self, node: str) -> str:
        """Return why a node is no member, as a sentence that names it."""
        if self.reason.startswith("cannot "):
            return self.reason
        return f"cannot join as {node!r}: {self.reason}"


class NodeService:
    """One node actor, in the loop of its process.

    Args:
        order: the node, and its daemon.
        others: the directory and the other node actors.
        log: for what cannot be told to anybody.
        end_ray: ends what runs of Ray for this node, this process too, soon.
    """

    def __init__(
        self,
        order: NodeOrder,
        others: FleetPeers,
        log: Log,
        end_ray: Callable[[], None],
    ) -> None:
        self.order = order
        self.name = order.node
        self.others = others
        self._labels = order.labels
        self._control = order.control
        self._log = log
        self._to_daemon: trio.MemorySendChannel[FromDirectory] | None = None
        self._end_ray = end_ray
        self._refusal = ""
        self._state = JoinState(is_up=False, reason="its daemon has not answered yet")
        self._state_changed = trio.Event()
        self._may_link = trio.Event()
        self._may_link.set()
        self._readers: dict[int, _StreamReader] = {}
        self._last_reader = 0
        self._nursery: trio.Nursery | None = None
        handlers = {
            "join-state": self._join_state,
            "leave": self._leave,
            "end-ray": self._end,
            "control": self._ask_daemon,
            "open-stream": self._open_stream,
            "read-stream": self._read_stream,
            "keep-stream": self._keep_stream,
            "close-stream": self._close_stream,
        }
        self.answer = Requests("this node actor", handlers, (DaemonError,), log).answer

    async def run(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep the link and the streams until cancelled; started: it may be asked."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                try:
                    reason = await self._keep_link()
                except DaemonError as why:
                    reason = str(why)
                self._to_daemon = None
                if reason != self._refusal:
                    self._log.write("WARNING", f"No link to the daemon: {reason}")
                self._refusal = reason
                self._set_state(JoinState(is_up=False, reason=reason, is_final=True))
                await trio.sleep(RELINK_S)
                await self._may_link.wait()

    def _set_state(self, state: JoinState) -> None:
        self._state = state
        self._state_changed.set()
        self._state_changed = trio.Event()

    # The link

    async def _keep_link(self) -> str:
        """Pass messages until the link ends; return why.

        Raises:
            DaemonError: no daemon listens.
        """
        async with daemon_socket.connected(self._control) as stream:
            async with trio.open_nursery() as nursery:
                try:
                    reason = await self._read_link(stream, nursery)
                except LinkError as why:
                    reason = str(why)
                except trio.BrokenResourceError:
                    reason = "the daemon has cut the link"
                nursery.cancel_scope.cancel()
        return reason

    async def _read_link(self, stream: trio.SocketStream, nursery: trio.Nursery) -> str:
        """Send what the daemon says to the directory, until it says no more.

        Raises:
            LinkError: the daemon refuses, or does not keep to the form.
        """
        args = LinkArgs(self.name, self._labels, ray=self.order.ray)
        await stream.send_all(request_line(args, CONTROL_VERSION))
        reader = ActorReader()
        while data := await daemon_socket.receive(stream):
            messages = reader.feed(data)
            if reader.answer is not None and self._to_daemon is None:
                self._set_state(
                    JoinState(is_up=False, reason="the directory does not answer")
                )
                send, waiting = trio.open_memory_channel[FromDirectory](MOST_WAITING)
                self._to_daemon, self._refusal = send, ""
                nursery.start_soon(_write, stream, waiting)
            if messages:
                self.others.send([encode(one) for one in messages])
        return "the daemon has closed the link"

    def deliver(self, messages: list[bytes]) -> None:
        """Take messages of the directory for the daemon."""
        for data in messages:
            try:
                message = decode_from_directory(data)
                self._note_membership(message)
                if self._to_daemon is not None:
                    self._to_daemon.send_nowait(message)
            except msgspec.DecodeError as why:
                self._log.write("WARNING", f"cannot read the directory's: {why}")
            except (trio.WouldBlock, trio.BrokenResourceError):
                return

    def _note_membership(self, message: FromDirectory) -> None:
        if isinstance(message, (Joined, Renewed)):
            self._set_state(JoinState(is_up=True))
        elif isinstance(message, Refused):
            if self._state.is_final and not message.is_final:
                return  # of a beat that was on its way
            state = JoinState(
                is_up=False, reason=message.reason, is_final=message.is_final
            )
            self._set_state(state)

    # Requests

    async def _join_state(self, args: bytes) -> JoinState:
        """Return the state once it is up, or final, or nothing has changed for a time."""
        read(args, Nothing)
        with trio.move_on_after(LONGEST_READ_S):
            while not (self._state.is_up or self._state.is_final):
                await self._state_changed.wait()
        return self._state

    async def _leave(self, args: bytes) -> msgspec.Raw:
        """Have the daemon leave, and link it no more."""
        read(args, Nothing)
        if self._may_link.is_set():
            self._may_link = trio.Event()
        try:
            return await self._ask_own(LEAVE_REQUEST, {})
        except BaseException:  # one that is cancelled, too
            self._may_link.set()
            raise

    async def _end(self, args: bytes) -> None:
        read(args, Nothing)
        if self._nursery is not None:
            self._nursery.start_soon(self._end_soon)

    async def _end_soon(self) -> None:
        await trio.sleep(END_S)
        await in_thread(self._end_ray)

    async def _ask_daemon(self, args: bytes) -> msgspec.Raw:
        request = read(args, ControlRequest)
        return await self._ask_own(request.do, request.args)

    async def _ask_own(self, do: str, args: dict[str, Any]) -> msgspec.Raw:
        try:
            return await daemon_socket.ask(self._control, do, args)
        except UnavailableDaemonError as why:
            raise self._unavailable(why) from None

    def _unavailable(self, why: UnavailableDaemonError) -> FleetUnavailableError:
        return FleetUnavailableError(f"cannot ask node {self.name!r}: {why}")

    async def _open_stream(self, args: bytes) -> int:
        request = read(args, ControlRequest)
        if self._nursery is None or len(self._readers) >= MOST_READERS:
            raise FleetUnavailableError(
                f"cannot read {request.do!r}: {MOST_READERS} streams of this node are"
                " read already; end one first"
            )
        self._last_reader += 1
        number = self._last_reader
        reader = _StreamReader()
        self._readers[number] = reader
        self._nursery.start_soon(self._fill, number, reader, request)
        return number

    async def _fill(
        self, number: int, reader: _StreamReader, request: ControlRequest
    ) -> None:
        try:
            with reader.scope:
                await reader.fill(
                    daemon_socket.items(self._control, request.do, request.args)
                )
        finally:
            del self._readers[number]

    async def _read_stream(self, args: bytes) -> StreamItems:
        request = read(args, ReadStream)
        reader = self._readers.get(request.stream)
        if reader is None:
            raise FleetUnavailableError(
                f"cannot read stream {request.stream}: it was closed; open it again"
            )
        try:
            return await reader.take(request.wait_s)
        except UnavailableDaemonError as why:
            raise self._unavailable(why) from None

    async def _keep_stream(self, args: bytes) -> None:
        """Note that a stream's reader is there; it still has items to take."""
        reader = self._readers.get(read(args, ReadStream).stream)
        if reader is not None:
            reader.renew()

    async def _close_stream(self, args: bytes) -> None:
        reader = self._readers.get(read(args, ReadStream).stream)
        if reader is not None:
            reader.scope.cancel()

    async def items(
        self, node: str, do: str, args: dict[str, Any]
    ) -> AsyncGenerator[msgspec.Raw, None]:
        """Yield the items of a stream of a node's daemon, until it ends.

        Raises:
            RequestError: it is refused, or the node is not reached any more.
        """
        opened = msgspec.json.encode(ControlRequest(do, args))
        stream = read(await self.ask(node, "open-stream", opened), int)
        words = msgspec.json.encode(ReadStream(stream))
        keeping = trio.CancelScope()
        if self._nursery is not None:
            self._nursery.start_soon(self._keep, keeping, node, words)
        is_over = False
        try:
            while not is_over:
                data = await self.ask(node, "read-stream", words)
                part = read(data, StreamItems)
                for item in part.items:
                    yield item
                is_over = part.is_over
        finally:
            keeping.cancel()
            if not is_over:
                # The node closes it by itself where this does not get through.
                with trio.move_on_after(1.0, shield=True):
                    with suppress(RequestError):
                        await self.ask(node, "close-stream", words)

    async def _keep(self, scope: trio.CancelScope, node: str, words: bytes) -> None:
        """Keep a stream of a node open until cancelled."""
        with scope:
            while True:
                await trio.sleep(KEEP_S)
                with suppress(RequestError):  # reading it tells that it is lost
                    await self.ask(node, "keep-stream", words)

    async def ask(self, node: str, do: str, args: bytes) -> bytes:
        """Return the answer of a node's actor as JSON; this one's own, too.

        Raises:
            RequestError: it is refused, or the node is not reached.
        """
        if node != self.name:
            return await self.others.ask_node(node, do, args)
        return result_of(await self.answer(VERSION, do, args))


class _StreamReader:
    """A stream of the daemon, and its items that were not asked for yet."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._send, self._items = trio.open_memory_channel[msgspec.Raw](MOST_ITEMS)
        self._error: DaemonError | None = UnavailableDaemonError("its stream was cut")
        self._is_taking = False
        self.renew()

    def renew(self) -> None:
        """Stay open for `READER_S` from now on."""
        self.scope.deadline = (
            math.inf if self._is_taking else trio.current_time() + READER_S
        )

    async def fill(self, items: AsyncGenerator[msgspec.Raw, None]) -> None:
        """Keep items until the stream is over and they were taken."""
        async with self._send:
            try:
                async with aclosing(items):
                    async for item in items:
                        await self._send.send(item)
            except DaemonError as why:
                self._error = why
            else:
                self._error = None
        # Until its reader has seen the end.
        await trio.sleep_forever()

    async def take(self, wait_s: float) -> StreamItems:
        """Return the next items; none where none has come meanwhile.

        Raises:
            DaemonError: no more will come, for the daemon refused, or was not reached.
        """
        self._is_taking = True
        self.renew()
        found: list[msgspec.Raw] = []
        is_over = False
        try:
            with trio.move_on_after(wait_s):
                found.append(await self._items.receive())
            while len(found) < MOST_ITEMS:
                found.append(self._items.receive_nowait())
        except trio.WouldBlock:
            pass
        except trio.EndOfChannel:
            is_over = self._error is None or not found
        finally:
            self._is_taking = False
            self.renew()
        if is_over:
            self.scope.cancel()
            if self._error is not None:
                raise self._error
        return StreamItems(tuple(found), is_over)


async def _write(
    stream: trio.SocketStream, messages: trio.MemoryReceiveChannel[FromDirectory]
) -> None:
    with suppress(trio.BrokenResourceError):  # its reader sees the end
        async for message in messages:
            await stream.send_all(encode_frame(message))
