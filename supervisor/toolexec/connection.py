"""One connection: its request is checked, done and answered.

    wire.receive -> protocol.toolexec.requests.check -> _exec | _signal | _notify |
    _replay -> _carry_out -> wire

1. Checks have the order of the protocol: ``check``, allowlists, route, working
   directory, id, slot, spawn.
2. After the request, the end of the client's input means that it is gone: its execution
   is ended unless it is detached. ``starts`` checks during a start, a task beside the
   reply afterwards (spec E25).
3. A fault here ends this connection and no other.
4. An unfinished or refused request idles: it may be cancelled for a new connection.
5. A reply can begin at any stage of its task (``reply_task``): unsent bytes are in the
   task before a wait.
"""

from __future__ import annotations

import errno
import os
import signal as signals
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, assert_never

import msgspec
import trio

from hostlib.log import place_of
from protocol.toolexec import requests, token
from protocol.toolexec.requests import Exec, Health, Notify, Refusal, Replay, Signal
from supervisor.spawn.process import LaunchpadLost
from supervisor.spawn.request import SpawnError
from supervisor.toolexec import notification
from supervisor.toolexec.ending import signal_group
from supervisor.toolexec.executions import InUseError
from supervisor.toolexec.http_heads import RefusedAtOnceError, chunked_head, trailer
from supervisor.toolexec.output.chunks import ChunkedReader
from supervisor.toolexec.output.log import PIECE_BYTES, LogHolder
from supervisor.toolexec.reply_task import Moment, ReplyForm, Task, TaskState
from supervisor.toolexec.routes import ToolRefusedError
from supervisor.toolexec.slots import BusyError
from supervisor.toolexec.starts import Start, StartEndedError
from supervisor.toolexec.wire import GoneError, Wire

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from hostlib.fairness import Share
    from protocol.toolexec.body import Head
    from protocol.toolexec.requests import Request
    from supervisor.fsproxy.ports import ChildView
    from supervisor.toolexec.context import Context
    from supervisor.toolexec.execution import Execution
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.output.log import OutputLog
    from supervisor.toolexec.routes import Target

MAX_RECEIVING = 64
"""Most requests of one child whose bodies are being received: as many as its executions
by default. Each may take a MiB of memory and a place on a shared listener."""

SURE_RECEIVING = 8
"""Those of them that are not closed for others on a full listener."""

HEAD_WAITS_S = 0.002
"""Longest wait of a stream's head for the first output, to be sent together: a quick
tool then costs its client one wake-up instead of three."""

_EXEC_ANSWERS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.EISDIR}
)
"""Errors of execve(2) that are the tool's and not the host's: 127 and 126."""


class ConnectionState(msgspec.Struct):
    """The handed-over state of a connection.

    A request that is not begun is read again from its first byte; the rest of a reply
    is sent.

    Attributes:
        server: the child of its socket; empty for the shared one of ``number``.
        received: the bytes of its request, if it is not begun.
        unsent: the rest of the bytes that are being sent.
        is_refused: whether the refusal was sent, and it may only send on.
    """

    server: str
    number: int
    fd: int
    received: bytes = b""
    unsent: bytes = b""
    task: TaskState | None = None
    is_refused: bool = False


def hold_no_place(_owner: ChildExecutions) -> AbstractContextManager[bool]:
    """Admit a request without a bound for its child."""
    return nullcontext(True)


