"""Delays by the machine's other load, by the kernel's account.

The part of a measured delay without it, so that a bound on what the host does to its
clients holds on a machine that others use.

Two accounts: the time that a thread was ready and another ran (proc_pid_schedstat(5), the
second number, in nanoseconds), and the time that a hypervisor gave to others
(proc_stat(5), "steal", in ticks), which the kernel takes for the thread's own.
"""

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.helpers.stage import Puppet, Stage

NS_IN_S = 1_000_000_000
NEIGHBOUR_S = 0.1
"""The longest that another client's READ may take, whatever anybody does (spec S5)."""

TICKS_IN_S = os.sysconf("SC_CLK_TCK")


def kept_waiting_s(*pids: int) -> float:
    """Return the time that all threads waited for a processor, in seconds.

    Every thread counts, for one that holds the interpreter keeps the others waiting.

    Args:
        pids: of the processes; this one's own if there are none.
    """
    ready_ns = sum(map(_ready_ns, pids or (os.getpid(),)))
    return ready_ns / NS_IN_S + _stolen_ticks() / TICKS_IN_S


class Stopwatch:
    """Measures a wait, since it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._kept_s = kept_waiting_s()

    @property
    def passed_s(self) -> float:
        """Return what passed, seconds; what other load took is in it."""
        return time.monotonic() - self._begun

    @property
    def own_s(self) -> float:
        """Return what passed beside what kept this process from running, seconds."""
        return self.passed_s - (kept_waiting_s() - self._kept_s)


LONGER = 3
"""So many times as long a second look is: what the host does will be there again."""


async def slowest_read(
    stage: "Stage", child: "Puppet", fileno: int, count: int, at_once: int = 10
) -> float:
    """Have a child READ many times; return the slowest, in seconds.

    From what is late is taken off what the machine's other load had of the processors
    meanwhile. A late event is looked for once more, and longer.

    Args:
        stage: its host.
        child: the one that READs.
        fileno: of a file that it has open.
        count: how often.
        at_once: READs between two looks at the kernel's account, which is for all of them.
    """
    slowest_s = 0.0
    pids = os.getpid(), stage.pid_of(child, await child.do("os.getpid()"))
    for reads in (count, LONGER * count):
        slowest_s = 0.0
        for _ in range(reads // at_once):
            kept_s = kept_waiting_s(*pids)
            took_s = await child.do(f"slowest({fileno}, {at_once})")
            if took_s >= NEIGHBOUR_S:
                took_s -= kept_waiting_s(*pids) - kept_s
            slowest_s = max(slowest_s, took_s)
        if slowest_s < NEIGHBOUR_S:
            break
    return slowest_s


def _ready_ns(pid: int) -> int:
    found = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        # It ends meanwhile; or a kernel keeps no account, and the figure is the whole.
        with suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as account:
                found += int(account.read().split()[1])
    return found


def _stolen_ticks() -> int:
    with open("/proc/stat", "rb") as accounts:
        return int(accounts.readline().split()[8])  # all processors together
