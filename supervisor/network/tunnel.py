"""Bytes between two sockets, both ways, moved within the kernel (splice(2)).

1. Bytes are read from one side only as the other takes them: only the kernel's buffers and
   one pipe lie between.
2. A pipe is held only while bytes move: an idle connection costs two descriptors, and
   a third one while one side alone has ended.
3. The end of one side is the half-close of the other. An error of one side, or too long
   a silence, resets both (spec NET6). A side that has ended is always readable, so that
   its reset is waited for by an epoll of its own.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

import trio

from hostlib.linux.pipes import Pipe, open_pipe
from hostlib.readiness import wait_readable, wait_writable
from supervisor.network.pace import Pace
from supervisor.network.sockets import close_socket, receive, reset_socket, send_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIPE_BYTES = 262_144
TURN_BYTES = 1024 * 1024
"""Bytes that are moved before other tasks run: as much as a READ."""
MAX_SPARE_PIPES = 8
"""Empty pipes that are kept for the next bytes: to make one takes 20 us."""
IDLE_S = 3600.0
"""How long neither side may send anything."""
READ_BYTES = 65_536

_PIPE_PAUSE_S = 0.1  # between tries while the host has no descriptors for a pipe
_DEADLINE_STEPS = 64  # a deadline is moved on no more often while it runs
_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class TunnelError(Exception):
    """Bytes that may not be passed on."""


class MeterError(TunnelError):
    """They are too many, or too late; raised by a `Meter`."""


class FilterError(TunnelError):
    """They are wrong; raised by a `Filter`."""


class Meter(Protocol):
    """Counts the bytes of a tunnel before they are passed on."""

    def add_received(self, size: int) -> None:
        """Count bytes for the inner side; raise `MeterError` if they are too many."""
        ...

    def add_sent(self, size: int) -> None:
        """Count bytes for the outer side; raise `MeterError` if they may not go."""
        ...


class Filter(Protocol):
    """Sees the bytes of the inner side before they are sent, and may change them."""

    def forward(self, data: bytes) -> bytes:
        """Return what is sent for some bytes, or raise `FilterError`."""
        ...

    @property
    def is_needed(self) -> bool:
        """Whether it has to see what comes next."""
        ...


class Pipes:
    """Pipes of a host, for all of its tunnels.

    Attributes:
        pace: of the bytes that begin to move.
    """

    def __init__(self) -> None:
        self._spare: list[Pipe] = []
        self._open: set[Pipe] = set()
        self._watches: set[int] = set()
        self.pace = Pace()

    @property
    def open(self) -> int:
        """How many there are, those included through which bytes move."""
        return len(self._open)

    async def take(self) -> Pipe:
        """Return an empty pipe, in a turn of the loop that has room for its bytes.

        Waits as well while the host has no descriptors for one.
        """
        await self.pace.wait_turn()
        while True:
            try:
                pipe = self._spare.pop() if self._spare else open_pipe(PIPE_BYTES)
            except OSError:
                await trio.sleep(_PIPE_PAUSE_S)
            else:
                self._open.add(pipe)
                return pipe

    def give_back(self, pipe: Pipe) -> None:
        """Keep an empty pipe for others, or close it."""
        if len(self._spare) < MAX_SPARE_PIPES:
            self._spare.append(pipe)
        else:
            self.drop(pipe)

    def drop(self, pipe: Pipe) -> None:
        """Close a pipe that may not be empty."""
        self._open.discard(pipe)
        pipe.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return what is held of the host's descriptors."""
        return (*(end for pipe in self._open for end in pipe), *self._watches)

    async def wait_reset(self, sock: socket.socket) -> bool:
        """Wait until both directions of a socket are over; tell whether it was reset.

        Raises:
            OSError: the host has no descriptor or no watch for that.
        """
        with select.epoll() as epoll:
            epoll.register(sock, 0)  # errors and hang-ups are reported always
            self._watches.add(epoll.fileno())
            try:
                await wait_readable(epoll)
            finally:
                self._watches.discard(epoll.fileno())
                trio.lowlevel.notify_closing(epoll)
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def close(self) -> None:
        """Close all pipes that are kept."""
        while self._spare:
            self.drop(self._spare.pop())


