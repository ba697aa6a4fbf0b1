"""ToolExec as a host's service: its listeners, its tokens, its children's executions.

Rules of this file.

1. A child has a token of its own and, where unix sockets are configured or its walls keep
   it from what all share, a socket in its directory; both end with it, as its executions.
   If it makes no unix sockets it has a port in its net namespace, or is not started.
2. With both kinds of listener a child is told the unix one, if its profile has such.
3. A socket that the service manager opened is shared by all children, in the place of
   the TCP port; their tokens tell them apart.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from protocol import toolexec
from supervisor.gate import Gate
from supervisor.logs import put_line
from supervisor.say import json_line, speaks_json
from supervisor.toolexec import handover, handover_state
from supervisor.toolexec.executions import ChildExecutions, Means
from supervisor.toolexec.listeners import (
    LISTEN,
    activated_listener,
    listening_within,
    tcp_listener,
    unix_listener,
)
from supervisor.toolexec.lookout import Lookout
from supervisor.toolexec.routes import NoSidecars
from supervisor.toolexec.server import Places, Server
from supervisor.toolexec.slots import Slots
from supervisor.toolexec.throttle import Throttle
from supervisor.toolexec.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterator,
        Mapping,
        Sequence,
    )
    from contextlib import ExitStack

    from supervisor.parts import Parts
    from supervisor.session.ports import ChildView
    from supervisor.toolexec.execution import Execution
    from supervisor.toolexec.handover_state import ToolExecState
    from supervisor.toolexec.notify import NotifyCommand
    from supervisor.toolexec.routes import Routes, Target
    from vfs.clients import Client

URL = "AIFO_TOOLEEXEC_URL"
TOKEN = "AIFO_TOOLEEXEC_TOKEN"  # noqa: S105 - the name of a variable

_CLEAR_LINE = b"\r\x1b[K"


@dataclass(frozen=True, slots=True)
class ToolExecSettings:
    """What is configured.

    Attributes:
        unix: each child gets a unix socket.
        tcp: (address, port, what says so) to listen on; None for no TCP.
        max_executions: at once.
        timeout_s: time limit of an execution, seconds; 0 for none.
        is_timeout_forced: no sidecar's own limit counts beside it.
        verbose: say what is run; frame buffered output.
        log_limit_bytes: most that is kept of one execution's output.
        log_dir: where that is kept; None for the system's temporary directory.
        notify: the notification command; None for none.
    """

    unix: bool = True
    tcp: tuple[str, int, str] | None = ("127.0.0.1", 0, LISTEN)
    max_executions: int = 64
    timeout_s: float = 0.0
    is_timeout_forced: bool = False
    verbose: bool = False
    log_limit_bytes: int = 256 * 1024 * 1024
    log_dir: str | None = None
    notify: NotifyCommand | None = None


class ToolExec:
    """Runs tools for the children of one host; see ``open_toolexec``.

    Attributes:
        routes: the sidecars.
        tokens: whose request it is.
        signals: numbers by name.
        notify: the notification command.
        shared_url: where a child without a socket of its own finds it.
        shared: what listens where all children may come.
        left: what the program before has left, until all of it is entered.
        entered: the executions among that, by child, in the order of the state.
        places: for connections, over all that listens.
        lookout: for starts of tools that take long.
        heads: the turn in which large heads are parsed, for parts of it (``Server``).
        large_output: makes a handle of a finished execution's output, or answers None
            to have it sent as it is; None where nobody can.
    """

    def __init__(self, host: Parts, settings: ToolExecSettings, routes: Routes) -> None:
        self.routes = routes
        self.tokens: Tokens[ChildExecutions] = Tokens()
        self.notify = settings.notify
        self.signals = {
            name.decode(): getattr(signal, f"SIG{name.decode()}")
            for name in toolexec.SIGNALS
        }
        self.large_output: (
            Callable[[ChildView, Execution], Awaitable[bytes | None]] | None
        ) = None
        self._host = host
        self._settings = settings
        self._slots = Slots(settings.max_executions, host.fs)
        self._null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._log_dir = settings.log_dir or tempfile.gettempdir()
        self.shared_url: str | None = None
        self.shared: list[Server] = []
        self.left: ToolExecState | None = None
        self.entered: dict[str, list[Execution]] = {}
        self.places = Places(self._slots.descriptors)
        self.lookout = Lookout()
        self.heads = Throttle()
        self._servers: set[Server] = set()
        self._children: dict[str, ChildExecutions] = {}
        self.gate = Gate()

    @property
    def is_verbose(self) -> bool:
        """Whether it says what it runs."""
        return self._settings.verbose

    # A service (see ``session.ports``)

    async def child_starting(
        self, child: ChildView, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Give a child its token and socket; see ``Service``."""
        executions = await self.own(child, stack)
        self.give_token(executions, self.tokens.issue(executions), stack)
        url, spec = self.shared_url, child.spec
        if not (spec.sandbox.unix_sockets or spec.is_within_reach(url)):
            return await self._within(executions, stack)
        is_own = self._settings.unix and spec.sandbox.unix_sockets
        if spec.run_dir is not None and (is_own or not spec.is_within_reach(url)):
            path, listener = await stack.enter_async_context(unix_listener(spec))
            executions.listener = listener.socket.fileno(), path
            await self.listen_for_child(listener, stack)
            url = f"unix://{path}"
        if url is None:
            raise OSError(2, "a child of ToolExec needs a directory for its socket")
        return {URL: url, TOKEN: executions.token}

    async def _within(
        self, executions: ChildExecutions, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Have a child that makes no unix sockets listen for itself."""

        def taken(fd: int) -> None:
            executions.listener = fd, ""

        child, serve = executions.child, self._serve
        url = await listening_within(child, self.shared_url, taken, serve, stack)
        return {} if url is None else {URL: url, TOKEN: executions.token}

    async def own(self, child: ChildView, stack: AsyncExitStack) -> ChildExecutions:
        """Make what a child's executions are in; it ends with the child."""
        means = Means(
            self._slots,
            self._settings.log_limit_bytes,
            self._log_dir,
            self._null_fd,
        )
        executions = ChildExecutions(self._host, child, means)
        self._children[child.id] = executions
        stack.callback(self._children.pop, child.id, None)
        nursery = await stack.enter_async_context(trio.open_nursery())
        executions.nursery = nursery
        stack.push_async_callback(executions.close)
        return executions

    def give_token(
        self, executions: ChildExecutions, token: str, stack: AsyncExitStack
    ) -> None:
        """Let a token stand for a child until it has ended."""
        executions.token = token
        stack.callback(self.tokens.revoke, token)

    def client_gone(self, client: Client) -> None:
        """Nothing: executions belong to the child, not to a conversation of its."""

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
        server = Server(self, listener, is_shared=is_shared)
        self._servers.add(server)
        try:
            await server.run(task_status)
        finally:
            self._servers.discard(server)

    # Handed over (see ``ports.Portable``)

    def rest(self) -> None:
        """Answer no more requests; those that come wait."""
        self.gate.shut()

    def go_on(self) -> None:
        """Answer those that have waited."""
        self.gate.open()

    def busy(self) -> str | None:
        """Say what has to end first."""
        return handover.busy(self)

    def interrupt(self) -> None:
        """Nothing: what it does ends by itself or is handed over."""

    def hand_over(self, stack: ExitStack) -> tuple[object, set[int]]:
        """Return listeners, tokens, executions, connections, sidecars."""
        del stack
        return handover.hand_over(self)

    async def take_over(self, state: object) -> None:
        """Nothing: its listeners had to be there before (``open_shared``)."""

    async def child_entered(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Go on with a child's executions."""
        await handover.enter(self, child, stack)

    async def all_entered(self) -> None:
        """Go on with the connections, and answer requests."""
        handover.go_on(self)
        self.go_on()

    @property
    def servers(self) -> frozenset[Server]:
        """All that listen."""
        return frozenset(self._servers)

    @property
    def children(self) -> Mapping[str, ChildExecutions]:
        """The executions of each child, by its id."""
        return self._children

    @property
    def host(self) -> Parts:
        """Whose children they are."""
        return self._host

    @property
    def slots(self) -> Slots:
        """Those of the host."""
        return self._slots

    # What connections ask

    def timeout_of(self, target: Target) -> float:
        """Return the time limit of an execution, seconds; 0 for none."""
        own = 0.0 if self._settings.is_timeout_forced else target.timeout_s
        return own or self._settings.timeout_s

    def log(self, level: str, text: str, **fields: object) -> None:
        """Write a line to the host's log."""
        self._host.log.write(level, text, **fields)

    def tell(self, text: str) -> None:
        """Say what is run, where that was asked for.

        On a terminal a line in progress is cleared first, so that streamed output and
        log lines do not share one (spec: line-safe logs).  Nobody is waited for: what is
        not read is counted, as lines of the log are (``logs``).
        """
        if not self._settings.verbose:
            return
        line = f"toolexec: {text}"
        with suppress(OSError):  # nobody is there to read what it says
            if sys.stdout is not None:
                sys.stdout.flush()
            clear = _CLEAR_LINE if os.isatty(2) else b""
            if not self._host.log.writes("INFO"):
                shown = toolexec.shown(line)
                if speaks_json():
                    put_line(json_line("INFO", shown))
                else:
                    put_line(b"%b%b\n" % (clear, shown.encode()))
                return
            if clear:
                put_line(clear)
            self._host.log.write("INFO", line)

    # Its own life

    async def open_shared(
        self, nursery: trio.Nursery, activated: Sequence[socket.socket]
    ) -> None:
        """Listen where all children may come: on what was opened for it, or on TCP.

        Raises:
            OSError: it cannot be had.
        """
        if self.left is not None:
            for sock in activated:  # taken by the program before, and handed over
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
        """Give back what belongs to no child."""
        os.close(self._null_fd)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors, with a word for each."""
        yield self._null_fd, "null device for tools"
        for server in self._servers:
            for fd in server.descriptors():
                yield fd, "toolexec connection"
        for executions in self._children.values():
            yield from executions.descriptors()


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
        settings: what is configured.
        routes: the sidecars; None for none.
        activated: sockets that the service manager opened; owned.
        left: what the program before has left of it; None if nothing.

    Raises:
        OSError: a listener cannot be had.
        HandoverError: what was left is another program's.
    """
    service = ToolExec(host, settings, routes or NoSidecars())
    service.left = handover_state.read(left)
    if service.left is not None:
        service.rest()  # until all of it is entered
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.lookout.run)
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
