"""Samples of the processes of children, taken on request; the one user of psutil.

1. A process is named by (pid, create_time), checked before *and* after a sample:
   figures of a process that ended, and whose pid was reused, are dropped (attack 27).
2. At most ``SLICE_PROCESSES`` processes or ``SLICE_S`` between two checkpoints: 1,000
   processes take 65 ms, and no client waits for them.
3. A sample is taken only when a reader asks: an idle host never wakes up.
4. Repeated looks use ``glance`` (15 us a process). psutil serves single requests; it is
   imported with the first one, in a worker thread.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from hostlib.linux import processes
from hostlib.linux.holdings import is_same_process
from hostlib.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from types import ModuleType

    from psutil import Process

SLICE_PROCESSES = 50
"""Processes looked at between two checkpoints; each costs 65 us and more."""

SLICE_S = 0.002
"""Longest stretch between two checkpoints, whatever a process costs; the aim is 5
ms."""

MAX_DESCENDANTS = 10_000
"""Most processes that are counted: a fork bomb may grow faster than it is counted."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

STATES = {
    b"R": "running",
    b"S": "sleeping",
    b"D": "disk-sleep",
    b"T": "stopped",
    b"t": "tracing-stop",
    b"Z": "zombie",
    b"X": "dead",
    b"I": "idle",
}
"""Letters of proc(5) and psutil's words for them."""

ProcessIdentity = processes.ProcessIdentity
"""(pid, clock ticks since boot at its start)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one process at one moment.

    Attributes:
        pid: its number.
        create_time: clock ticks since boot.
        state: psutil's word: ``running``, ``sleeping``, ``stopped``, ``zombie``, ...
        cpu_time_s: user and kernel time so far, seconds.
        cpu_percent: of one core, since the last sample; None for the first one.
        rss_bytes: resident memory.
        descriptors: open ones; None where this user may not read it.
        threads: how many.
        descendants: processes beneath it; at most ``MAX_DESCENDANTS`` are counted.
        address_space_bytes: the size that RLIMIT_AS bounds.
    """

    pid: int
    create_time: int
    state: str
    cpu_time_s: float
    cpu_percent: float | None
    rss_bytes: int
    descriptors: int | None
    threads: int
    descendants: int
    address_space_bytes: int = 0

    def row(self) -> dict[str, object]:
        """Return it as a JSON object, without the process's name."""
        return {
            "state": self.state,
            "cpu_time_s": round(self.cpu_time_s, 2),
            "cpu_percent": self.cpu_percent,
            "rss_bytes": self.rss_bytes,
            "descriptors": self.descriptors,
            "threads": self.threads,
            "descendants": self.descendants,
        }


Samples = dict[ProcessIdentity, Sample]


