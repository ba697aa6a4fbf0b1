"""The end of everything beneath this process, when nobody else is left to bring it.

Killing and reaping for a host that has lost its launchpad.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from hostlib.linux import processes
from hostlib.readiness import wait_readable

if TYPE_CHECKING:
    from collections.abc import Container


async def end_descendants(spare: Container[int] = ()) -> None:
    """Kill and reap every process beneath this one: what a lost launchpad leaves.

    The host is a subreaper, so orphans come to it; each death may bring more.

    Args:
        spare: Pids of direct children that are left alone, with all beneath them.

    Cancellation: between two deaths; unbounded, for a process stuck in the kernel dies
    when that lets go of it. Give it a time-out.
    """
    own = os.getpid()
    while found := [pid for pid in processes.children_of(own) if pid not in spare]:
        processes.kill_children(found)
        # Side by side: the init of a pid namespace does not end before all others of
        # the namespace have been reaped, and the child in it is this process's to reap.
        async with trio.open_nursery() as nursery:
            for pid in found:
                nursery.start_soon(_reap, pid)


async def _reap(pid: int) -> None:
    """Wait for a dying child of this process; nobody else does, so its pid is its."""
    pidfd = os.pidfd_open(pid)
    try:
        await wait_readable(pidfd)
        collect(pidfd)
    finally:
        os.close(pidfd)


def collect(pidfd: int) -> bool:
    """Take the status of a child that has ended; tells whether it exited with 0."""
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    return ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
