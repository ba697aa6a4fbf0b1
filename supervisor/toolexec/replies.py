"""Replies with an execution: whole, as a stream, as a handle, as a notice.

A reply can begin at any stage of its task: a program of this host may continue the
reply of another one.

Rules of this file.

1. During a reply the client is watched: if it goes, the execution is ended, unless it
   is detached (spec E25).
2. Unsent bytes are in the task before a wait (``connection_state``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, assert_never

import msgspec
import trio

from protocol.toolexec import requests
from supervisor.toolexec.http_heads import chunked_head, trailer
from supervisor.toolexec.output.chunks import ChunkedReader
from supervisor.toolexec.output.log import PIECE_BYTES, Holder
from supervisor.toolexec.wire import Wire

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from hostlib.fairness import Share
    from protocol.toolexec.requests import Refusal
    from supervisor.toolexec.context import Context
    from supervisor.toolexec.execution import Execution
    from supervisor.toolexec.output.log import OutputLog


# The stage of a connection of ToolExec, from which another program can continue.
#
# It decides how a connection is handed over: by its received bytes, by its reply, or
# not yet.


class Moment(Enum):
    """The stage of a connection."""

    RECEIVING = "receiving"
    """Its request is not whole, or not begun."""

    BUSY = "busy"
    """It does a step that ends by itself."""

    WAITING = "waiting"
    """It waits for the end of its tool; no part of the reply is sent."""

    STREAMING = "streaming"
    """Output is sent as it comes."""

    SENDING = "sending"
    """A whole output is being sent."""

    LAST = "last"
    """The last bytes of the reply are being sent."""

    REFUSED = "refused"
    """The refusal was sent; further input is read and dropped for a while."""


class Kind(Enum):
    """The form of an execution's reply."""

    WHOLE = "whole"
    STREAM = "stream"
    HANDLE = "handle"
    NOTIFY = "notify"
    REPLAY = "replay"


class TaskState(msgspec.Struct):
    """The state of a ``Task``; (child, number) names the execution."""

    child: str
    number: int
    kind: str
    detach: bool
    as_fd: bool
    moment: str
    reader: tuple[int, bytes, int, bytes] | None
    before: bytes
    offset: int
    after: bytes


@dataclass(slots=True)
class Task:
    """The execution of a connection's reply.

    Attributes:
        execution: the replied one.
        kind: the form of the reply.
        detach: whether it goes on without the client.
        as_fd: whether the client takes a handle for a large output.
        moment: the stage of the reply.
        reader: sends a streamed output.
        before: sent before the bytes at ``offset``, for a whole output.
        offset: all output before it is sent, or in the kernel.
        after: sent after it.
    """

    execution: Execution
    kind: Kind
    detach: bool = False
    as_fd: bool = False
    moment: Moment = Moment.WAITING
    reader: ChunkedReader | None = None
    before: bytes = b""
    offset: int = 0
    after: bytes = b""

    def snapshot(self, child_id: str, number: int) -> TaskState:
        """Return its state for ``restore``; the arguments name its execution."""
        is_streaming = self.moment is Moment.STREAMING and self.reader is not None
        return TaskState(
            child=child_id,
            number=number,
            kind=self.kind.value,
            detach=self.detach,
            as_fd=self.as_fd,
            moment=self.moment.value,
            reader=self.reader.held() if is_streaming and self.reader else None,
            before=self.before,
            offset=self.offset,
            after=self.after,
        )

    @classmethod
    def restore(
        cls, state: TaskState, execution: Execution, sock: socket.socket
    ) -> Task:
        """Return the task of the program before.

        Args:
            state: its state.
            execution: the named one.
            sock: of the client.
        """
        kind, moment = Kind(state.kind), Moment(state.moment)
        task = cls(execution, kind, state.detach, state.as_fd, moment)
        task.before, task.offset, task.after = state.before, state.offset, state.after
        log = execution.log
        if state.reader is not None:
            task.reader = ChunkedReader.at(log, sock, state.reader)
        elif kind is Kind.STREAM:
            head = chunked_head(execution.id)
            task.reader = ChunkedReader(log, sock, before=head)
        if task.reader is not None:
            log.readers.add(task.reader)  # attached when its turn comes
        return task