class _Slice:
    """Counts the work since the last checkpoint."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._left = SLICE_PROCESSES
        self._end = time.monotonic() + SLICE_S
        self._cpu_s = time.thread_time()

    async def step(self) -> None:
        """Count one process; yield to other tasks when the slice is used up."""
        self._left -= 1
        if self._left <= 0 or time.monotonic() > self._end:
            self.close()
            await trio.lowlevel.checkpoint()
            self._begin()

    def close(self) -> None:
        """Record how long the loop was held since the last checkpoint.

        CPU time of this thread: the clock would count other programs on a busy machine.
        """
        self.longest_s = max(self.longest_s, time.thread_time() - self._cpu_s)


class Watcher:
    """Samples of a set of processes; CPU percents are since the last sample.

    Attributes:
        longest_slice_s: the most CPU time that it took between two checkpoints.
    """

    def __init__(self) -> None:
        self.longest_slice_s = 0.0
        self._psutil: ModuleType | None = None
        # (cpu seconds, when) of each process at its last sample.
        self._before: dict[ProcessIdentity, tuple[float, float]] = {}
        # Making psutil's object reads as much of /proc as a sample does.
        self._processes: dict[ProcessIdentity, Process] = {}

    async def sample(self, targets: Iterable[ProcessIdentity]) -> Samples:
        """Return a sample of each process that still has its identity.

        Args:
            targets: (pid, create_time) of each.

        Returns:
            By identity; a process that ended is missing, a zombie is there.
        """
        if self._psutil is None:
            self._psutil = await in_thread(_import_psutil)
        psutil = self._psutil
        wanted = tuple(targets)
        samples: Samples = {}
        slice_ = _Slice()
        for identity in wanted:
            descendants = await _count_descendants(identity[0], slice_)
            sample = self._sample_one(psutil, identity, descendants)
            if sample is not None:
                samples[identity] = sample
            await slice_.step()
        slice_.close()
        self.longest_slice_s = max(self.longest_slice_s, slice_.longest_s)
        for gone in self._before.keys() - samples.keys():
            del self._before[gone]
            self._processes.pop(gone, None)
        return samples

    async def glance(
        self,
        targets: Iterable[ProcessIdentity],
        families: Collection[ProcessIdentity] = (),
    ) -> Samples:
        """Return samples of only what one read tells: a tenth of the work of ``sample``.

        Args:
            targets: (pid, create_time) of each.
            families: those whose descendants are counted; the others get 0.

        Returns:
            As ``sample``, without descriptors and percents.
        """
        samples: Samples = {}
        slice_ = _Slice()
        for identity in tuple(targets):
            below = 0
            if identity in families:
                below = await _count_descendants(identity[0], slice_)
            sample = _glance(identity, below)
            if sample is not None:
                samples[identity] = sample
            await slice_.step()
        slice_.close()
        self.longest_slice_s = max(self.longest_slice_s, slice_.longest_s)
        return samples

    def _sample_one(
        self, psutil: ModuleType, identity: ProcessIdentity, descendants: int
    ) -> Sample | None:
        if not is_same_process(*identity):
            return None
        try:
            process = self._processes.get(identity) or psutil.Process(identity[0])
            sample = _look(psutil, process, identity, descendants)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return None
        at = time.monotonic()
        if not is_same_process(*identity):
            return None
        self._processes[identity] = process
        before = self._before.get(identity)
        self._before[identity] = (sample.cpu_time_s, at)
        if before is None or at <= before[1]:
            return sample
        used_s = sample.cpu_time_s - before[0]
        return replace(sample, cpu_percent=round(100 * used_s / (at - before[1]), 1))


def _look(
    psutil: ModuleType, process: Process, identity: ProcessIdentity, descendants: int
) -> Sample:
    """Return a sample of a process, without its CPU percent."""
    with process.oneshot():
        times = process.cpu_times()
        memory = process.memory_info()
        descriptors: int | None = None
        # A zombie has none; a process of another user does not show them.
        with contextlib.suppress(psutil.AccessDenied, psutil.ZombieProcess):
            descriptors = process.num_fds()
        return Sample(
            *identity,
            process.status(),
            times.user + times.system,
            None,
            memory.rss,
            descriptors,
            process.num_threads(),
            descendants,
            memory.vms,
        )


def _glance(identity: ProcessIdentity, descendants: int) -> Sample | None:
    """Return a sample from ``/proc/PID/stat``; None if it is another process by now."""
    fields = processes.stat_fields(identity[0])
    if fields is None or int(fields[19]) != identity[1]:
        return None
    return Sample(
        *identity,
        STATES.get(fields[0], "running"),
        (int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        None,
        int(fields[21]) * PAGE_BYTES,
        None,
        int(fields[17]),
        descendants,
        int(fields[20]),
    )


async def _count_descendants(pid: int, slice_: _Slice) -> int:
    """Return the number of processes beneath one: a snapshot, taken in slices."""
    ahead = [pid]
    seen = {pid}
    for parent in ahead:  # grows during the loop
        for child in processes.children_of(parent):
            if child not in seen:
                seen.add(child)
                ahead.append(child)
        if len(seen) > MAX_DESCENDANTS:
            break
        if parent != pid:
            await slice_.step()
    return min(len(seen) - 1, MAX_DESCENDANTS)


def _import_psutil() -> ModuleType:
    import psutil  # noqa: PLC0415 - rule 4

    return psutil
