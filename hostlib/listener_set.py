"""Many listeners watched by one epoll, and accepted from by one task.

1. A listener costs a watch and no task: a child may have 128 of them.
2. In each turn of the loop `BATCH` connections are accepted, one a listener: a child that
   connects without end leaves others their turn.
3. While the process lacks a resource, connections wait in the kernel's queues.
4. A fault of one connection ends that connection only.
"""

from __future__ import annotations

import errno
import select
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import trio

from hostlib.listener import (
    ACCEPT_PAUSE_S,
    OUT_OF_RESOURCES,
    ShortageReport,
    accept_waiting,
    contain_fault,
)
from hostlib.readiness import LOOK_PAUSE_S, note_unwatched, wait_readable

if TYPE_CHECKING:
    import _socket
    import socket
    from collections.abc import Callable, Iterator

    from hostlib.log import Log

BATCH = 16
"""Connections that are accepted in a turn of the loop."""


class _Listener(NamedTuple):
    """A listener, and what `ListenerSet.add` was given with it."""

    sock: _socket.socket
    handle: Callable[[socket.socket], None]
    fail: Callable[[OSError], None] | None


class ListenerSet:
    """Accepts connections of its listeners, in `run`.

    Args:
        what: the name of the service, for the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._epoll = select.epoll()
        self._listeners: dict[int, _Listener] = {}
        self._unwatched: set[int] = set()
        self._wait = trio.CancelScope()

    def add(
        self,
        listener: _socket.socket,
        handle: Callable[[socket.socket], None],
        fail: Callable[[OSError], None] | None = None,
    ) -> None:
        """Accept connections of a listener until `remove`.

        Args:
            listener: non-blocking; the caller's to close, after `remove`.
            handle: begins to serve a connection, which is its own then.
            fail: called with the error of a listener that is of no use any more, after
                it was removed; None for a line in the log.
        """
        if not self._epoll.closed:
            fd = listener.fileno()
            self._watch(fd)
            self._listeners[fd] = _Listener(listener, handle, fail)
            if self._unwatched:
                self._wait.cancel()

    def remove(self, listener: _socket.socket) -> None:
        """Accept no more of a listener's connections."""
        fd = listener.fileno()
        if self._listeners.pop(fd, None) is None or self._epoll.closed:
            return  # it was of no use any more, or all has ended
        if fd in self._unwatched:
            self._unwatched.remove(fd)
        else:
            self._epoll.unregister(fd)

    async def run(self, log: Log) -> NoReturn:
        """Accept until cancelled.

        Args:
            log: told what the process lacks for a connection, once a minute.
        """
        shortages = ShortageReport(log, self._what)
        try:
            while True:
                await self._wait_ready()
                ready = [fd for fd, _ in self._epoll.poll(0, BATCH)]
                for fd in (*self._unwatched, *ready):
                    try:
                        self._accept(fd, log)
                    except OSError as why:
                        shortages.tell(why)
                        await trio.sleep(ACCEPT_PAUSE_S)
                        break
        finally:
            self._epoll.close()

    def descriptors(self) -> Iterator[int]:
        """Yield its descriptor, until `run` has ended."""
        if not self._epoll.closed:
            yield self._epoll.fileno()

    async def _wait_ready(self) -> None:
        """Wait until a connection may wait, or for a moment where a watch is missing."""
        with trio.CancelScope() as self._wait:
            if self._unwatched:
                self._wait.deadline = trio.current_time() + LOOK_PAUSE_S
            await wait_readable(self._epoll)
        for fd in tuple(self._unwatched):
            self._watch(fd)

    def _watch(self, fd: int) -> None:
        """Watch a listener; without a watch it is polled (`hostlib.readiness`)."""
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError as why:
            if why.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            note_unwatched()
            self._unwatched.add(fd)
        else:
            self._unwatched.discard(fd)

    def _accept(self, fd: int, log: Log) -> None:
        """Accept a connection, if one waits.

        Raises:
            OSError: the process lacks a resource.
        """
        listener = self._listeners[fd]
        try:
            sock = accept_waiting(listener.sock)
        except OSError as why:
            if why.errno in OUT_OF_RESOURCES:
                raise
            self.remove(listener.sock)
            if listener.fail is None:
                text = f"{self._what}: a listener accepts no more: {why.strerror}"
                log.write("ERROR", text, reason=why.strerror)
            else:
                listener.fail(why)
            return
        if sock is not None:
            with contain_fault(log, self._what):
                try:
                    listener.handle(sock)
                except BaseException:
                    sock.close()
                    raise
