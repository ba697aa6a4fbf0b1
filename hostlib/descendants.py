"""Killing and reaping all processes beneath a host that has lost its launchpad."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from hostlib.linux import processes
from hostlib.readiness import wait_readable

if TYPE_CHECKING:
    from collections.abc import Container


async def end_descendants(spare: Container[int] = ()) -> None:
    """Kill and reap every process beneath this one.

    The host is a subreaper, so orphans become its children; each death may bring more.

    Args:
        spare: pids of direct children that are left alone, with all beneath them.

    Cancellation: between two deaths.  A process that is stuck in the kernel takes
    unbounded time to die, so the caller sets a timeout.
    """
    own = os.getpid()
    while found := [pid for pid in processes.children_of(own) if pid not in spare]:
        processes.kill_children(found)
        # In parallel: the init of a pid namespace ends only after all others of the
        # namespace have been reaped, and a child in it may be this process's to reap.
        async with trio.open_nursery() as nursery:
            for pid in found:
                nursery.start_soon(_reap, pid)


async def _reap(pid: int) -> None:
    """Reap a dying child; only this process waits for it, so its pid is not reused."""
    pidfd = os.pidfd_open(pid)
    try:
        await wait_readable(pidfd)
        processes.exit_status(pidfd)
    finally:
        os.close(pidfd)