class Tunnel:
    """Joins two connected sockets, and closes both."""

    def __init__(
        self,
        inner: socket.socket,
        outer: socket.socket,
        meter: Meter,
        pipes: Pipes,
    ) -> None:
        self._inner = inner
        self._outer = outer
        self._meter = meter
        self._pipes = pipes
        self._scope = trio.CancelScope()
        self._watch = trio.CancelScope()
        self._is_half_closed = False
        self._idle_s = IDLE_S
        self._failure: TunnelError | None = None

    async def run(
        self,
        first: bytes = b"",
        outgoing: Filter | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        """Move bytes until both sides have ended, or one has failed.

        Args:
            first: bytes that the inner side has sent already.
            outgoing: sees all that it sends, where that has to be seen.
            idle_s: how long neither side may send anything.

        Cancellation: both sides are reset.

        Raises:
            TunnelError: as the meter or the filter did; both sides are reset.
        """
        self._idle_s = idle_s
        is_whole = False
        try:
            self._scope.deadline = trio.current_time() + idle_s
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._move_in, nursery)
                    await self._move_out(nursery, first, outgoing)
                is_whole = not self._scope.cancel_called
        finally:
            end = close_socket if is_whole else reset_socket
            end(self._outer)
            end(self._inner)
        if self._failure is not None:
            raise self._failure

    async def _move_in(self, nursery: trio.Nursery) -> None:
        """Move what the peer sends."""
        with self._failures():
            await self._splice(self._outer, self._inner, self._meter.add_received)
            self._note_end(self._outer, nursery)

    async def _move_out(
        self, nursery: trio.Nursery, first: bytes, outgoing: Filter | None
    ) -> None:
        """Move what the child sends."""
        with self._failures():
            await self._send_all_out(first, outgoing)
            self._note_end(self._inner, nursery)

    def _note_end(self, sock: socket.socket, nursery: trio.Nursery) -> None:
        """Note that a side has ended; watch it as long as the other one has not."""
        if self._is_half_closed:
            self._watch.cancel()
        else:
            self._is_half_closed = True
            nursery.start_soon(self._watch_reset, sock)

    async def _watch_reset(self, sock: socket.socket) -> None:
        """End the other direction where a side is reset that has ended already."""
        with self._watch, suppress(OSError):  # without a watch the next byte tells it
            if await self._pipes.wait_reset(sock):
                self._scope.cancel()

    async def _send_all_out(self, first: bytes, outgoing: Filter | None) -> None:
        """Move all that the child sends, seen by a filter as long as that needs it."""
        data = first
        while outgoing is not None and outgoing.is_needed:
            await self._send_out(outgoing.forward(data))
            data = await receive(self._inner, READ_BYTES)
            if not data:
                self._outer.shutdown(socket.SHUT_WR)
                return
        await self._send_out(data)
        await self._splice(self._inner, self._outer, self._meter.add_sent)

    async def _send_out(self, data: bytes) -> None:
        if data:
            self._note_life()
            self._meter.add_sent(len(data))
            await send_all(self._outer, data)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """End both directions where one of them fails inside."""
        try:
            yield
        except OSError:
            self._scope.cancel()
        except TunnelError as why:
            self._failure = why
            self._scope.cancel()

    async def _splice(
        self, source: socket.socket, sink: socket.socket, count: Callable[[int], None]
    ) -> None:
        """Move all of one direction, and its end."""
        is_open = True
        while is_open:
            await wait_readable(source)
            pipe = await self._pipes.take()
            is_empty = False
            try:
                is_open = await self._splice_burst(source, sink, pipe, count)
                is_empty = True
            finally:
                if is_empty:
                    self._pipes.give_back(pipe)
                else:
                    self._pipes.drop(pipe)
        sink.shutdown(socket.SHUT_WR)

    async def _splice_burst(
        self,
        source: socket.socket,
        sink: socket.socket,
        pipe: Pipe,
        count: Callable[[int], None],
    ) -> bool:
        """Move what is there until nothing is left; tell whether more may come."""
        source_fd, sink_fd = source.fileno(), sink.fileno()
        turn_bytes = 0
        while True:
            try:
                size = os.splice(source_fd, pipe.into, PIPE_BYTES, flags=_FLAGS)
            except BlockingIOError:
                return True
            if not size:
                return False
            count(size)
            turn_bytes += size
            while size:
                try:
                    size -= os.splice(pipe.out, sink_fd, size, flags=_FLAGS)
                except BlockingIOError:
                    await wait_writable(sink)
            self._note_life()
            if turn_bytes >= TURN_BYTES:
                turn_bytes = 0
                await trio.lowlevel.checkpoint()

    def _note_life(self) -> None:
        """Put off the end of a connection that is silent."""
        deadline = trio.current_time() + self._idle_s
        if deadline - self._scope.deadline > self._idle_s / _DEADLINE_STEPS:
            self._scope.deadline = deadline