HEAD_WAITS_S = 0.002
"""Longest wait of a stream's head for the first output, to be sent together: a quick
tool then costs its client one wake-up instead of three."""


class Replies:
    """A connection's replies with executions.

    Args:
        context: of the host's ToolExec.
        sock: non-blocking; owned.
        heads: see ``Wire``.

    Attributes:
        wire: the bytes of the connection.
        task: the present reply; None before and without one.
    """

    def __init__(self, context: Context, sock: socket.socket, heads: Share) -> None:
        self._context = context
        self.wire = Wire(sock, heads)
        self.task: Task | None = None

    async def _carry_out(self, task: Task) -> Refusal | None:
        """Reply with an execution, from the stage of its task on."""
        self.task = task
        try:
            if task.kind is Kind.STREAM:
                return await self._reply_stream(task)
            return await self._serve_watched(partial(self._answer_with, task))
        finally:
            self.task = None
            if not task.detach:
                task.execution.end()

    async def _answer_with(self, task: Task) -> Refusal | None:
        try:
            return await self._answer_from(task)
        except OSError as why:
            if task.moment is not Moment.BUSY:
                raise
            # Nothing was sent: the output cannot be read.
            fault = requests.host_fault(why.strerror or str(why))
            return _name_execution(task.execution, fault)

    async def _answer_from(self, task: Task) -> Refusal | None:
        if task.moment is Moment.SENDING:
            return await self._send_rest(task)
        match task.kind:
            case Kind.WHOLE:
                return await self._reply_whole(task)
            case Kind.HANDLE:
                return await self._reply_as_handle(task)
            case Kind.NOTIFY:
                return await self._reply_noticed(task)
            case Kind.REPLAY | Kind.STREAM:
                return await self._stream(task, task.reader or self._reader(task))
            case _:
                assert_never(task.kind)

    async def _serve_watched(
        self, serve: Callable[[], Awaitable[Refusal | None]]
    ) -> Refusal | None:
        """Serve while the client is there."""
        refusal = failure = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            try:
                refusal = await serve()
            except Exception as why:  # noqa: BLE001 - raised again, outside of the group
                failure = why
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return refusal

    async def _watch(self, scope: trio.CancelScope) -> None:
        await self.wire.wait_gone()
        scope.cancel()

    async def _reply_whole(self, task: Task) -> Refusal | None:
        execution = task.execution
        log = execution.log
        with log.attached(Holder()):
            await execution.finished.wait()
            task.moment = Moment.BUSY
            if execution.timed_out:
                return _name_execution(execution, requests.TIMEOUT)
            if execution.fault is not None:
                return _name_execution(execution, requests.host_fault(execution.fault))
            code = execution.code or 0
            headers = [_exec_id(execution)]
            handle = await self._make_handle(task)
            if handle is not None:
                task.moment = Moment.LAST
                await self.wire.reply(200, handle, code, headers)
                return None
            before, after = await self._make_frame(log)
            length = len(before) + log.end + len(after)
            head = self.wire.head(200, length, code, headers)
            task.before, task.after = head + before, after
            return await self._send_rest(task)

    async def _send_rest(self, task: Task) -> Refusal | None:
        """Send the rest of a whole output."""
        task.moment = Moment.SENDING
        self.wire.make_room()
        log = task.execution.log
        with log.attached(Holder()):
            while task.offset < log.end:
                data = await log.read(task.offset, PIECE_BYTES)
                task.offset += len(data)
                before, task.before = task.before, b""
                await self.wire.send(before, data)
            last, task.before, task.after = task.before + task.after, b"", b""
            await self.wire.send(last)
        return None

    async def _make_frame(self, log: OutputLog) -> tuple[bytes, bytes]:
        """Return the frame of a whole output from a verbose server."""
        if not self._context.settings.verbose:
            return b"", b""
        if not log.end:
            return b"\n", b""
        first, last = await log.read(0, 1), await log.read(log.end - 1, 1)
        return (
            b"" if first in b"\r\n" else b"\n",
            b"" if last in b"\r\n" else b"\n",
        )

    async def _reply_as_handle(self, task: Task) -> Refusal | None:
        """Stream the handle of an output, or the output, once it is complete."""
        execution = task.execution
        log = execution.log
        with log.attached(Holder()):
            if task.reader is not None:
                return await self._stream(task, task.reader)
            await execution.finished.wait()
            task.moment = Moment.BUSY
            if execution.fault is not None:
                return _name_execution(execution, requests.host_fault(execution.fault))
            handle = await self._make_handle(task)
            if handle is None:
                return await self._stream(task, self._reader(task))
            parts = [chunked_head(execution.id), *_chunk(handle)]
            end = execution.output_end
            if end < log.end:
                parts += _chunk(await log.read(end, log.end - end))
            task.moment = Moment.LAST
            await self.wire.send(*parts, trailer(execution.code or 0))
        return None

    def _reader(self, task: Task, offset: int = 0) -> ChunkedReader:
        execution = task.execution
        head = chunked_head(execution.id)
        return ChunkedReader(execution.log, self.wire.sock, offset, before=head)

    async def _reply_stream(self, task: Task) -> Refusal | None:
        execution = task.execution
        log = execution.log
        if task.reader is not None:
            return await self._serve_watched(partial(self._stream, task, task.reader))
        reader = self._reader(task)
        with log.attached(reader):
            # Nothing is sent yet: the next program begins it again.
            with trio.move_on_after(HEAD_WAITS_S):
                await log.wait_beyond(0)
            said = log.in_memory() if execution.finished.is_set() else None
            if said is None or execution.fault is not None:
                return await self._serve_watched(partial(self._stream, task, reader))
            # All of an ended tool's output: its client wakes up once.
            parts = [chunked_head(execution.id)]
            for text in filter(None, said):
                parts += _chunk(text)
            task.moment = Moment.LAST
            await self.wire.send(*parts, trailer(execution.code or 0))
        return None

    async def _stream(self, task: Task, reader: ChunkedReader) -> Refusal | None:
        execution = task.execution
        if execution.fault is not None and task.moment is not Moment.STREAMING:
            return _name_execution(execution, requests.host_fault(execution.fault))
        task.reader, task.moment = reader, Moment.STREAMING
        self.wire.make_room()
        with execution.log.attached(reader):
            await reader.run()
            await execution.finished.wait()
        if execution.fault is not None:
            return None  # no trailer, not even a last chunk: the output is cut
        task.moment = Moment.LAST
        await self.wire.send(trailer(execution.code or 0))
        return None

    async def _reply_head(self, execution: Execution) -> Refusal | None:
        """Send the head of a stream; the output is not read."""
        if execution.fault is not None:
            return _name_execution(execution, requests.host_fault(execution.fault))
        await self.wire.send(chunked_head(execution.id))
        return None

    async def _reply_noticed(self, task: Task) -> Refusal | None:
        execution = task.execution
        log = execution.log
        with log.attached(Holder()):
            await execution.finished.wait()
            task.moment = Moment.BUSY
            if execution.fault is not None:
                return requests.host_fault(execution.fault)
            if execution.timed_out:
                return requests.NOTIFY_TIMEOUT
            task.before = self.wire.head(200, log.end, execution.code or 0, [])
            return await self._send_rest(task)

    async def _make_handle(self, task: Task) -> bytes | None:
        """Return the handle of a large output, if one was asked for."""
        offer = self._context.large_output
        if offer is None or not task.as_fd:
            return None
        execution = task.execution
        return await offer(execution.owner.child, execution)


def _exec_id(execution: Execution) -> tuple[bytes, bytes]:
    return b"X-Exec-Id", execution.id.encode()


def _name_execution(execution: Execution, refusal: Refusal) -> Refusal:
    """Return a refusal with the id of the execution that it ends."""
    return replace(refusal, headers=(*refusal.headers, _exec_id(execution)))


def _chunk(data: bytes) -> tuple[bytes, bytes, bytes]:
    return b"%x\r\n" % len(data), data, b"\r\n"
