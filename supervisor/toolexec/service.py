"""ToolExec as a host's service: listeners, tokens, executions of children.

Rules of this file.

1. A child has its own token and, with unix sockets configured or walls around the
   shared listener, a socket in its directory; both end with it. If it makes no unix
   sockets it has a port in its net namespace, or is not started.
2. With both kinds of listener a child gets the unix one, if its profile has such.
3. A socket of the service manager replaces the TCP port for all children; their tokens
   tell them apart.
"""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from hostlib.handover import state_from
from hostlib.listener import listener_on
from supervisor.toolexec.connection import (
    Connection,
    ConnectionState,
    hold_no_place,
)
from supervisor.toolexec.context import Context
from supervisor.toolexec.executions import ChildExecutions, ExecutionsState
from supervisor.toolexec.listeners import (
    activated_listener,
    listening_within,
    tcp_listener,
    unix_listener,
    unix_listener_on,
)
from supervisor.toolexec.reply_task import Task
from supervisor.toolexec.routes import NoSidecars
from supervisor.toolexec.server import Server
from supervisor.toolexec.slots import Slots

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Iterator,
        Sequence,
    )
    from contextlib import ExitStack

    from supervisor.fsproxy.ports import ChildView
    from supervisor.parts import Parts
    from supervisor.toolexec.execution import Execution
    from supervisor.toolexec.routes import Routes
    from supervisor.toolexec.settings import ToolExecSettings
    from vfs.clients import Client

URL = "AIFO_TOOLEEXEC_URL"
TOKEN = "AIFO_TOOLEEXEC_TOKEN"  # noqa: S105 - the name of a variable


class ToolExecState(msgspec.Struct):
    """The handed-over state of ToolExec.

    An execution is a process of the launchpad, a pipe and a log; all three stay. A
    listener keeps its address, also if the configuration has another one by now.

    Attributes:
        shared: the listeners of all children.
        sidecars: those of ``Routes``.
    """

    shared: list[int]
    children: list[ExecutionsState]
    connections: list[ConnectionState]
    sidecars: Any = None


def read_state(left: object) -> ToolExecState | None:
    """Return the handed-over state; None without one.

    Raises:
        HandoverError: the state is another program's.
    """
    return None if left is None else state_from(left, ToolExecState, "the tools")


