"""Accepting connections, for every listener that bounds their number.

Rules of this file.

1. A process that lacks a descriptor, memory or an epoll watch for a moment listens on,
   and new connections wait in the kernel's queue.  The log tells of it once a minute.
2. If the number of connections is bounded, the one that idles longest makes room, once.
3. A fault of one connection ends that connection only.

``Server`` is the loop of a single listener, ``hostlib.listener_set`` that of many.  One
whose connections last a millisecond has its own loop over ``accept_socket``.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeVar

import trio

from hostlib.event_rate import EventRate
from hostlib.linux.epoll import NO_WATCH
from hostlib.log import Log, place_of

if TYPE_CHECKING:
    import _socket
    from collections.abc import Awaitable, Callable, Iterable, Iterator


ACCEPT_PAUSE_S = 0.1
"""Pause between tries to accept while the process lacks a resource."""

OUT_OF_RESOURCES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN}
)
"""Errors that pass; EAGAIN comes if no thread can be started (``hostlib.threads``)."""

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
"""Errors of accept(2) on Linux that concern the new connection, not the listener."""


_SHORTAGES_PER_S = 1 / 60


class ShortageReport:
    """Logs, once a minute, that the process lacks a resource for a connection.

    Args:
        log: the host's log.
        what: the name of the service.
    """

    def __init__(self, log: Log, what: str) -> None:
        self._log = log
        self._what = what
        self._rate = EventRate(1, _SHORTAGES_PER_S)

    def tell(self, why: OSError) -> None:
        """Log a failure to accept, unless one was logged in the last minute."""
        if self._rate.take(trio.current_time()):
            text = f"{self._what}: cannot accept a connection: {why.strerror}"
            text = f"{text}; those that come wait"
            self._log.write("ERROR", text, reason=why.strerror)


class Idler(Protocol):
    """A connection; ``idle_since`` is None while a request is being handled."""

    idle_since: float | None
    scope: trio.CancelScope


class AcceptedConnection(Protocol):
    """A connection as ``Server`` serves it; ``scope`` is that of its service."""

    @property
    def stream(self) -> trio.SocketStream:
        """The stream of the connection."""
        ...

    @property
    def scope(self) -> trio.CancelScope:
        """The scope to cancel to end the service."""
        ...


C = TypeVar("C", bound=Idler)
S = TypeVar("S", bound=AcceptedConnection)
T = TypeVar("T")


def listener_on(fd: int) -> trio.SocketListener:
    """Return a listener that owns a descriptor which was made elsewhere."""
    return trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=fd)))


async def accept(
    listener: trio.SocketListener, tell: Callable[[OSError], None]
) -> trio.SocketStream:
    """Wait for the next connection and return its stream; see ``accept_socket``."""
    return await _retry_accept(listener.accept, tell)


async def accept_socket(
    listener: _socket.socket, tell: Callable[[OSError], None]
) -> socket.socket:
    """Wait for the next connection, as ``accept``, and return a plain socket.

    For connections that last a millisecond: Trio's stream costs a twentieth of that.

    Args:
        listener: non-blocking; a socket of C, whose family is a number and no ``Enum``.
        tell: called for each try that failed because the process lacked a resource.

    Returns:
        A non-blocking socket, which the caller owns.

    Raises:
        OSError: the listener cannot be used any more.
    """
    return await _retry_accept(partial(_next_socket, listener), tell)


async def _retry_accept(
    accept: Callable[[], Awaitable[T]], tell: Callable[[OSError], None]
) -> T:
    """Accept; try again while the process lacks a resource (rule 1)."""
    while True:
        try:
            return await accept()
        except OSError as why:
            # Of epoll_ctl(2), not of accept(2).
            is_unwatched = why.errno == errno.ENOSPC
            if not is_unwatched and why.errno not in OUT_OF_RESOURCES:
                raise
            tell(OSError(why.errno, NO_WATCH) if is_unwatched else why)
            await trio.sleep(ACCEPT_PAUSE_S)


async def _next_socket(listener: _socket.socket) -> socket.socket:
    while True:
        # A cancelled task takes no connection out of the kernel's queue.
        await trio.lowlevel.checkpoint_if_cancelled()
        sock = accept_waiting(listener)
        if sock is not None:
            return sock
        # Other tasks run also where a filter refuses one connection after another.
        await trio.lowlevel.wait_readable(listener)


def accept_waiting(listener: _socket.socket) -> socket.socket | None:
    """Return a connection that waits, as a plain socket; None if there is none.

    Args:
        listener: non-blocking; None is returned also for a connection that was broken.

    Returns:
        A non-blocking socket, which the caller owns.

    Raises:
        OSError: the process lacks a resource, or the listener is of no use any more.
    """
    try:
        # As socket.accept, without the getsockopt calls on the listener.
        fd, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001
    except BlockingIOError:
        return None
    except OSError as why:
        if why.errno not in OF_ONE_CONNECTION:
            raise
        return None
    try:
        sock = socket.socket(listener.family, listener.type, 0, fd)
    except BaseException:
        os.close(fd)
        raise
    sock.setblocking(False)
    return sock


class Server(Generic[S]):
    """An accept loop that serves each connection in a task of its own.

    Args:
        listener: owned by the caller.
        enter: makes room, and makes a connection of a stream.
        serve: serves a connection until its end.
        log: the host's log.
        what: the name of the service, for the log.

    Attributes:
        connections: the connections that are being served.
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
        self._shortages = ShortageReport(log, what)

    async def run(self) -> NoReturn:
        """Accept connections and serve them until cancelled.

        Raises:
            OSError: the listener cannot be used any more.
        """
        async with trio.open_nursery() as nursery:
            while True:
                stream = await accept(self._listener, self._shortages.tell)
                connection = self._enter(stream)
                self.connections.add(connection)
                nursery.start_soon(self._serve_to_end, connection)

    async def _serve_to_end(self, connection: S) -> None:
        try:
            with contain_fault(self._log, self._what), connection.scope:
                async with connection.stream:
                    await self._serve(connection)
        finally:
            self.connections.discard(connection)

    def descriptors(self) -> Iterator[int]:
        """Yield the descriptors of its connections."""
        for connection in self.connections:
            fd = connection.stream.socket.fileno()
            if fd >= 0:
                yield fd


@contextmanager
def contain_fault(log: Log, what: str) -> Iterator[None]:
    """Catch the faults of a block that serves one connection (rule 3).

    A peer that is gone or too slow is no fault.  Every other exception is a fault of this
    program; the log gets its kind and place, but no text, which may hold a peer's data.

    Args:
        log: the host's log.
        what: the name of the service, for the log.
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
