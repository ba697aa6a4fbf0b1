"""Listeners of ToolExec: a unix socket for each child, one TCP port for the host.

Makes listeners, or takes those that are open.

A child's socket is made and removed in the directory that the host has made for it,
even if the name leads elsewhere by then (``spec``).

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
"""Connections that may wait to be accepted while the host is busy."""

UNIX_BACKLOG = 1024
"""The same at a child's own socket. TCP retries when the queue is full; here curl gets
EAGAIN (unix(7)) and gives up, and its shim with it. No other task waits there."""

SOCKET_NAME = "toolexec.sock"

LISTEN = "toolexec.listen"
"""The configuration key of the address."""

LONGEST_PATH_BYTES = 107
"""The size of a path in sockaddr_un, unix(7), which binds clients as well."""

INNER_PORT = 8087
"""The port of a child in its own net namespace if the host has none."""

NO_WAY = (
    "no way to its tools: its profile has unix_sockets = false, and it reaches no TCP address;"
    " give it layer netns, network = 'host' with a TCP listen, or tools = []"
)
"""The reason for a child that is not started."""

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what a client connects to


@asynccontextmanager
async def unix_listener(
    spec: ChildSpec,
) -> AsyncIterator[tuple[str, trio.SocketListener]]:
    """Listen in a child's own directory; replace a stale socket, not a living one.

    Returns:
        The path and the listener.

    Raises:
        OSError: the socket cannot be made; ``filename`` is its path.
    """
    path = f"{spec.run_dir}/{SOCKET_NAME}"
    if len(os.fsencode(path)) > LONGEST_PATH_BYTES:
        # In the state directory for a daemon's children, in TMPDIR for a run's.
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
        # The child may have removed it from its directory.
        identity = identity_in(dir_fd, SOCKET_NAME)
    async with listen_on(sock, path, identity, spec.run_dir_held) as listener:
        yield listener


async def tcp_listener(
    host: str, port: int, chosen_by: str = LISTEN
) -> tuple[str, trio.SocketListener]:
    """Listen on a TCP port; 0 for a free one.

    Args:
        host: an address or a name.
        port: its number.
        chosen_by: the source of the address, for the error text.

    Returns:
        The URL for a client on this machine, and the listener.

    Raises:
        OSError: the port is not available.
    """
    try:
        listener, *others = await trio.open_tcp_listeners(
            port, host=host, backlog=BACKLOG
        )
    except OSError as why:
        reason = why.strerror or why
        text = f"cannot listen on {host}:{port}: {reason}; choose another {chosen_by}"
        raise OSError(why.errno or errno.EIO, text) from None
    for other in others:  # a name with several addresses: one listener
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
    """Return the address of a child that listens in its own net namespace (ADR 22).

    Args:
        child: not spawned yet.
        url: the shared listener's; None for none.
        taken: called with the descriptor of the listener when the host has it.
        serve: serves the listener until the stack is unwound.
        stack: of the child.

    Returns:
        The address for the child; None for one that may have no tools.

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
    """Listen on a socket of the service manager; own it.

    Returns:
        The URL for a client on this machine, and the listener.

    Raises:
        OSError: it cannot listen, or has no address for a client.
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
