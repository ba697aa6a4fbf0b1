"""ToolExec as a host's service: its listeners, its tokens, its children's executions.

Rules of this file.

1. A child has a token of its own and, where unix sockets are configured, a socket of its
   own in its directory; both end with it, and with them its executions.
2. With both kinds of listener a child is told the unix one.
3. A socket that the service manager opened is shared by all children, in the place of
   the TCP port; their tokens tell them apart.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from protocol import toolexec
from supervisor.toolexec.executions import ChildExecutions
from supervisor.toolexec.server import (
    Server,
    activated_listener,
    tcp_listener,
    unix_listener,
)
from supervisor.toolexec.slots import Slots
from supervisor.toolexec.tokens import Tokens

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from protocol.toolexec_token import Rights
    from supervisor.child import Child
    from supervisor.host import Host
    from supervisor.toolexec.execution import Execution
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
        tcp: (address, port) to listen on; None for no TCP.
        max_executions: at once.
        timeout_s: time limit of an execution, seconds; 0 for none.
        verbose: say what is run; frame buffered output.
        log_limit_bytes: most that is kept of one execution's output.
        log_dir: where that is kept; None for the system's temporary directory.
        notify: the notification command; None for none.
    """

    unix: bool = True
    tcp: tuple[str, int] | None = ("127.0.0.1", 0)
    max_executions: int = 64
    timeout_s: float = 0.0
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
        large_output: makes a handle of a finished execution's output, or answers None
            to have it sent as it is; None where nobody can.
    """

    def __init__(self, host: Host, settings: ToolExecSettings, routes: Routes) -> None:
        self.routes = routes
        self.tokens: Tokens[ChildExecutions] = Tokens()
        self.notify = settings.notify
        self.signals = {
            name.decode(): getattr(signal, f"SIG{name.decode()}")
            for name in toolexec.SIGNALS
        }
        self.large_output: (
            Callable[[Child, Execution], Awaitable[bytes | None]] | None
        ) = None
        self._host = host
        self._settings = settings
        self._slots = Slots(settings.max_executions)
        self._null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._log_dir = settings.log_dir or tempfile.gettempdir()
        self._shared_url: str | None = None
        self._servers: set[Server] = set()
        self._children: set[ChildExecutions] = set()

    @property
    def is_verbose(self) -> bool:
        """Whether it says what it runs."""
        return self._settings.verbose

    # A service (see supervisor/services.py)

    async def child_starting(
        self, child: Child, stack: AsyncExitStack
    ) -> dict[str, str]:
        """Give a child its token and socket; see ``Service``."""
        await self.routes.child_starting(child, stack)
        executions = ChildExecutions(
            self._host,
            child,
            self._slots,
            self._settings.log_limit_bytes,
            self._log_dir,
            self._null_fd,
        )
        self._children.add(executions)
        stack.callback(self._children.discard, executions)
        nursery = await stack.enter_async_context(trio.open_nursery())
        executions.nursery = nursery
        stack.push_async_callback(executions.close)
        url = self._shared_url
        if self._settings.unix and child.spec.run_dir is not None:
            url = await self._listen_for(child.spec.run_dir, stack)
        if url is None:
            raise OSError(2, "a child of ToolExec needs a directory for its socket")
        token = self.tokens.issue(executions)
        stack.callback(self.tokens.revoke, token)
        return {URL: url, TOKEN: token}

    def client_gone(self, client: Client) -> None:
        """Nothing: executions belong to the child, not to a conversation of its."""

    async def _listen_for(self, directory: str, stack: AsyncExitStack) -> str:
        url, listener = await stack.enter_async_context(unix_listener(directory))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(self._serve, listener)
        return url

    async def _serve(self, listener: trio.SocketListener) -> None:
        server = Server(self, listener)
        self._servers.add(server)
        try:
            await server.run()
        finally:
            self._servers.discard(server)

    # What connections ask

    def timeout_of(self, target: Target) -> float:
        """Return the time limit of an execution, seconds; 0 for none."""
        return target.timeout_s or self._settings.timeout_s

    def log(self, level: str, text: str) -> None:
        """Write a line to the host's log."""
        self._host.log.write(level, text)

    def tell(self, text: str) -> None:
        """Say what is run, where that was asked for.

        On a terminal a line in progress is cleared first, so that streamed output and
        log lines do not share one (spec: line-safe logs).
        """
        if not self._settings.verbose:
            return
        line = f"toolexec: {text}"
        with suppress(OSError):  # nobody reads what it says
            if sys.stdout is not None:
                sys.stdout.flush()
            if os.isatty(2):
                os.write(2, _CLEAR_LINE)
            if self._host.log.writes("INFO"):
                self._host.log.write("INFO", line)
            else:
                os.write(2, f"{toolexec.shown(line)}\n".encode())

    # Its own life

    async def open_shared(
        self, nursery: trio.Nursery, activated: Sequence[socket.socket]
    ) -> None:
        """Listen where all children may come: on what was opened for it, or on TCP.

        Raises:
            OSError: it cannot be had.
        """
        if activated:
            opened = [activated_listener(sock) for sock in activated]
        elif self._settings.tcp is not None:
            opened = [await tcp_listener(*self._settings.tcp)]
        else:
            return
        self._shared_url = opened[0][0]
        for _, listener in opened:
            nursery.start_soon(self._serve, listener)

    def close(self) -> None:
        """Give back what belongs to no child."""
        os.close(self._null_fd)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors, with a word for each."""
        yield self._null_fd, "null device for tools"
        for server in self._servers:
            for fd in server.descriptors():
                yield fd, "toolexec connection"
        for executions in self._children:
            yield from executions.descriptors()


class NoSidecars:
    """The routes of a host without a sidecar: no tool is permitted."""

    def is_permitted(self, child: Child, tool: str, rights: Rights) -> bool:
        """No."""
        return False

    async def route(
        self, child: Child, tool: str, cwd: bytes, rights: Rights
    ) -> Target:
        """Never asked, for nothing is permitted."""
        raise NotImplementedError(tool)

    async def child_starting(self, child: Child, stack: AsyncExitStack) -> None:
        """Nothing is to be made ready."""


@asynccontextmanager
async def open_toolexec(
    host: Host,
    settings: ToolExecSettings,
    routes: Routes | None = None,
    activated: Sequence[socket.socket] = (),
) -> AsyncIterator[ToolExec]:
    """Offer tools to the children of a host for the length of the block.

    Args:
        host: open; its children must have ended when the block ends.
        settings: what is configured.
        routes: the sidecars; None for none.
        activated: sockets that the service manager opened; owned.

    Raises:
        OSError: a listener cannot be had.
    """
    service = ToolExec(host, settings, routes or NoSidecars())
    try:
        async with trio.open_nursery() as nursery:
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
