"""Where clients of ToolExec connect: a unix socket for each child, one TCP port for the host.

Making listeners, or taking those that are there.

Rule: a child's socket is made, and removed, in the directory that the host has made for it,
wherever the name of that leads by then (``spec``).

Sources: unix(7).
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio

from hostlib.listener import listener_on
from hostlib.unix_listener import identity_in, listen_at, listen_on
from supervisor.sandbox.forecast import foreseen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AsyncExitStack

    from supervisor.fsproxy.ports import ChildView
    from supervisor.spec import ChildSpec

BACKLOG = 128
"""Connections that may wait to be accepted while the host is busy for a moment."""

UNIX_BACKLOG = 1024
"""Likewise at a child's own socket. TCP tries again where the queue is full; there, curl is
told so at once (EAGAIN, unix(7)) and gives up, and its shim with it. No other task
waits there."""

SOCKET_NAME = "toolexec.sock"

LISTEN = "toolexec.listen"
"""Of the configuration: where to listen."""

LONGEST_PATH_BYTES = 107
"""Room in sockaddr_un, unix(7); the host could do with more, a client could not."""

INNER_PORT = 8087
"""Where a child listens in its own net namespace if the host itself has no port."""

NO_WAY = (
    "no way to its tools: its profile has unix_sockets = false, and no TCP address of this"
    " host is in its reach; give it network = 'host' with such a [toolexec] listen, the"
    " layer netns, or tools = []"
)
"""Why a child is not started."""

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what a client connects to


@asynccontextmanager
async def unix_listener(
    spec: ChildSpec,
) -> AsyncIterator[tuple[str, trio.SocketListener]]:
    """Listen in a child's own directory; a stale socket is replaced, a living one is not.

    Returns:
        Its path, and the listener.

    Raises:
        OSError: it cannot be had; ``filename`` is its path.
    """
    path = f"{spec.run_dir}/{SOCKET_NAME}"
    if len(os.fsencode(path)) > LONGEST_PATH_BYTES:
        # Of a daemon's children it lies in the state directory, of a run's in TMPDIR.
        advice = "use a shorter [host] state_dir for serve, a shorter TMPDIR for run"
        text = f"longer than {LONGEST_PATH_BYTES} bytes; {advice}"
        raise OSError(errno.ENAMETOOLONG, text, path)
    async with listen_at(path, spec.run_dir_held, UNIX_BACKLOG) as listener:
        yield path, listener


@asynccontextmanager
async def unix_listener_on(
    fd: int, path: str, spec: ChildSpec
) -> AsyncIterator[trio.SocketListener]:
    """Listen on a child's socket that the program before has made."""
    sock = socket.socket(fileno=fd)
    identity = None
    with suppress(OSError), spec.run_dir_held() as dir_fd:
        # The child may have removed it: the directory is its own.
        identity = identity_in(dir_fd, SOCKET_NAME)
    async with listen_on(sock, path, identity, spec.run_dir_held) as listener:
        yield listener


async def tcp_listener(
    host: str, port: int, chosen_by: str = LISTEN
) -> tuple[str, trio.SocketListener]:
    """Listen on a TCP port; 0 takes a free one.

    Args:
        host: an address or a name.
        port: its number.
        chosen_by: what says so, for an operator who has to choose another one.

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
        reason = why.strerror or why
        text = f"cannot listen on {host}:{port}: {reason}; choose another {chosen_by}"
        raise OSError(why.errno or errno.EIO, text) from None
    for other in others:  # a name with several addresses: one port, one listener
        await other.aclose()
    return _tcp_url(listener.socket.getsockname()), listener


def _tcp_url(address: tuple[str, int]) -> str:
    bound, number = address[:2]
    shown = _ANY.get(bound, bound)
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{number}/exec"


async def listening_within(
    child: ChildView,
    url: str | None,
    taken: Callable[[int], None],
    serve: Callable[[trio.SocketListener], Awaitable[None]],
    stack: AsyncExitStack,
) -> str | None:
    """Have a child listen in its own net namespace, for it makes no unix sockets (ADR 22).

    Args:
        child: not spawned yet.
        url: of what all share; None for nothing.
        taken: told of the descriptor of what it listens on, when the host has it.
        serve: serves what it listens on, until the stack is unwound.
        stack: of the child.

    Returns:
        The address that it is told; None for one that may have no tools.

    Raises:
        OSError: it has no loopback of its own, and so no way to its tools.
    """
    spec = child.spec
    if spec.network == "host" or "netns" not in foreseen(spec.sandbox):
        if spec.tools == frozenset():
            return None
        raise OSError(errno.EINVAL, NO_WAY)
    nursery = await stack.enter_async_context(trio.open_nursery())
    stack.callback(nursery.cancel_scope.cancel)

    def begin(sock: socket.socket) -> None:
        taken(sock.fileno())
        nursery.start_soon(serve, listener_on(sock.detach()))

    wanted = INNER_PORT if url is None else urlsplit(url).port or INNER_PORT
    return _tcp_url((_ANY["0.0.0.0"], child.listen_within(wanted, begin, stack)))  # noqa: S104


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
