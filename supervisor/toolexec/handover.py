"""ToolExec, handed from one program of a host to the next: no tool notices.

What it is: listeners, tokens, executions with their pipes and logs, and connections,
each of which goes on where it was.  What it is not: sidecars (``handover_sidecars``).

Rules of this file.

1. An execution is a process of the launchpad, a pipe and a log, and all three stay.  What
   was read from the pipe and is not in the log goes with it.
2. A connection is its socket and its moment (``moments``).  A request for which nothing
   was done is read again from its first byte; of a reply the rest is sent.
3. A ladder goes on from the step that it has come to; what was killed for a limit is
   killed again.
4. Where children come from is what they were told: a listener stays the one that it is,
   whatever is configured by now.
"""

from __future__ import annotations

import math
import os
import socket
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import trio

from supervisor.accepting import listener_on
from supervisor.toolexec import door
from supervisor.toolexec.chunks import ChunkedReader
from supervisor.toolexec.connection import Connection
from supervisor.toolexec.ending import (
    AT_ONCE,
    CLIENT_GONE,
    TIME_IS_UP,
    SignalLine,
)
from supervisor.toolexec.execution import Execution
from supervisor.toolexec.handover_state import (
    ChildState,
    ConnectionState,
    ExecutionState,
    LogState,
    TaskState,
    ToolExecState,
)
from supervisor.toolexec.handover_stores import store_from, store_state
from supervisor.toolexec.heads import chunked_head
from supervisor.toolexec.listeners import unix_listener_on
from supervisor.toolexec.moments import Kind, Moment, Task
from supervisor.toolexec.outputlog import OutputLog
from supervisor.toolexec.outputpump import OutputPump

if TYPE_CHECKING:
    from supervisor.session.ports import ChildView
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.server import Server
    from supervisor.toolexec.service import ToolExec

LADDERS = {"client gone": CLIENT_GONE, "time is up": TIME_IS_UP}
"""By names that mean the same to both programs."""


# Taking down


def busy(service: ToolExec) -> str | None:
    """Say what has to end first."""
    connections = (c for s in service.servers for c in s.everybody())
    children = service.children.values()
    reasons = chain(map(_busy_connection, connections), map(_busy_child, children))
    return next(filter(None, reasons), None) or service.routes.busy()


def _busy_connection(connection: Connection) -> str | None:
    moment = connection.moment
    if moment is Moment.BUSY:
        return "a tool's client is being answered"
    if moment is Moment.RECEIVING and connection.wire.unsent:
        return "a tool's client is being told to go on"
    return None


def _busy_child(executions: ChildExecutions) -> str | None:
    if executions.nursery is None:
        return f"the tools of {executions.child.id} are being ended"
    for execution in executions.live.values():
        if not execution.has_begun:
            return f"tool {execution.tool!r} is being started"
    return None


def hand_over(service: ToolExec) -> tuple[object, set[int]]:
    """Return all of it as plain values, and its descriptors."""
    return _Leaving(service).state()