class ToolExec:
    """Runs tools for the children of one host; see ``open_toolexec``.

    Attributes:
        context: the shared parts of connections.
        shared_url: the address for children without their own socket.
        left: the state of the program before, until it is restored.
        entered: its executions by child, in their order.
        shared: the servers for all children.
        servers: all servers.
        children: the executions of each child, by its id.
        slots: those of the host.
    """

    def __init__(self, host: Parts, settings: ToolExecSettings, routes: Routes) -> None:
        self._host = host
        self._settings = settings
        self.slots = Slots(settings.max_executions, host.fs.descriptor_account)
        self.context = Context(settings, routes, self.slots.descriptors, host.log)
        self._null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.shared_url: str | None = None
        self.left: ToolExecState | None = None
        self.shared: list[Server] = []
        self.servers: set[Server] = set()
        self.children: dict[str, ChildExecutions] = {}
        self.entered: dict[str, list[Execution]] = {}

    # The service (see ``fsproxy.ports``)

    async def child_starting(
        self, child: ChildView, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Give a child its token and socket; see ``Service``."""
        executions = await self.own(child, stack)
        self.give_token(executions, self.context.tokens.issue(executions), stack)
        url, spec = self.shared_url, child.spec
        if not (spec.sandbox.unix_sockets or spec.is_within_reach(url)):
            return await self._listen_within(executions, stack)
        is_own = self._settings.unix and spec.sandbox.unix_sockets
        if spec.run_dir is not None and (is_own or not spec.is_within_reach(url)):
            path, listener = await stack.enter_async_context(unix_listener(spec))
            executions.listener = listener.socket.fileno(), path
            await self.listen_for_child(listener, stack)
            url = f"unix://{path}"
        if url is None:
            raise OSError(2, "a child of ToolExec needs a directory for its socket")
        return {URL: url, TOKEN: executions.token}

    async def _listen_within(
        self, executions: ChildExecutions, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Let a child that makes no unix sockets listen for itself."""

        def taken(fd: int) -> None:
            executions.listener = fd, ""

        child, serve = executions.child, self._serve
        url = await listening_within(child, self.shared_url, taken, serve, stack)
        return {} if url is None else {URL: url, TOKEN: executions.token}

    async def own(self, child: ChildView, stack: AsyncExitStack) -> ChildExecutions:
        """Return the executions of a child; they end with it."""
        executions = ChildExecutions(
            self._host,
            child,
            self.slots,
            log_dir=self._settings.log_dir or tempfile.gettempdir(),
            log_limit_bytes=self._settings.log_limit_bytes,
            null_fd=self._null_fd,
        )
        self.children[child.id] = executions
        stack.callback(self.children.pop, child.id, None)
        nursery = await stack.enter_async_context(trio.open_nursery())
        executions.nursery = nursery
        stack.push_async_callback(executions.close)
        return executions

    def give_token(
        self, executions: ChildExecutions, token: str, stack: AsyncExitStack
    ) -> None:
        """Let a token stand for a child until it has ended."""
        executions.token = token
        stack.callback(self.context.tokens.revoke, token)

    def client_gone(self, client: Client) -> None:
        """Do nothing: executions belong to the child, not to one of its conversations."""

    async def listen_for_child(
        self, listener: trio.SocketListener, stack: AsyncExitStack
    ) -> None:
        """Serve a child's own socket until it has ended."""
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        await nursery.start(self._serve, listener)

    async def _serve(
        self,
        listener: trio.SocketListener,
        *,
        is_shared: bool = False,
        task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        server = Server(self.context, listener, is_shared=is_shared)
        self.servers.add(server)
        try:
            await server.run(task_status)
        finally:
            self.servers.discard(server)

    # Hand-over (see ``ports.Portable``)

    def rest(self) -> None:
        """Let new requests wait."""
        self.context.gate.shut()

    def resume(self) -> None:
        """Answer the requests that have waited."""
        self.context.gate.open()

    def busy(self) -> str | None:
        """Return what must end first."""
        connections = (c for server in self.servers for c in server.everybody())
        children = self.children.values()
        of_connections = (connection.busy() for connection in connections)
        reasons = chain(of_connections, (executions.busy() for executions in children))
        return next(filter(None, reasons), None) or self.context.routes.busy()

    def interrupt(self) -> None:
        """Do nothing: its work ends by itself or is handed over."""

    def snapshot(self, stack: ExitStack) -> tuple[object, set[int]]:
        """Return listeners, tokens, executions, connections, sidecars."""
        del stack
        leaving = _HandoverExecutions()
        for executions in self.children.values():
            leaving.add_child(executions)
        shared = [server.listener_fd for server in self.shared]
        names = {one.listener_fd: (one.id, 0) for one in leaving.children.values()}
        names |= {fd: ("", number) for number, fd in enumerate(shared)}
        connections = [
            connection.snapshot(*names[server.listener_fd], leaving.place_of)
            for server in self.servers
            for connection in server.everybody()
        ]
        sidecars, sidecar_fds = self.context.routes.snapshot()
        children = list(leaving.children.values())
        state = ToolExecState(shared, children, connections, sidecars)
        fds = leaving.fds | sidecar_fds | {*shared, *(one.fd for one in connections)}
        plain = msgspec.to_builtins(state, builtin_types=(bytes,))
        return plain, {fd for fd in fds if fd >= 0}

    async def restore(self, state: object) -> None:
        """Do nothing: ``open_shared`` has taken the listeners."""

    async def restore_child(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Restore a child's executions."""
        among = () if self.left is None else self.left.children
        state = next((one for one in among if one.id == child.id), None)
        if state is None:  # it was started without ToolExec
            return
        executions = await self.own(child, stack)
        self.entered[child.id] = executions.restore(state)
        if state.listener_fd >= 0:
            path = os.fsdecode(state.path)
            if path:
                opened = unix_listener_on(state.listener_fd, path, child.spec)
                listener = await stack.enter_async_context(opened)
            else:
                listener = listener_on(state.listener_fd)
            executions.listener = state.listener_fd, path
            await self.listen_for_child(listener, stack)
        self.context.tokens.adopt(state.token, executions)
        self.give_token(executions, state.token, stack)

    async def restore_rest(self) -> None:
        """Continue the connections, and answer requests."""
        left, self.left = self.left, None
        for state in () if left is None else left.connections:
            self._restore_connection(state)
        if left is not None:
            # Only now may more be kept: their readers hold what they have not taken.
            for executions in self.children.values():
                executions.resume()
        self.entered.clear()
        self.resume()

    def _restore_connection(self, state: ConnectionState) -> None:
        """Continue a connection; close it if its child has ended meanwhile."""
        sock = socket.socket(fileno=state.fd)
        server, task, owner = self._server_of(state), None, None
        if state.task is not None:
            owner = self.children.get(state.task.child)
        if server is None or (state.task is not None and owner is None):
            sock.close()
            return
        if state.task is not None:
            execution = self.entered[state.task.child][state.task.number]
            task = Task.restore(state.task, execution, sock)
        # No bound: no more of those that were handed over come.
        connection = Connection(self.context, sock, server.heads, hold_no_place)
        connection.restore(state, owner)
        server.resume_connection(connection, task, state.unsent)

    def _server_of(self, state: ConnectionState) -> Server | None:
        if not state.server:
            return self.shared[state.number]
        executions = self.children.get(state.server)
        if executions is None or executions.listener is None:
            return None
        fd = executions.listener[0]
        return next((one for one in self.servers if one.listener_fd == fd), None)

    # Life

    async def open_shared(
        self, nursery: trio.Nursery, activated: Sequence[socket.socket]
    ) -> None:
        """Listen for all children: on given sockets, or on TCP.

        Raises:
            OSError: a listener is not available.
        """
        if self.left is not None:
            for sock in activated:  # the program before has taken and handed over them
                sock.close()
            opened = [
                activated_listener(socket.socket(fileno=fd)) for fd in self.left.shared
            ]
        elif activated:
            opened = [activated_listener(sock) for sock in activated]
        elif self._settings.tcp is not None:
            opened = [await tcp_listener(*self._settings.tcp)]
        else:
            return
        for url, listener in opened:
            self.shared_url = self.shared_url or url
            serve = partial(self._serve, is_shared=True)
            self.shared.append(await nursery.start(serve, listener))

    def close(self) -> None:
        """Free the parts that belong to no child."""
        os.close(self._null_fd)
        self.slots.descriptors.close()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host, with a word for each."""
        yield self._null_fd, "null device for tools"
        for server in self.servers:
            for fd in server.descriptors():
                yield fd, "toolexec connection"
        for executions in self.children.values():
            yield from executions.descriptors()


class _HandoverExecutions:
    """The executions of a ToolExec in a hand-over.

    Attributes:
        children: the state of each child's, by its id.
        fds: their descriptors.
    """

    def __init__(self) -> None:
        self.children: dict[str, ExecutionsState] = {}
        self.fds: set[int] = set()
        self._places: dict[Execution, tuple[str, int]] = {}

    def add_child(self, executions: ChildExecutions) -> None:
        """Add the executions of a child."""
        state, fds = executions.snapshot()
        self.children[state.id] = state
        self.fds |= fds
        for execution in executions.live.values():
            self._add(execution, "live")
        for execution in executions.kept.values():
            self._add(execution, "kept")

    def place_of(self, execution: Execution) -> tuple[str, int]:
        """Return the child of an execution, and its number there.

        One that only a connection has is added now.
        """
        return self._places.get(execution) or self._add(execution, "")

    def _add(self, execution: Execution, where: str) -> tuple[str, int]:
        state, fds = execution.snapshot(where)
        child_id = execution.owner.child.id
        among = self.children[child_id].executions
        place = self._places[execution] = child_id, len(among)
        among.append(state)
        self.fds |= fds
        return place


@asynccontextmanager
async def open_toolexec(
    host: Parts,
    settings: ToolExecSettings,
    routes: Routes | None = None,
    activated: Sequence[socket.socket] = (),
    left: object = None,
) -> AsyncIterator[ToolExec]:
    """Offer tools to the children of a host for the length of the block.

    Args:
        host: open; its children must have ended when the block ends.
        settings: the configuration.
        routes: the sidecars; None for none.
        activated: sockets that the service manager opened; owned.
        left: the state of the program before; None without one.

    Raises:
        OSError: a listener is not available.
        HandoverError: the state is another program's.
    """
    service = ToolExec(host, settings, routes or NoSidecars())
    service.left = read_state(left)
    if service.left is not None:
        service.rest()  # until all of it is restored
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.context.start_watch.run)
            await service.open_shared(nursery, activated)
            host.holders.add(service.descriptors)
            host.services.toolexec = service
            try:
                yield service
            finally:
                host.services.toolexec = None
                nursery.cancel_scope.cancel()
    finally:
        host.holders.discard(service.descriptors)
        service.close()
