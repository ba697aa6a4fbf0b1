"""What children say: their stdout and stderr, kept in files that rotate.

What it is: from a pipe into a stream of ``segments``, and a bell for those who follow.
What it is not: reading for followers; they read the files by offset (``control.streams``).

Rules of this file.

1. One pipe a child, for both streams: what it said stays in the order in which it said
   it, and the host holds one descriptor.
2. Memory is bounded: one piece of at most ``PIECE_BYTES`` a child.  A child that says
   more than the disk takes waits in its own write(2), and nobody else does.
3. A full disk or a directory that vanished never stops a child: what cannot be kept is
   dropped, counted, and said once until it works again.
4. Nor does it end the host that its user has no thread left, or no epoll watch
   (``watches``): without a thread a piece is written in the host's own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from supervisor.watches import wait_readable
from vfs.hostio import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.logs import Log
    from supervisor.segments import Segments

PIECE_BYTES = 65_536
"""Taken at once: what a pipe holds."""

WRITERS = trio.CapacityLimiter(4)
"""Worker threads that logs may hold: a disk that hangs leaves the others to files."""


class ChildLog:
    """The log of one name; it outlives the processes that had it.

    Args:
        name: of the child.
        segments: where it is kept.
        log: the host's own.
        on_drop: told how many bytes could not be kept.

    Attributes:
        ended: nobody will write to it any more.
    """

    def __init__(
        self, name: str, segments: Segments, log: Log, on_drop: Callable[[int], None]
    ) -> None:
        self.name = name
        self.segments = segments
        self.ended = False
        self._log = log
        self._on_drop = on_drop
        self._lost = 0
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
        self.ring()

    async def take(self, data: bytes) -> None:
        """Keep a piece, or count it as dropped."""
        before = self.segments.dropped_bytes
        try:
            kept = await in_thread(self.segments.append, data, share=WRITERS)
        except BlockingIOError:  # no thread is to be had; so small a write seldom waits
            kept = self.segments.append(data)
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
    """The log's end of one process's pipe.

    Args:
        log: where it goes.
        fd: the pipe's reading end; owned. -1: nobody can say any more.
    """

    def __init__(self, log: ChildLog, fd: int) -> None:
        self._log = log
        self._fd = fd
        self._waiting = trio.CancelScope()
        self._finishing = False
        if fd >= 0:
            os.set_blocking(fd, False)

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return (self._fd,) if self._fd >= 0 else ()

    def finish(self) -> None:
        """The child is gone: take what is in the pipe, and wait for no more."""
        self._finishing = True
        self._waiting.cancel()

    async def run(self) -> None:
        """Take what comes until all who could say something are gone."""
        if self._fd < 0:
            return
        try:
            while True:
                try:
                    data = os.read(self._fd, PIECE_BYTES)
                except BlockingIOError:
                    if self._finishing:
                        return
                    with trio.CancelScope() as self._waiting:
                        await wait_readable(self._fd)
                    continue
                if not data:
                    return
                await self._log.take(data)
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)