class _Leaving:
    """One service's leave."""

    def __init__(self, service: ToolExec) -> None:
        self._service = service
        self._fds: set[int] = set()
        self._numbers: dict[int, tuple[str, int]] = {}
        self._children: dict[str, ChildState] = {}

    def state(self) -> tuple[object, set[int]]:
        service = self._service
        for executions in service.children.values():
            self._child(executions)
        shared = [server.listener_fd for server in service.shared]
        by_fd = {state.listener_fd: (name, 0) for name, state in self._children.items()}
        by_fd |= {fd: ("", number) for number, fd in enumerate(shared)}
        connections = [
            self._connection(connection, *by_fd[server.listener_fd])
            for server in service.servers
            for connection in server.everybody()
        ]
        sidecars, sidecar_fds = service.routes.hand_over()
        self._fds |= {*shared, *sidecar_fds}
        state = ToolExecState(
            shared, list(self._children.values()), connections, sidecars
        )
        plain = msgspec.to_builtins(state, builtin_types=(bytes,))
        return plain, {fd for fd in self._fds if fd >= 0}

    def _child(self, executions: ChildExecutions) -> None:
        quota = executions._quota
        listener_fd, path = executions.listener or (-1, "")
        self._children[executions.child.id] = ChildState(
            id=executions.child.id,
            token=executions.token,
            listener_fd=listener_fd,
            path=os.fsencode(path),
            executions=[],
            used_bytes=quota.used_bytes,
            spare=quota._spare,
        )
        self._fds |= {listener_fd, *quota.descriptors()}
        for execution in executions.live.values():
            self._execution(execution, "live")
        for execution in executions.kept.values():
            self._execution(execution, "kept")

    def _execution(self, execution: Execution, where: str) -> tuple[str, int]:
        name = self._numbers.get(id(execution))
        if name is not None:
            return name
        child_id = execution.owner.child.id
        among = self._children[child_id].executions
        self._numbers[id(execution)] = name = (child_id, len(among))
        now = trio.current_time()
        state = ExecutionState(
            id=execution.id,
            key=execution.key,
            tool=os.fsencode(execution.tool),
            where=where,
            log=self._log(execution.log),
            code=execution.code,
            timed_out=execution.timed_out,
            fault=execution.fault,
            passed=execution.passed,
        )
        among.append(state)
        if execution.finished.is_set() or execution.process is None:
            return name
        state.process = execution.process.snapshot()
        state.pipe = -1 if execution._pump is None else execution._pump.pipe
        state.door_client = execution.door_client
        if execution.line is not None:
            state.line = execution.line.fd
        if not execution.timed_out and execution.timeout_at < math.inf:
            state.timeout_s = max(0.001, execution.timeout_at - now)
        names = {id(ladder): name for name, ladder in LADDERS.items()}
        state.climbs = [
            (names[id(ladder)], now - begun_s)
            for ladder, begun_s in execution.climbs
            if ladder is not AT_ONCE  # rule 3
        ]
        self._fds |= {state.process.pidfd, state.pipe, state.line}
        return name

    def _log(self, log: OutputLog) -> LogState:
        self._fds.update(log.descriptors())
        return LogState(
            start=log.start,
            end=log.end,
            is_finished=log.is_finished,
            note_at=log.note_at,
            keep_all=log._keep_all,
            is_discarded=log._is_discarded,
            stores=[store_state(store) for store in log._stores],
            pending=bytes(log._pending),
        )

    def _connection(
        self, connection: Connection, server: str, number: int
    ) -> ConnectionState:
        wire = connection.wire
        fd = wire.sock.fileno()
        self._fds.add(fd)
        state = ConnectionState(server, number, fd, unsent=bytes(wire.unsent))
        state.is_refused = connection.moment is Moment.REFUSED
        if connection.moment is Moment.RECEIVING:
            state.received = b"".join(wire.received) + wire._ahead
        elif connection.task is not None and connection.moment is not Moment.LAST:
            state.task = self._task(connection.task)
        return state

    def _task(self, task: Task) -> TaskState:
        child_id, number = self._execution(task.execution, "")
        is_streaming = task.moment is Moment.STREAMING and task.reader is not None
        return TaskState(
            child=child_id,
            number=number,
            kind=task.kind.value,
            detach=task.detach,
            as_fd=task.as_fd,
            moment=task.moment.value,
            reader=task.reader.held() if is_streaming and task.reader else None,
            before=task.before,
            offset=task.offset,
            after=task.after,
        )


# Putting together


async def enter(service: ToolExec, child: ChildView, stack: AsyncExitStack) -> None:
    """Go on with the executions of a child."""
    left = service.left
    among = () if left is None else left.children
    state = next((one for one in among if one.id == child.id), None)
    if state is None:  # it was started when there was no ToolExec
        return
    executions = await service.own(child, stack)
    executions._quota.used_bytes = state.used_bytes
    executions._quota._spare = state.spare
    executions._slots.descriptors.hold(len(executions._quota.descriptors()))
    entered = [_enter_execution(executions, one) for one in state.executions]
    service.entered[child.id] = entered
    if state.listener_fd >= 0:
        path = os.fsdecode(state.path)
        if path:
            listener = await stack.enter_async_context(
                unix_listener_on(state.listener_fd, path, child.spec)
            )
        else:
            listener = listener_on(state.listener_fd)
        executions.listener = state.listener_fd, path
        await service.listen_for_child(listener, stack)
    service.tokens.adopt(state.token, executions)
    service.give_token(executions, state.token, stack)


