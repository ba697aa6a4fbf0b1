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

NS_IN_S = 1_000_000_000
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
