"""One connection: its request is checked, done and answered.

    wire.receive -> protocol.toolexec.requests.check -> _exec | _signal | _notify |
    _replay -> wire

1. Checks have the order of the protocol: ``check``, allowlists, route, working
   directory, id, slot, spawn.
2. After the request, the end of the client's input means that it is gone: its execution
   is ended unless it is detached. ``starts`` checks during a start, ``replies``
   afterwards (spec E25).
3. A fault here ends this connection and no other.
4. An unfinished or refused request idles: it may be cancelled for a new connection.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import msgspec
import trio

from hostlib.log import place_of
from protocol.toolexec import requests, token
from protocol.toolexec.requests import Exec, Health, Notify, Refusal, Replay, Signal
from supervisor.spawn.process import LaunchpadLost
from supervisor.spawn.request import SpawnError
from supervisor.toolexec import notification
from supervisor.toolexec.backends.launch import add_doors
from supervisor.toolexec.ending import signal_group
from supervisor.toolexec.executions import InUseError
from supervisor.toolexec.http_heads import RefusedAtOnceError
from supervisor.toolexec.replies import Kind, Moment, Replies, Task, TaskState
from supervisor.toolexec.routes import RefusedError
from supervisor.toolexec.slots import BusyError
from supervisor.toolexec.starts import Start, StartEndedError
from supervisor.toolexec.wire import GoneError

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from hostlib.fairness import Share
    from protocol.toolexec.body import Head
    from protocol.toolexec.requests import Request
    from supervisor.toolexec.context import Context
    from supervisor.toolexec.execution import Execution
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.routes import SpawnPlan, Target

MAX_RECEIVING = 64
"""Most requests of one child whose bodies are being received: as many as its executions
by default. Each may take a MiB of memory and a place on a shared listener."""

SURE_RECEIVING = 8
"""Those of them that are not closed for others on a full listener."""

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


class Connection(Replies):
    """One connection.

    Args:
        context: of the host's ToolExec.
        sock: non-blocking; owned.
        heads: the turn for parsing a large head.

    Attributes:
        idle_since: time of its start or refusal; None while a request is served (rule
            4).
        scope: of its service.
    """

    def __init__(self, context: Context, sock: socket.socket, heads: Share) -> None:
        super().__init__(context, sock, heads)
        self.idle_since: float | None = trio.current_time()
        self.scope = trio.CancelScope()
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
            self.continue_refused()

    async def serve(self, task: Task | None = None, unsent: bytes = b"") -> None:
        """Serve the one request, and close.

        Args:
            task: the reply that another program of this host has begun.
            unsent: bytes of its reply that are sent first.
        """
        try:
            await self._serve_or_fail(task, unsent)
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

    async def _serve_or_fail(self, task: Task | None, unsent: bytes) -> None:
        with self.scope:
            try:
                if self._is_refused:
                    await self.wire.drain()
                elif task is None and not unsent:
                    await self._serve()
                else:
                    await self._go_on(task, unsent)
            except RefusedAtOnceError as why:
                await self._refuse_at_once(why.refusal)

    def _tell_lost(self, why: OSError) -> None:
        level, what = "DEBUG", "connection lost"
        if why.errno == errno.EIO:  # of a disk: sockets never give it
            level, what = "ERROR", "a reply was broken off"
        text = f"toolexec: {what}: {why.strerror}"
        self._context.log(level, text, **self._log_fields(), reason=why.strerror)

    def _tell_fault(self, why: Exception) -> None:
        self._context.log(
            "ERROR", f"toolexec: fault: {place_of(why)}", **self._log_fields()
        )

    def _log_fields(self) -> dict[str, object]:
        """Return the log fields of this connection's child, if it is known."""
        return {} if self._owner is None else self._owner.child.log_fields()

    async def refuse_at_once(self, refusal: Refusal) -> None:
        """Refuse without reading the request, and close."""
        try:
            await self._refuse_at_once(refusal)
        finally:
            self.wire.close()

    async def _refuse_at_once(self, refusal: Refusal) -> None:
        self._record_received()
        try:
            await self.wire.refuse(refusal)
        except OSError:
            return
        except Exception as why:  # noqa: BLE001 - rule 3; it is reported
            self._tell_fault(why)
            return
        self.continue_refused()
        await self.wire.drain()

    def continue_refused(self) -> None:
        """Continue as a connection that this or another program has refused."""
        self._is_received = self._is_refused = True
        self.idle_since = trio.current_time()

    async def _serve(self) -> None:
        try:
            head, body = await self.wire.receive(self._first_look)
        finally:
            if self._receives_for is not None:
                self._receives_for.receiving -= 1
        self.idle_since = None
        if (
            self.scope.cancel_called
        ):  # closed for another one while its last bytes were received
            raise GoneError
        await self._reply_to(head, body)

    async def _reply_to(self, head: Head, body: bytes) -> None:
        await self._context.gate.wait_open()
        self._record_received()
        request = requests.check(head, body, self._is_authorized)
        if isinstance(request, Refusal):
            await self.wire.refuse(request)
        else:
            await self._reply(self._answer(request))

    def _record_received(self) -> None:
        self._is_received = True
        self.idle_since = None
        self.wire.received.clear()

    async def _go_on(self, task: Task | None, unsent: bytes) -> None:
        """Continue a reply that another program has begun."""
        self._record_received()
        self.task = task
        if unsent:
            await self.wire.send(unsent)
        if task is not None:
            await self._reply(self._carry_out(task))

    async def _reply(self, answering: Awaitable[Refusal | None]) -> None:
        refusal = await answering
        if refusal is not None:
            await self.wire.refuse(refusal)

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
        if isinstance(request, Exec):
            return await self._exec(owner, request)
        if isinstance(request, Replay):
            return await self._replay(owner, request)
        if isinstance(request, Signal):
            return await self._signal(owner, request)
        return await self._notify(owner, request)

    # POST /exec

    async def _exec(self, owner: ChildExecutions, request: Exec) -> Refusal | None:
        execution = await _await_start(self._start(owner, request))
        if isinstance(execution, Refusal):
            return execution
        wants_handle = self._is_handle_wanted(request)
        kind = Kind.STREAM
        if request.version == 1:
            kind = Kind.WHOLE
        elif wants_handle:
            kind = Kind.HANDLE
        return await self._carry_out(
            Task(execution, kind, request.detach, wants_handle)
        )

    async def _start(self, owner: ChildExecutions, request: Exec) -> Execution:
        """Choose, admit, spawn; return a running or failed execution."""
        routes = self._context.routes
        child, tool = owner.child, request.tool
        # A quick child asks before the host has heard of its start, and of its walls.
        await child.begun.wait()
        if not routes.is_permitted(child, tool, self._rights):
            refusal = requests.not_permitted(tool)
            raise RefusedError(refusal.status, refusal.body)
        target = await routes.route(child, tool, request.cwd, self._rights)
        cwd_fd = await target.open_cwd(request.cwd, child)
        try:
            self._check_wanted(request)
            keep_all = request.version == 1 or self._is_handle_wanted(request)
            scope = self._rights.scope
            execution = owner.admit(tool, request.exec_id, scope, keep_all=keep_all)
            timeout_s = self._context.timeout_of(target)
            lookout, detach = self._context.lookout, request.detach
            execution.start = Start(lookout, self.wire, timeout_s, detach=detach)
            try:
                with execution.start:
                    plan = await self._plan(target, owner, request, cwd_fd)
                    await execution.spawn(plan, cwd_fd, tty=target.tty, fd3=target.fd3)
            except SpawnError as why:
                if why.stage != "exec" or why.errno not in _EXEC_ANSWERS:
                    await execution.abandon()
                    raise
                await _end_unstarted(execution, why, target.name)
            except StartEndedError as why:
                await execution.finish_given_up(why.code, target.name)
            except BaseException:
                await execution.abandon()
                raise
            else:
                await owner.begin(execution, execution.start.left_s, target.name)
        finally:
            os.close(cwd_fd)
        if self._context.settings.verbose:
            words = requests.redact(request.args)
            self._context.tell(f"exec {execution.id}: {tool} {words}")
        return execution

    async def _plan(
        self, target: Target, owner: ChildExecutions, request: Exec, cwd_fd: int
    ) -> SpawnPlan:
        """Return the process to spawn, with the model's doors for the child's own token."""
        child, tool = owner.child, request.tool
        plan = await target.command(child, tool, request.args, cwd_fd)
        return plan if self._rights.is_narrowed else add_doors(owner, plan)

    def _check_wanted(self, request: Exec) -> None:
        # A detached execution has its reader later.
        if not request.detach:
            self.wire.check_there()

    def _is_handle_wanted(self, request: Exec) -> bool:
        # Handles belong to the child's own connection, not to a narrowed token.
        is_own = not self._rights.is_narrowed
        return request.as_fd and is_own and self._context.large_output is not None

    # Other requests

    async def _replay(self, owner: ChildExecutions, request: Replay) -> Refusal | None:
        execution = owner.find(request.exec_id, self._rights.scope)
        if execution is None:
            return requests.NOT_FOUND
        if request.offset_bytes < execution.log.start:
            return requests.output_gone(request.offset_bytes)
        if request.head_only:
            return await self._reply_head(execution)
        task = Task(execution, Kind.REPLAY, detach=True)
        task.reader = self._reader(task, request.offset_bytes)
        return await self._carry_out(task)

    async def _signal(self, owner: ChildExecutions, request: Signal) -> Refusal | None:
        execution = owner.find_live(request.exec_id, self._rights.scope)
        if execution is None:
            return requests.NOT_FOUND
        number = self._context.signals[request.signal]
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
        return await self._carry_out(Task(execution, Kind.NOTIFY))


async def _await_start(starting: Awaitable[Execution]) -> Execution | Refusal:
    """Return the started execution, or the refusal for its failure."""
    try:
        return await starting
    except RefusedError as why:
        return Refusal(why.status, why.body)
    except InUseError as why:
        return requests.id_in_use(str(why))
    except BusyError:
        return requests.BUSY
    except SpawnError as why:
        return requests.host_fault(why.text)
    except OSError as why:
        return requests.host_fault(why.strerror or str(why))


async def _end_unstarted(execution: Execution, why: SpawnError, sidecar: str) -> None:
    """Finish an execution whose tool execve(2) refused, as a shell does."""
    execution.code = why.exit_status
    execution.owner.report_failed(execution, sidecar, why.reason)
    await execution.log.append(f"{why.text}\n".encode("utf-8", "surrogateescape"))
    await execution.abandon(keep=True)
