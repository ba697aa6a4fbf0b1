"""The smallest children (`yardsticks/probe.c`) and how they are heard of.

A probe says on a FIFO that its host has served it. The FIFO is apart from the host
under test, so hearing of a probe is neither its work nor its speed.
"""

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from benchmarks.compiler import yardstick
from benchmarks.measure import MeasureError

REPORT_TIMEOUT_S = 10.0  # a probe reports within milliseconds; 1,000 within seconds


@dataclass(frozen=True, slots=True)
class Announcement:
    """The line that a probe prints when it runs."""

    pid: int
    grandchild: int  # 0: it has none
    replied_ns: int  # CLOCK_MONOTONIC, when it had the first reply of its host


class Fifo:
    """The reading end of a FIFO that probes announce themselves on."""

    def __init__(self, place: Path) -> None:
        self._path = place / "announcements"
        os.mkfifo(self._path)
        # Also open for writing: else it would end whenever no probe has it open.
        self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._input = b""

    def close(self) -> None:
        """Give the FIFO up."""
        os.close(self._fd)

    def probe(self, *options: str) -> list[str]:
        """Return the command line of a probe that announces itself here.

        Args:
            options: as `yardsticks/probe.c` has them.
        """
        return [yardstick("probe"), str(self._path), *options]

    async def next(self) -> Announcement:
        """Wait for one announcement in the Trio thread, which keeps serving the probe.

        Raises:
            MeasureError: none came in time: the probe failed.
        """
        with trio.move_on_after(REPORT_TIMEOUT_S):
            while b"\n" not in self._input:
                await trio.lowlevel.wait_readable(self._fd)
                self._take()
            return self._pop()
        raise MeasureError(f"a child did not report in {REPORT_TIMEOUT_S:g} s")

    def next_blocking(self) -> Announcement:
        """Wait for one announcement without Trio; else as `next`."""
        while b"\n" not in self._input:
            if not select.select([self._fd], [], [], REPORT_TIMEOUT_S)[0]:
                raise MeasureError(f"a child did not report in {REPORT_TIMEOUT_S:g} s")
            self._take()
        return self._pop()

    def _take(self) -> None:
        self._input += os.read(self._fd, 65536)

    def _pop(self) -> Announcement:
        line, _, self._input = self._input.partition(b"\n")
        pid, grandchild, replied_ns = map(int, line.split())
        return Announcement(pid, grandchild, replied_ns)


@contextmanager
def fifo(place: Path) -> Iterator[Fifo]:
    """Make a FIFO for announcements in a directory."""
    made = Fifo(place)
    try:
        yield made
    finally:
        made.close()
