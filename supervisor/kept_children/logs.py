"""The output of children: stdout and stderr, kept in files that rotate.

From pipes into a stream of ``segments``, and an event for those who follow.

1. stdout and stderr have a pipe each and keep their order; between the two, the order
   is that in which the host read them.
2. Memory is bounded: one piece of at most ``PIECE_BYTES`` a child. A child that writes
   faster than the disk waits in its own write(2), and no other child waits.
3. A full disk or a lost directory never stops a child: pieces are dropped and counted,
   and the log warns once until it works again. Offsets count them: readers see a gap.
4. Without a thread, a piece is written in the host's own; without an epoll watch
   (``readiness``), the host goes on as well.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from hostlib.readiness import wait_readable
from hostlib.threads import in_thread
from supervisor.kept_children.log_marks import ERR, OUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostlib.log import Log
    from hostlib.segments import Segments
    from supervisor.kept_children.log_marks import Marks

PIECE_BYTES = 65_536
"""Bytes read at once: the capacity of a pipe."""

WRITERS = trio.CapacityLimiter(4)
"""Worker threads that logs may use: a hanging disk leaves the others to files."""


class ChildLog:
    """The log of one name; it outlives the processes that had it.

    Args:
        name: of the child.
        segments: the files that keep it.
        marks: record the time and the stream of each piece.
        log: the host's own.
        on_drop: called with the number of bytes that could not be kept.

    Attributes:
        ended: whether the log is complete.
    """

    def __init__(
        self,
        name: str,
        segments: Segments,
        marks: Marks,
        log: Log,
        on_drop: Callable[[int], None],
    ) -> None:
        self.name = name
        self.segments = segments
        self.marks = marks
        self.ended = False
        self._log = log
        self._on_drop = on_drop
        self._lost = 0
        self._begins = False
        self._changed = trio.Event()

    @property
    def changed(self) -> trio.Event:
        """An event that is set with the next piece; take it before reading."""
        return self._changed

    def ring(self) -> None:
        """Wake the readers that follow."""
        self._changed.set()
        self._changed = trio.Event()

    def close(self) -> None:
        """Close the file, and tell the readers that follow that it is complete."""
        self.ended = True
        self.segments.close()
        self.marks.close()
        self.ring()

    def begin(self) -> None:
        """Mark the next piece as the first output of a new process."""
        self._begins = True

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return self.segments.descriptors() + self.marks.segments.descriptors()

    def _append(self, data: bytes, stream: str) -> bool:
        self.marks.add(self.segments.end, stream, begins=self._begins)
        self._begins = False
        before = self.segments.dropped_bytes
        kept = self.segments.append(data)
        if not kept:
            self.segments.skip(self.segments.dropped_bytes - before)
        return kept

    async def take(self, data: bytes, stream: str = OUT) -> None:
        """Keep a piece of a stream, or count it as dropped."""
        before = self.segments.dropped_bytes
        try:
            kept = await in_thread(self._append, data, stream, share=WRITERS)
        except BlockingIOError:  # no thread is left; so small a write rarely blocks
            kept = self._append(data, stream)
        if not kept:
            self._on_drop(self.segments.dropped_bytes - before)
        failure = self.segments.failure
        if not kept and self._lost == 0:
            why = None if failure is None else failure.strerror
            self._log.write(
                "WARNING",
                f"Cannot keep the log of {self.name}: {why}; dropped until it works",
                child=self.name,
            )
        elif kept and self._lost:
            self._log.write(
                "WARNING",
                f"The log of {self.name} is kept again; {self._lost} bytes are lost",
                child=self.name,
            )
        if self.segments.has_vanished:
            self.segments.has_vanished = False
            text = f"The files of the log of {self.name} vanished: begun anew"
            self._log.write("WARNING", text, child=self.name)
        self._lost = 0 if kept else self._lost + len(data)
        self.ring()


class Capture:
    """The log's ends of one process's pipes.

    Args:
        log: gets the output.
        out: the reading end of stdout's; owned. -1 if all writers are gone.
        err: the same for stderr; -1 also where stdout's pipe serves both.
    """

    def __init__(self, log: ChildLog, out: int, err: int = -1) -> None:
        self._log = log
        self._fds = {OUT: out, ERR: err}
        self._waiting = trio.CancelScope()
        self._finishing = False
        for fd in self.descriptors():
            os.set_blocking(fd, False)

    @property
    def fds(self) -> tuple[int, int]:
        """The pipes' ends for stdout and stderr; -1 for a pipe that has ended."""
        return self._fds[OUT], self._fds[ERR]

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return tuple(fd for fd in self._fds.values() if fd >= 0)

    def finish(self) -> None:
        """Read the rest of the pipes and wait for no more: the child is gone."""
        self._finishing = True
        self._waiting.cancel()

    async def run(self) -> None:
        """Read the pipes until all their writers are gone."""
        try:
            while self.descriptors():
                has_come = False
                for stream in (OUT, ERR):
                    has_come |= await self._take(stream)
                if not has_come:
                    if self._finishing:
                        return
                    await self._wait()
        finally:
            for stream in (OUT, ERR):
                self._close(stream)

    async def _take(self, stream: str) -> bool:
        """Read a pipe's content; return whether there was any, its end included."""
        fd = self._fds[stream]
        if fd < 0:
            return False
        try:
            data = os.read(fd, PIECE_BYTES)
        except BlockingIOError:
            return False
        if data:
            await self._log.take(data, stream)
        else:
            self._close(stream)
        return True

    def _close(self, stream: str) -> None:
        fd, self._fds[stream] = self._fds[stream], -1
        if fd >= 0:
            os.close(fd)

    async def _wait(self) -> None:
        """Wait until a pipe is readable or the child is gone."""

        async def wait_for(fd: int) -> None:
            await wait_readable(fd)
            scope.cancel()

        with trio.CancelScope() as scope:
            self._waiting = scope
            first, *others = self.descriptors()
            if not others:
                await wait_readable(first)
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for, others[0])
                await wait_for(first)
