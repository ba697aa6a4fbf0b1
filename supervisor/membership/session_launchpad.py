"""The launchpad of one session: starts its children, ended by a kernel timer.

Rules of this file.

1. A session has a launchpad of its own. Its deadline is a timer of the kernel, and its
   end is the end of every child of the session (FL6).
2. Which process it is stands in the ledger before it starts a child, so that a daemon
   that died unclean finds it again.
3. A process that is left of a session is beneath this process, and in another kernel
   session: those of the host's launchpad are beneath that, and those that the host
   starts itself are in its own kernel session.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from hostlib.descendants import end_descendants
from hostlib.linux import processes
from hostlib.linux.holdings import is_same_process
from hostlib.readiness import wait_readable
from supervisor.spawn.launcher import Launcher
from supervisor.spawn.launchpad.start import add_launchpad
from supervisor.spawn.process import LaunchpadLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.fleet.messages import Session
    from supervisor.host import Host
    from supervisor.spawn.launchpad.start import LaunchpadProcess

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LaunchpadRow(msgspec.Struct, frozen=True):
    """A session's launchpad in the ledger.

    Attributes:
        pid: of it.
        create_time: with the pid it names the process for as long as the machine is up.
        boot: names the time that the machine is up.
    """

    pid: int
    create_time: int
    boot: str


class SessionLaunchpad:
    """The launchpad of one session.

    Args:
        host: in whose process it is held.
        session: whose children it starts.

    Raises:
        OSError: it cannot be started.

    Attributes:
        launcher: asks it.
        row: of the ledger.
        ended: set when it has ended, and its descriptors are closed.
    """

    def __init__(self, host: Host, session: Session) -> None:
        self.session = session
        launchpad = add_launchpad()
        try:
            stat = processes.read_parent_and_start(launchpad.pid)
            create_time = -1 if stat is None else stat[1]
            self.row = LaunchpadRow(launchpad.pid, create_time, boot_id())
        except OSError:
            _end_unused(launchpad)
            raise
        self.launcher = Launcher(launchpad, HostProcesses(host), is_outlived=True)
        self.ended = trio.Event()
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Hold it until it is closed, or the kernel has ended it."""
        try:
            with self._scope:
                await self.launcher.run()
        except LaunchpadLost:
            pass
        finally:
            self.ended.set()

    def close(self) -> None:
        """End it with all beneath it; `ended` tells when it has."""
        self._scope.cancel()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors."""
        if not self.ended.is_set():
            control, pidfd = self.launcher.descriptors()
            yield control, "launchpad"
            yield pidfd, "pidfd"


class HostProcesses:
    """The children of this process that are not left of a session (rule 3)."""

    def __init__(self, host: Host) -> None:
        self._launchpad = host.launcher.launchpad_pid
        self._before = {pid for pid, _ in host.baseline.children}

    def __contains__(self, pid: object) -> bool:
        """Tell whether a child of this process is one of the host's own."""
        if not isinstance(pid, int) or pid == self._launchpad or pid in self._before:
            return True
        try:
            return os.getsid(pid) == os.getsid(0)
        except ProcessLookupError:
            return True


async def end_left_over(host: Host) -> None:
    """End what is left of sessions beneath this process; returns when nothing is."""
    await end_descendants(HostProcesses(host))


async def end_former(row: LaunchpadRow) -> None:
    """End the launchpad of a daemon that died unclean, and all that is beneath it.

    Its children die with it. They are not this process's, so each is waited for.
    """
    if row.boot != boot_id() or not is_same_process(row.pid, row.create_time):
        return
    stat = processes.read_parent_and_start(row.pid)
    parent = 0 if stat is None else stat[0]
    former = processes.trees_beneath(parent, [row.pid])
    if (row.pid, row.create_time) not in former[:1]:
        return  # it has ended just now
    with ExitStack() as stack:
        pidfds = []
        for process in former:
            pidfd = processes.open_process(process)
            if pidfd is not None:
                stack.callback(os.close, pidfd)
                pidfds.append(pidfd)
                processes.signal_pidfd(pidfd, signal.SIGKILL)
        for pidfd in pidfds:
            await wait_readable(pidfd)


def _end_unused(launchpad: LaunchpadProcess) -> None:
    """End a launchpad that no task holds yet; it has no children."""
    launchpad.control.close()
    try:
        signal.pidfd_send_signal(launchpad.pidfd, signal.SIGKILL)
        processes.exit_status(launchpad.pidfd)
    finally:
        os.close(launchpad.pidfd)


def boot_id() -> str:
    """Return what names the time that this machine is up."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
