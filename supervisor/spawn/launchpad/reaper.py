"""Ends the processes beneath a launchpad: signals, reaps and reports them.

These are its direct children, their leftovers, and at its own end all of them.

Rules:
 1. While a child is starting, a dead process is looked at before it is reaped.
 2. A process that ``Family`` does not know is a leftover, but not while a child is forking and
    has not told the new pids.
 3. A leftover that cannot die delays SWEPT of its own child alone, or where that has no pid
    namespace, of others that have none.
 4. Reaping and killing take turns of a bounded length: processes that fork and exit for
    ever die as fast as they are reaped, and only a kill stops them.
"""

from __future__ import annotations

# `signal` imports `enum`: 4 ms of a start that takes 9.
import _signal  # type: ignore[import-not-found]
import os

from hostlib.linux import processes
from supervisor.spawn.launchpad import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource
    from collections.abc import Callable

    from supervisor.spawn.launchpad.family import Child, Family

# <linux/wait.h>: also children that were cloned with another exit signal than SIGCHLD.
_WALL = 0x40000000

# Most processes reaped between two hunts for leftovers: some 3 ms when idle.
_REAPED_AT_ONCE = 1024
# Groups of ended children that are remembered: a host removes them at once, and only one
# that is killed meanwhile leaves them.
_LEFT_GROUPS = 256
# As much as fits into a datagram: the host may have no descriptor left for a longer
# message.
_SWEPT_AT_ONCE = 8192


class Reaper:
    """Reaps and kills the processes beneath one launchpad.

    Args:
        family: the children; a process that it does not know is a leftover.
        read_all_reports: takes in the reports of starting children.
        bury: is called with each child that was reaped.
        reply: sends a message to the host.

    Attributes:
        has_more_to_do: a process may be dead, or about to be killed.
        left_groups: directories of groups of children that ended.
    """

    def __init__(
        self,
        family: Family,
        read_all_reports: Callable[[], None],
        bury: Callable[[Child, int, resource.struct_rusage], None],
        reply: Callable[[tuple[object, ...]], None],
    ) -> None:
        self._family = family
        self._read_all_reports = read_all_reports
        self._bury = bury
        self._reply = reply
        self._children = processes.OwnChildren()
        self._killed: set[int] = set()  # leftovers that are dying, until reaped
        self._unswept: list[Child] = []  # ended; processes of them may be left
        self._buried = 0  # leftovers reaped since the last SWEPT
        self.has_more_to_do = False
        self.left_groups: list[bytes] = []

    def tidy(self) -> None:
        """Reap some of the dead, and kill what they left."""
        self.has_more_to_do = self._reap()
        self.has_more_to_do |= self.sweep()

    def ended(self, child: Child) -> None:
        """Record a child whose exit was told: SWEPT follows when nothing of it is left."""
        self._unswept.append(child)

    def signal(self, child: Child | None, signal: int) -> None:
        """Signal a child and all beneath it; nothing if it has ended meanwhile."""
        if child is None:
            return
        if signal == _signal.SIGKILL:
            processes.kill_children((child.pid,))  # its leftovers are killed after it
        else:
            processes.signal_trees(os.getpid(), (child.pid,), signal)

    def remember(self, groups: tuple[bytes, ...]) -> None:
        """Record groups whose child is dead."""
        self.left_groups += groups
        del self.left_groups[:-_LEFT_GROUPS]

    def _reap(self) -> bool:
        """Reap dead processes; return whether more of them may be there."""
        for _ in range(_REAPED_AT_ONCE):
            try:
                # Without a starting child there are no reports to read first.
                whom = self._dead() if self._family.reporting() else -1
                if not whom:
                    return False
                pid, status, usage = os.wait4(whom, os.WNOHANG | _WALL)
            except ChildProcessError:
                return False
            if not pid:
                return False
            child = self._family.children.pop(pid, None)
            if child is None:
                self._killed.discard(pid)
                self._buried += 1
            else:
                self._bury(child, status, usage)
        return True

    def _dead(self) -> int:
        """Return the pid of a dead process, after all reports were read; 0 for none.

        Read while the dead still have their pids: one may be the process in which a child
        went on, named by a report.

        Raises:
            ChildProcessError: no process is left.
        """
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
        if dead is None:
            return 0
        self._read_all_reports()
        return dead.si_pid

    def sweep(self) -> bool:
        """Kill what dead children left; whether there was something to kill.

        Only direct children are killed, as fast as they can be listed. Their
        descendants come here when they die, which is the next SIGCHLD.
        """
        children = self._children.pids()
        # After the list was read: a process on it that is no leftover was announced.
        self._read_all_reports()
        if self._family.is_forking:
            return False  # until it says whom it forked
        known = self._family.known_pids()
        leftovers = [pid for pid in children if pid not in known]
        fresh = [pid for pid in leftovers if pid not in self._killed]
        processes.kill_children(fresh)
        self._killed.update(fresh)
        self._tell_swept(set(leftovers))
        return bool(fresh)

    def _tell_swept(self, leftovers: set[int]) -> None:
        """Tell the host of the ended children of which nothing is left.

        The init of a pid namespace is the last of it (pid_namespaces(7)). Of a child
        without one, anything may be left but the inits of others.
        """
        others = leftovers.difference([child.init for child in self._unswept])
        swept: list[Child] = []
        unswept: list[Child] = []
        for child in self._unswept:
            is_left = child.init in leftovers if child.init >= 0 else bool(others)
            (unswept if is_left else swept).append(child)
        self._unswept = unswept
        for first in range(0, len(swept), _SWEPT_AT_ONCE):
            some = swept[first : first + _SWEPT_AT_ONCE]
            for child in some:
                child.unlock()
            idents = [child.ident for child in some]
            self._reply((wire.SWEPT, idents, self._buried))
            self._buried = 0

    def end_everything(self, wait_for_a_death: Callable[[], None]) -> None:
        """Kill every process beneath this one, and return when none is left."""
        while True:
            self.tidy()
            if not _has_children():
                break
            if not self.has_more_to_do:
                wait_for_a_death()
        for directory in self.left_groups:
            try:
                os.rmdir(directory)
            except OSError:  # the host has removed it, or never may
                continue


def _has_children() -> bool:
    """Return whether a child of this process is left, dead or alive."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
