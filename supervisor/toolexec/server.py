"""Listening: a unix socket for each child, one TCP port for the host.

Rules of this file.

1. A connection is a task in the nursery of its listener, and ends with it.
2. A listener has ``MAX_CONNECTIONS`` at once; one more is told that the server is busy.
   So one child's idle connections take nothing from another's.

Sources: unix(7), RFC 9112.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio

from protocol.toolexec import BUSY
from supervisor.control_socket import identity_of, listening, listening_on
from supervisor.toolexec.connection import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from supervisor.toolexec.moments import Task
    from supervisor.toolexec.service import ToolExec

MAX_CONNECTIONS = 256
"""Connections of one listener: its executions, their readers, and those that signal."""

BACKLOG = 128
"""Connections that may wait to be accepted while the host is busy for a moment."""

SEND_BYTES = 256 * 1024
"""Two pieces of output wait in a socket at most, for a client that is a little late."""

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what a client connects to

SOCKET_NAME = "toolexec.sock"

LONGEST_PATH_BYTES = 107
"""Room in sockaddr_un, unix(7); the host could do with more, a client could not."""


class Server:
    """One listener and its connections.

    Args:
        service: what serves them.
        listener: owned.
    """

    def __init__(self, service: ToolExec, listener: trio.SocketListener) -> None:
        self._service = service
        self._listener = listener
        self.connections: dict[int, Connection] = {}
        self._nursery: trio.Nursery | None = None

    async def run(
        self, task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept and serve until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started(self)
            await trio.serve_listeners(self._serve, [self._listener])

    def go_on(self, connection: Connection, task: Task | None, unsent: bytes) -> None:
        """Go on with a connection of the program before; see ``Connection.serve``."""
        if self._nursery is None:
            raise RuntimeError("a server that does not run has no connections")
        self._nursery.start_soon(self._own, connection, task, unsent)

    async def _serve(self, stream: trio.SocketStream) -> None:
        accepted = stream.socket
        family, kind = accepted.family, accepted.type
        # The plain socket beneath: its calls need no task switch when they do not wait.
        sock = socket.socket(family, kind, 0, accepted.detach())
        sock.setblocking(False)
        # A piece of output should fit, or the host waits in the middle of each; the
        # kernel takes as much of this as wmem_max allows.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        connection = Connection(self._service, sock)
        if len(self.connections) >= MAX_CONNECTIONS:
            await connection.refuse_at_once(BUSY)
            return
        await self._own(connection)

    async def _own(
        self, connection: Connection, task: Task | None = None, unsent: bytes = b""
    ) -> None:
        number = connection.wire.sock.fileno()
        self.connections[number] = connection
        try:
            await connection.serve(task, unsent)
        finally:
            del self.connections[number]

    @property
    def listener_fd(self) -> int:
        """The descriptor that it listens on."""
        return self._listener.socket.fileno()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return (self.listener_fd, *self.connections)


@asynccontextmanager
async def unix_listener(
    directory: str,
) -> AsyncIterator[tuple[str, trio.SocketListener]]:
    """Listen in a directory; a stale socket is replaced, a living one is not.

    Returns:
        Its path, and the listener.

    Raises:
        OSError: it cannot be had; ``filename`` is its path.
    """
    path = os.path.join(directory, SOCKET_NAME)  # noqa: PTH118 - a str is wanted
    if len(os.fsencode(path)) > LONGEST_PATH_BYTES:
        # Of a daemon's children it lies in the state directory, of a run's in TMPDIR.
        advice = "use a shorter [host] state_dir for serve, a shorter TMPDIR for run"
        text = f"longer than {LONGEST_PATH_BYTES} bytes; {advice}"
        raise OSError(errno.ENAMETOOLONG, text, path)
    async with listening(path) as listener:
        yield path, listener


@asynccontextmanager
async def unix_listener_on(fd: int, path: str) -> AsyncIterator[trio.SocketListener]:
    """Listen on a child's socket that the program before has made."""
    sock = socket.socket(fileno=fd)
    identity = None
    with suppress(OSError):  # the child may have removed it: the directory is its own
        identity = identity_of(path)
    async with listening_on(sock, path, identity) as listener:
        yield listener


async def tcp_listener(host: str, port: int) -> tuple[str, trio.SocketListener]:
    """Listen on a TCP port; 0 takes a free one.

    Returns:
        The URL that a client on this machine is told, and the listener.

    Raises:
        OSError: it cannot be had.
    """
    try:
        listener, *others = await trio.open_tcp_listeners(
            port, host=host, backlog=BACKLOG
        )
    except OSError as why:
        text = f"cannot listen on {host}:{port}: {why.strerror or why}; choose another"
        raise OSError(why.errno or errno.EIO, text) from None
    for other in others:  # a name with several addresses: one port, one listener
        await other.aclose()
    return _tcp_url(listener.socket.getsockname()), listener


def _tcp_url(address: tuple[str, int]) -> str:
    bound, number = address[:2]
    shown = _ANY.get(bound, bound)
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{number}/exec"


def activated_listener(sock: socket.socket) -> tuple[str, trio.SocketListener]:
    """Listen on a socket that the service manager opened; it is owned then.

    Returns:
        The URL that a client on this machine is told, and the listener.

    Raises:
        OSError: it is none that can be listened on, or has no address for a client.
    """
    try:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    except ValueError:
        text = "the activated socket 'toolexec' does not listen for streams"
        raise OSError(errno.EINVAL, f"{text}; use ListenStream") from None
    address = sock.getsockname()
    if sock.family != socket.AF_UNIX:
        return _tcp_url(address), listener
    if not isinstance(address, str) or not address:
        text = "the activated socket 'toolexec' has no path in the file system"
        raise OSError(errno.EINVAL, f"{text}; use a path in ListenStream")
    return f"unix://{address}", listener
