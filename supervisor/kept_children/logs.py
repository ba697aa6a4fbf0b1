"""The output of children: stdout and stderr, kept in files that rotate.

From pipes into a stream of ``segments``, and a bell for those who follow.

Rules of this file.

1. A pipe for stdout and one for stderr: each stays in its order, and between the two
   counts when the host read them, which it does as soon as something is there.
2. Memory is bounded: one piece of at most ``PIECE_BYTES`` a child.  A child that says
   more than the disk takes waits in its own write(2), and nobody else does.
3. A full disk or a directory that vanished never stops a child: what cannot be kept is
   dropped, counted, and said once until it works again.
4. Nor does it end the host that its user has no thread left, or no epoll watch
   (``readiness``): without a thread a piece is written in the host's own.
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
"""Taken at once: what a pipe holds."""

WRITERS = trio.CapacityLimiter(4)
"""Worker threads that logs may hold: a disk that hangs leaves the others to files."""


class ChildLog:
    """The log of one name; it outlives the processes that had it.

    Args:
        name: of the child.
        segments: where it is kept.
        marks: when what came, and by which stream.
        log: the host's own.
        on_drop: told how many bytes could not be kept.

    Attributes:
        ended: nobody will write to it any more.
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
        """Wake those who follow."""
        self._changed.set()
        self._changed = trio.Event()

    def close(self) -> None:
        """Close the file, and tell those who follow that no more will come."""
        self.ended = True
        self.segments.close()
        self.marks.close()
        self.ring()

    def begin(self) -> None:
        """Mark what comes next as the first words of a new process."""
        self._begins = True

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return self.segments.descriptors() + self.marks.segments.descriptors()

    def _append(self, data: bytes, stream: str) -> bool:
        self.marks.add(self.segments.end, stream, begins=self._begins)
        self._begins = False
        return self.segments.append(data)

    async def take(self, data: bytes, stream: str = OUT) -> None:
        """Keep a piece of a stream, or count it as dropped."""
        before = self.segments.dropped_bytes
        try:
            kept = await in_thread(self._append, data, stream, share=WRITERS)
        except BlockingIOError:  # no thread is to be had; so small a write seldom waits
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
        log: where it goes.
        out: the reading end of stdout's; owned. -1: nobody can say any more.
        err: likewise of stderr's; -1 also where stdout's is for both.
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
        """The pipes' ends for stdout and stderr; -1 for one that is over."""
        return self._fds[OUT], self._fds[ERR]

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return tuple(fd for fd in self._fds.values() if fd >= 0)

    def finish(self) -> None:
        """The child is gone: take what is in the pipes, and wait for no more."""
        self._finishing = True
        self._waiting.cancel()

    async def run(self) -> None:
        """Take what comes until all who could say something are gone."""
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
        """Take what is in a pipe; tell whether anything was, its end included."""
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
        """Wait until there is something in a pipe, or the child is gone."""

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