class Connection:
    """One connection.

    Args:
        context: of the host's ToolExec.
        sock: non-blocking; owned.
        heads: the turn for parsing a large head.
        hold_place: holds a place for a request with an execution; gives False if its
            child may have no more of them.

    Attributes:
        wire: its bytes.
        task: the present reply; None before and without one.
        idle_since: time of its start or refusal; None while a request is served (rule
            4).
        scope: of its service.
    """

    def __init__(
        self,
        context: Context,
        sock: socket.socket,
        heads: Share,
        hold_place: Callable[[ChildExecutions], AbstractContextManager[bool]],
    ) -> None:
        self.wire = Wire(sock, heads)
        self.task: Task | None = None
        self.idle_since: float | None = trio.current_time()
        self.scope = trio.CancelScope()
        self._context = context
        self._hold_place = hold_place
        self._is_received = False
        self._is_refused = False
        self._owner: ChildExecutions | None = None
        self._receives_for: ChildExecutions | None = None
        self._rights = token.ALL

    @property
    def moment(self) -> Moment:
        """The stage that it is in."""
        if self.task is not None:
            return self.task.moment
        if self._is_refused:
            return Moment.REFUSED
        if not self._is_received:
            return Moment.RECEIVING
        return Moment.LAST if self.wire.unsent else Moment.BUSY

    def busy(self) -> str | None:
        """Return what must end before it can be handed over."""
        if self.moment is Moment.BUSY:
            return "a tool's client is being answered"
        if self.moment is Moment.RECEIVING and self.wire.unsent:
            return "a tool's client is being told to go on"
        return None

    def snapshot(
        self,
        server: str,
        number: int,
        place_of: Callable[[Execution], tuple[str, int]],
    ) -> ConnectionState:
        """Return its state for ``restore``.

        Args:
            server: see ``ConnectionState``.
            number: as above.
            place_of: returns the child of an execution, and its number there.
        """
        wire, task = self.wire, self.task
        unsent = bytes(wire.unsent)
        state = ConnectionState(server, number, wire.sock.fileno(), unsent=unsent)
        state.is_refused = self.moment is Moment.REFUSED
        if self.moment is Moment.RECEIVING:
            state.received = wire.held()
        elif task is not None and self.moment is not Moment.LAST:
            state.task = task.snapshot(*place_of(task.execution))
        return state

    def restore(self, state: ConnectionState, owner: ChildExecutions | None) -> None:
        """Take over a connection of the program before; then call ``serve``.

        Args:
            state: its state.
            owner: the executions with its task; None for no task.
        """
        self._owner = owner
        self.wire.hold(state.received)
        if state.is_refused:
            self._record_refused()

    # The request

    async def serve(self, task: Task | None = None, unsent: bytes = b"") -> None:
        """Serve the one request, and close.

        Args:
            task: the reply that another program of this host has begun.
            unsent: bytes of its reply that are sent first.
        """
        try:
            with self.scope:
                try:
                    if self._is_refused:
                        await self.wire.drain()
                    elif task is None and not unsent:
                        await self._serve()
                    else:
                        await self._resume_reply(task, unsent)
                except RefusedAtOnceError as why:
                    await self._refuse_at_once(why.refusal)
        except GoneError:
            pass
        except OSError as why:
            self._tell_lost(why)
        except LaunchpadLost:
            raise  # the host ends
        except Exception as why:  # noqa: BLE001 - rule 3; it is reported
            self._tell_fault(why)
        finally:
            self.wire.close()

    async def refuse_at_once(self, refusal: Refusal) -> None:
        """Refuse without reading the request, and close."""
        try:
            await self._refuse_at_once(refusal)
        finally:
            self.wire.close()

    async def _serve(self) -> None:
        """Receive a request, check it, answer it."""
        try:
            head, body = await self.wire.receive(self._first_look)
        finally:
            if self._receives_for is not None:
                self._receives_for.receiving -= 1
        self.idle_since = None
        if self.scope.cancel_called:
            # Closed for another one while its last bytes were received.
            raise GoneError
        await self._context.gate.wait_open()
        self._record_received()
        request = requests.check(head, body, self._is_authorized)
        if isinstance(request, Refusal):
            refusal: Refusal | None = request
        else:
            refusal = await self._answer(request)
        if refusal is not None:
            await self.wire.refuse(refusal)

    async def _resume_reply(self, task: Task | None, unsent: bytes) -> None:
        """Continue a reply that another program has begun."""
        self._record_received()
        self.task = task
        if unsent:
            await self.wire.send(unsent)
        refusal = None if task is None else await self._carry_out(task)
        if refusal is not None:
            await self.wire.refuse(refusal)

    async def _refuse_at_once(self, refusal: Refusal) -> None:
        self._record_received()
        try:
            await self.wire.refuse(refusal)
        except OSError:
            return
        except Exception as why:  # noqa: BLE001 - rule 3; it is reported
            self._tell_fault(why)
            return
        self._record_refused()
        await self.wire.drain()

    def _record_received(self) -> None:
        self._is_received = True
        self.idle_since = None
        self.wire.received.clear()

    def _record_refused(self) -> None:
        self._is_received = self._is_refused = True
        self.idle_since = trio.current_time()

    def _first_look(self, head: Head) -> Refusal | Share:
        """Return a refusal that needs no body, or the turn for receiving the body."""
        found = requests.decide_by_head(head, self._is_authorized)
        if isinstance(found, Health):
            return requests.HEALTHY
        if found is not None:
            return found
        owner = self._owner
        if owner is None or owner.receiving >= MAX_RECEIVING:
            return requests.BUSY
        owner.receiving += 1
        self._receives_for = owner
        if owner.receiving <= SURE_RECEIVING:
            self.idle_since = None  # an authorized client is not closed for others
        return owner.bodies

    def _is_authorized(self, pieces: Sequence[bytes]) -> bool:
        found = self._context.tokens.find(pieces)
        if found is None:
            return False
        self._owner, self._rights = found
        return True

    async def _answer(self, request: Request) -> Refusal | None:
        owner = self._owner
        if isinstance(request, Health):
            return requests.HEALTHY
        if owner is None:
            raise RuntimeError("a request without an owner is refused before")
        if isinstance(request, Signal):
            return await self._signal(owner, request)
        with self._hold_place(owner) as is_admitted:
            if not is_admitted:
                return requests.BUSY
            if isinstance(request, Exec):
                return await self._exec(owner, request)
            if isinstance(request, Replay):
                return await self._replay(owner, request)
            return await self._notify(owner, request)

    def _tell_lost(self, why: OSError) -> None:
        level, what = "DEBUG", "connection lost"
        if why.errno == errno.EIO:  # of a disk: sockets never give it
            level, what = "ERROR", "a reply was broken off"
        text = f"toolexec: {what}: {why.strerror}"
        self._context.log.write(level, text, **self._log_fields(), reason=why.strerror)

    def _tell_fault(self, why: Exception) -> None:
        text = f"toolexec: fault: {place_of(why)}"
        self._context.log.write("ERROR", text, **self._log_fields())

    def _log_fields(self) -> dict[str, object]:
        """Return the log fields of this connection's child, if it is known."""
        return {} if self._owner is None else self._owner.child.log_fields()

    # POST /exec

    async def _exec(self, owner: ChildExecutions, request: Exec) -> Refusal | None:
        # Handles belong to the child's own connection, not to a narrowed token.
        wants_handle = (
            request.as_fd
            and self._context.large_output is not None
            and not self._rights.is_narrowed
        )
        kind = ReplyForm.STREAM
        if request.version == 1:
            kind = ReplyForm.WHOLE
        elif wants_handle:
            kind = ReplyForm.HANDLE
        keep_all = kind is not ReplyForm.STREAM
        execution = await _await_start(self._start(owner, request, keep_all=keep_all))
        if isinstance(execution, Refusal):
            return execution
        if self._context.settings.verbose:
            words = requests.redact(request.args)
            self._context.tell(f"exec {execution.id}: {request.tool} {words}")
        task = Task(execution, kind, request.detach, wants_handle)
        return await self._carry_out(task)

    async def _start(
        self, owner: ChildExecutions, request: Exec, *, keep_all: bool
    ) -> Execution:
        """Choose, admit, spawn; return a running or failed execution."""
        context, child, rights = self._context, owner.child, self._rights
        target = await self._choose(child, request)
        own_s = 0.0 if context.settings.is_timeout_forced else target.timeout_s
        cwd_fd = await target.open_cwd(request.cwd, child)
        try:
            if not request.detach:  # a detached execution has its reader later
                self.wire.check_there()
            execution = owner.admit(
                request.tool, request.exec_id, rights.scope, keep_all=keep_all
            )
            start = execution.start = Start(
                context.start_watch,
                self.wire,
                own_s or context.settings.timeout_s,
                detach=request.detach,
            )
            try:
                with start:
                    plan = await target.command(
                        child, request.tool, request.args, cwd_fd
                    )
                    await execution.spawn(
                        plan,
                        cwd_fd,
                        tty=target.tty,
                        fd3=target.fd3,
                        with_doors=not rights.is_narrowed,
                    )
            except SpawnError as why:
                if why.stage != "exec" or why.errno not in _EXEC_ANSWERS:
                    await execution.abandon()
                    raise
                await execution.finish_unstarted(why, target.name)
            except StartEndedError as why:
                await execution.finish_given_up(why.code, target.name)
            except BaseException:
                await execution.abandon()
                raise
            else:
                await execution.begin(start.left_s, target.name)
        finally:
            os.close(cwd_fd)
        return execution

    async def _choose(self, child: ChildView, request: Exec) -> Target:
        """Return the sidecar that runs a tool.

        Raises:
            ToolRefusedError: the child may not have the tool, or no sidecar runs it.
        """
        routes, tool, rights = self._context.routes, request.tool, self._rights
        if not child.begun.is_set():
            # A quick child asks before the host has heard of its start, and its walls.
            await child.begun.wait()
        if not routes.is_permitted(child, tool, rights):
            refusal = requests.not_permitted(tool)
            raise ToolRefusedError(refusal.status, refusal.body)
        return await routes.route(child, tool, request.cwd, rights)

    # Other requests

    async def _replay(self, owner: ChildExecutions, request: Replay) -> Refusal | None:
        execution = owner.find(request.exec_id, self._rights.scope)
        if execution is None:
            return requests.NOT_FOUND
        if request.offset_bytes < execution.log.start:
            return requests.output_gone(request.offset_bytes)
        if request.head_only:  # the output is not read
            if execution.fault is not None:
                return _name_fault(execution, execution.fault)
            await self.wire.send(chunked_head(execution.id))
            return None
        task = Task(execution, ReplyForm.REPLAY, detach=True)
        task.reader = self._reader(execution, request.offset_bytes)
        return await self._carry_out(task)

    async def _signal(self, owner: ChildExecutions, request: Signal) -> Refusal | None:
        execution = owner.find_live(request.exec_id, self._rights.scope)
        if execution is None:
            return requests.NOT_FOUND
        number = signals.Signals[f"SIG{request.signal}"]
        if execution.process is None:  # it is being started
            if execution.start is not None:
                execution.start.give_up(128 + number)
            await self.wire.reply_nothing()
            return None
        try:
            is_told = await signal_group(execution.process, execution.line, number)
        except OSError as why:  # it has changed its user
            return requests.host_fault(why.strerror or str(why))
        if not is_told:
            return requests.NOT_FOUND
        await self.wire.reply_nothing()
        return None

    async def _notify(self, owner: ChildExecutions, request: Notify) -> Refusal | None:
        starting = notification.start(self._context, self.wire, owner, request)
        execution = await _await_start(starting)
        if isinstance(execution, Refusal):
            return execution
        return await self._carry_out(Task(execution, ReplyForm.NOTIFY))

    # Replies with an execution: whole, as a stream, as a handle, as a notice

    async def _carry_out(self, task: Task) -> Refusal | None:
        """Reply with an execution, from the stage of its task on."""
        self.task = task
        try:
            if task.kind is ReplyForm.STREAM:
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
            return _name_fault(task.execution, why.strerror or str(why))

    async def _answer_from(self, task: Task) -> Refusal | None:
        if task.moment is Moment.SENDING:
            return await self._send_rest(task)
        match task.kind:
            case ReplyForm.WHOLE:
                return await self._reply_whole(task)
            case ReplyForm.HANDLE:
                return await self._reply_as_handle(task)
            case ReplyForm.NOTIFY:
                return await self._reply_noticed(task)
            case ReplyForm.REPLAY | ReplyForm.STREAM:
                return await self._stream(
                    task, task.reader or self._reader(task.execution)
                )
            case _:
                assert_never(task.kind)

    async def _serve_watched(
        self, serve: Callable[[], Awaitable[Refusal | None]]
    ) -> Refusal | None:
        """Serve while the client is there (rule 2)."""
        refusal = failure = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.wire.cancel_when_gone, nursery.cancel_scope)
            try:
                refusal = await serve()
            except Exception as why:  # noqa: BLE001 - raised again, outside of the group
                failure = why
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return refusal

    async def _reply_whole(self, task: Task) -> Refusal | None:
        execution = task.execution
        log = execution.log
        with log.attached(LogHolder()):
            await execution.finished.wait()
            task.moment = Moment.BUSY
            if execution.timed_out:
                return _name_execution(execution, requests.TIMEOUT)
            if execution.fault is not None:
                return _name_fault(execution, execution.fault)
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
        with log.attached(LogHolder()):
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
        with log.attached(LogHolder()):
            if task.reader is not None:
                return await self._stream(task, task.reader)
            await execution.finished.wait()
            task.moment = Moment.BUSY
            if execution.fault is not None:
                return _name_fault(execution, execution.fault)
            handle = await self._make_handle(task)
            if handle is None:
                return await self._stream(task, self._reader(execution))
            parts = [handle]
            end = execution.output_end
            if end < log.end:
                parts.append(await log.read(end, log.end - end))
            await self._send_chunks(task, parts)
        return None

    async def _reply_stream(self, task: Task) -> Refusal | None:
        execution = task.execution
        log = execution.log
        if task.reader is not None:
            return await self._serve_watched(partial(self._stream, task, task.reader))
        reader = self._reader(execution)
        with log.attached(reader):
            # Nothing is sent yet: the next program begins it again.
            with trio.move_on_after(HEAD_WAITS_S):
                await log.wait_beyond(0)
            said = log.in_memory() if execution.finished.is_set() else None
            if said is None or execution.fault is not None:
                return await self._serve_watched(partial(self._stream, task, reader))
            # All of an ended tool's output: its client wakes up once.
            await self._send_chunks(task, said)
        return None

    async def _send_chunks(self, task: Task, texts: Sequence[bytes]) -> None:
        """Send a whole streamed reply at once."""
        parts = [chunked_head(task.execution.id)]
        for text in filter(None, texts):
            parts += b"%x\r\n" % len(text), text, b"\r\n"
        task.moment = Moment.LAST
        await self.wire.send(*parts, trailer(task.execution.code or 0))

    async def _stream(self, task: Task, reader: ChunkedReader) -> Refusal | None:
        execution = task.execution
        if execution.fault is not None and task.moment is not Moment.STREAMING:
            return _name_fault(execution, execution.fault)
        task.reader, task.moment = reader, Moment.STREAMING
        self.wire.make_room()
        with execution.log.attached(reader):
            await reader.run()  # a finished log has its code
        if execution.fault is not None:
            return None  # no trailer, not even a last chunk: the output is cut
        task.moment = Moment.LAST
        await self.wire.send(trailer(execution.code or 0))
        return None

    async def _reply_noticed(self, task: Task) -> Refusal | None:
        execution = task.execution
        log = execution.log
        with log.attached(LogHolder()):
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
        return await offer(task.execution.owner.child, task.execution)

    def _reader(self, execution: Execution, offset: int = 0) -> ChunkedReader:
        head = chunked_head(execution.id)
        return ChunkedReader(execution.log, self.wire.sock, offset, before=head)


async def _await_start(starting: Awaitable[Execution]) -> Execution | Refusal:
    """Return the started execution, or the refusal for its failure."""
    try:
        return await starting
    except ToolRefusedError as why:
        return Refusal(why.status, why.body)
    except InUseError as why:
        return requests.id_in_use(str(why))
    except BusyError:
        return requests.BUSY
    except SpawnError as why:
        return requests.host_fault(why.text)
    except OSError as why:
        return requests.host_fault(why.strerror or str(why))


def _exec_id(execution: Execution) -> tuple[bytes, bytes]:
    return b"X-Exec-Id", execution.id.encode()


def _name_fault(execution: Execution, reason: str) -> Refusal:
    """Return the refusal for an execution that failed by a fault of the host."""
    return _name_execution(execution, requests.host_fault(reason))


def _name_execution(execution: Execution, refusal: Refusal) -> Refusal:
    """Return a refusal with the id of the execution that it ends."""
    return replace(refusal, headers=(*refusal.headers, _exec_id(execution)))