def _enter_execution(executions: ChildExecutions, left: ExecutionState) -> Execution:
    tool, log = os.fsdecode(left.tool), _log_from(executions, left.log)
    execution = Execution(executions, left.id, tool, log)
    execution.key = left.key
    execution.code, execution.fault = left.code, left.fault
    execution.timed_out, execution.passed = left.timed_out, left.passed
    if left.process is None:
        execution.finished.set()
        if left.where == "kept":
            executions.kept[left.key] = execution
        return execution
    host = executions.host
    execution.process = host.launcher.restore_process(left.process)
    execution._pump = OutputPump(left.pipe, log)
    execution.door_client = left.door_client
    if left.line >= 0:
        execution.line = SignalLine(left.line)
    for session in executions.child.sessions():
        if left.door_client and session.client.id == left.door_client:
            execution._door = AsyncExitStack()
            execution._door.push_async_callback(partial(door.close, session))
    now = trio.current_time()
    execution.climbs = [(LADDERS[name], now - ago_s) for name, ago_s in left.climbs]
    executions.live[left.key] = execution
    executions._slots.enter()
    execution.timeout_at = now + left.timeout_s if left.timeout_s else math.inf
    return execution


def _log_from(executions: ChildExecutions, left: LogState) -> OutputLog:
    limit_bytes, quota = executions._log_limit_bytes, executions._quota
    log = OutputLog(executions._directory, limit_bytes, quota, keep_all=left.keep_all)
    log.start, log.end, log.note_at = left.start, left.end, left.note_at
    log.is_finished, log._is_discarded = left.is_finished, left.is_discarded
    log._stores = [store_from(store, limit_bytes, quota) for store in left.stores]
    executions._slots.descriptors.hold(len(log.descriptors()))
    log._pending = memoryview(left.pending)
    return log


def go_on(service: ToolExec) -> None:
    """Go on with the connections: everything that they may speak of is there."""
    left, service.left = service.left, None
    if left is None:
        return
    servers = {server.listener_fd: server for server in service.servers}
    for state in left.connections:
        _go_on_with(service, state, _server_of(service, state, servers))
    # Their readers hold what they have not taken: only now may more be kept.
    for executions in service.children.values():
        for execution in executions.live.values():
            if executions.nursery is not None:
                left_s = execution.timeout_at - trio.current_time()
                limit_s = 0.0 if left_s == math.inf else max(0.001, left_s)
                execution.begin(executions.nursery, limit_s)
    service.entered.clear()


def _go_on_with(
    service: ToolExec, state: ConnectionState, server: Server | None
) -> None:
    """Go on with a connection; close it if its child has ended meanwhile."""
    sock = socket.socket(fileno=state.fd)
    if server is None:
        sock.close()
        return
    connection = Connection(service, sock, server.heads)
    try:
        task = None if state.task is None else _task_from(service, state, connection)
    except KeyError:
        sock.close()
        return
    connection.wire.hold(state.received)
    if state.is_refused:
        connection.be_refused()
    server.go_on(connection, task, state.unsent)


def _server_of(
    service: ToolExec, state: ConnectionState, servers: dict[int, Server]
) -> Server | None:
    if not state.server:
        return service.shared[state.number]
    executions = service.children.get(state.server)
    if executions is None or executions.listener is None:
        return None
    return servers.get(executions.listener[0])


def _task_from(
    service: ToolExec, state: ConnectionState, connection: Connection
) -> Task | None:
    left = state.task
    if left is None:
        return None
    execution = service.entered[left.child][left.number]
    wire = connection.wire
    task = Task(
        execution,
        Kind(left.kind),
        left.detach,
        left.as_fd,
        Moment(left.moment),
        before=left.before,
        offset=left.offset,
        after=left.after,
    )
    log = execution.log
    if left.reader is not None:
        task.reader = ChunkedReader.at(log, wire.sock, left.reader)
    elif task.kind is Kind.STREAM:
        head = chunked_head(execution.id)
        task.reader = ChunkedReader(log, wire.sock, before=head)
    if task.reader is not None:
        log.readers.add(task.reader)  # it is attached when its turn comes
    return task
