"""Accepting connections, for every listener that has a bounded number of them.

Rules of this file.

1. A process that has no descriptor, memory or epoll watch to spare for a moment goes on
   listening: who connects waits in the kernel's queue.  Each try that fails so can be
   told of.
2. Of bounded connections the one that idles longest makes room, once.
3. Whatever goes wrong with one connection ends that one and no other.

``Server`` is the loop of most listeners. Where connections last a millisecond, a loop of its
own takes ``accepted_socket``.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeVar

import trio

from hostlib.linux.epoll import NO_WATCH
from hostlib.log import Log, place_of

if TYPE_CHECKING:
    import _socket
    from collections.abc import Awaitable, Callable, Iterable, Iterator


ACCEPT_PAUSE_S = 0.1
"""Between tries to accept while the process lacks something for it."""

OUT_OF_RESOURCES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN}
)
"""What passes: EAGAIN is said of a thread (``vfs.mounts``)."""

OF_ONE_CONNECTION = frozenset(
    {
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EPROTO,
    }
)
"""Faults of a connection that was about to be accepted, and not of the listener, as Linux
tells them: accept(2)."""


class Idler(Protocol):
    """A connection; ``idle_since`` is None while a question is under way."""

    idle_since: float | None
    scope: trio.CancelScope


class Accepted(Protocol):
    """A connection as ``Server`` serves it; ``scope`` is that of its service."""

    @property
    def stream(self) -> trio.SocketStream:
        """It, as bytes."""
        ...

    @property
    def scope(self) -> trio.CancelScope:
        """Cancelled to end it."""
        ...


C = TypeVar("C", bound=Idler)
S = TypeVar("S", bound=Accepted)
T = TypeVar("T")


def listener_on(fd: int) -> trio.SocketListener:
    """Return what listens on a descriptor that was made elsewhere; it is owned."""
    return trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))


async def accepted(listener: trio.SocketListener) -> trio.SocketStream:
    """Wait for the next connection.

    Raises:
        OSError: the listener is of no use any more.
    """
    return await _patiently(listener.accept, lambda _: None)


async def accepted_socket(
    listener: _socket.socket, tell: Callable[[OSError], None]
) -> socket.socket:
    """Wait for the next connection, as ``accepted``; a plain socket of it.

    For connections that last a millisecond: Trio's stream costs a twentieth of that.

    Args:
        listener: non-blocking; of C, where its family is a number and no ``Enum``.
        tell: told of each try for which the process lacked something.

    Returns:
        It, non-blocking; the caller's.

    Raises:
        OSError: the listener is of no use any more.
    """
    return await _patiently(partial(_next_socket, listener), tell)


async def _patiently(
    accept: Callable[[], Awaitable[T]], tell: Callable[[OSError], None]
) -> T:
    """Accept once the process lacks nothing for it (rule 1)."""
    while True:
        try:
            return await accept()
        except OSError as why:
            is_unwatched = why.errno == errno.ENOSPC  # accept(2) itself fills no disk
            if not is_unwatched and why.errno not in OUT_OF_RESOURCES:
                raise
            tell(OSError(why.errno, NO_WATCH) if is_unwatched else why)
            await trio.sleep(ACCEPT_PAUSE_S)


async def _next_socket(listener: _socket.socket) -> socket.socket:
    while True:
        # Nobody is taken out of the kernel's queue by who is about to end.
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            # As socket.accept, but for what that asks of the listener each time.
            fd, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001
        except BlockingIOError:
            await trio.lowlevel.wait_readable(listener)
        except OSError as why:
            if why.errno not in OF_ONE_CONNECTION:
                raise
            # One after another, others have their turn: some filters refuse all.
            await trio.lowlevel.checkpoint()
        else:
            try:
                sock = socket.socket(listener.family, listener.type, 0, fd)
            except BaseException:
                os.close(fd)
                raise
            sock.setblocking(False)
            return sock


class Server(Generic[S]):
    """An accept loop: each connection is served in a task of its own.

    Args:
        listener: where connections come; owned by the caller.
        enter: makes a connection of a stream, after room was made for it.
        serve: serves a connection until its end.
        log: of the host.
        what: is served, for the log.

    Attributes:
        connections: those that there are.
    """

    def __init__(
        self,
        listener: trio.SocketListener,
        enter: Callable[[trio.SocketStream], S],
        serve: Callable[[S], Awaitable[None]],
        log: Log,
        what: str,
    ) -> None:
        self.connections: set[S] = set()
        self._listener = listener
        self._enter = enter
        self._serve = serve
        self._log = log
        self._what = what

    async def run(self) -> NoReturn:
        """Accept connections and serve them until cancelled.

        Raises:
            OSError: the listener is of no use any more.
        """
        async with trio.open_nursery() as nursery:
            while True:
                connection = self._enter(await accepted(self._listener))
                self.connections.add(connection)
                nursery.start_soon(self._serve_to_end, connection)

    async def _serve_to_end(self, connection: S) -> None:
        try:
            with only_this_one(self._log, self._what), connection.scope:
                async with connection.stream:
                    await self._serve(connection)
        finally:
            self.connections.discard(connection)

    def descriptors(self) -> Iterator[int]:
        """Yield what its connections hold of the host's descriptors."""
        for connection in self.connections:
            fd = connection.stream.socket.fileno()
            if fd >= 0:
                yield fd


@contextmanager
def only_this_one(log: Log, what: str) -> Iterator[None]:
    """Serve a connection inside; what goes wrong there ends here (rule 3).

    A peer that is gone, or too slow to be told so, is nobody's fault. Everything else is
    one of this program, and is written to the log: what and where, never a text, which
    may hold what the peer has sent.

    Args:
        log: of the host.
        what: is served, for the log.
    """
    try:
        yield
    except* (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
        pass
    except* Exception as group:  # noqa: BLE001 - rule 3; it is reported
        log.write("ERROR", f"Fault serving {what}: {place_of(group)}")


def make_room(among: Iterable[C]) -> C | None:
    """Cancel the connection that idles longest, and return it; None if none idles."""
    idle = [(one.idle_since, one) for one in among if one.idle_since is not None]
    if not idle:
        return None
    _, longest = min(idle, key=lambda pair: pair[0])
    longest.scope.cancel()
    longest.idle_since = None  # it makes room once
    return longest
