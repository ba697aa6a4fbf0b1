"""Number of a fuzzer's inputs, and the longest time that one keeps the host.

A turn is what the host does with nothing else going on: a request is read, a piece of an answer is
taken in, an event is written. The figures lie in memory that two processes share: libFuzzer ends
its own without a last word.
"""

import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

T = TypeVar("T")

FORM = struct.Struct("QQd40s")
"""Inputs, turns, the longest in seconds of the thread, and what it did."""


class Turns:
    """Counts inputs and turns."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, FORM.size)
        self._inputs = self._turns = 0
        self._longest_s, self._doing = 0.0, ""

    def begin(self) -> None:
        """Count an input."""
        self._inputs += 1
        self._write()

    def take(self, doing: str, work: Callable[..., T], *args: object) -> T:
        """Do something that the host does in one turn."""
        begun_s = time.thread_time()
        try:
            return work(*args)
        finally:
            took_s = time.thread_time() - begun_s
            self._turns += 1
            if took_s > self._longest_s:
                self._longest_s, self._doing = took_s, doing
                self._write()

    def _write(self) -> None:
        told = (self._inputs, self._turns, self._longest_s, self._doing.encode())
        FORM.pack_into(self._shared, 0, *told)

    def said(self) -> str:
        """Return what has been counted, in one line."""
        inputs, count, longest_s, doing = FORM.unpack_from(self._shared)
        name = doing.rstrip(b"\0").decode() or "none"
        return (
            f"{inputs} inputs, {count} turns of the host;"
            f" the longest {1000 * longest_s:.2f} ms: {name}"
        )


@cache
def turns() -> Turns:
    """Return what counts in this process and its children."""
    return Turns()


def told_at_the_end(work: Callable[[], None]) -> int:
    """Do work in another process; say what was counted, and return its exit status."""
    counted = turns()
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    sys.stdout.write(f"{counted.said()}\n")
    return os.waitstatus_to_exitcode(status)
