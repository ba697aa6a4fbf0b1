"""The processes beneath one process, from ``/proc``, and signals to whole trees.

For the launchpad, and for a host that has lost its launchpad.

 1. A process is named by ``(pid, create_time)``; a bare pid names nothing.  A signal goes
    through a pidfd whose process was read again *after* the pidfd was opened; only the
    caller's own children need no second read, since only it can reap them.
 2. One walk is a snapshot.  A caller that needs "none left" kills its children, waits for
    a death and looks again: orphans come to the nearest subreaper.
 3. Light parts of the standard library only: the launchpad imports this.
"""

from __future__ import annotations

# `signal` imports `enum`, 4 ms of the 9 that the launchpad takes to start.
import _signal  # type: ignore[import-not-found]
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# (pid, start of the process in clock ticks since boot: field 22 of /proc/PID/stat).
ProcessIdentity = tuple[int, int]

_READ_BYTES = 65_536


def read_parent_and_start(pid: int) -> tuple[int, int] | None:
    """Return parent and start of a process: fields 4 and 22 of ``/proc/PID/stat``.

    Args:
        pid: any process of this pid namespace, a zombie included.

    Returns:
        ``(parent pid, create_time in clock ticks since boot)``, None if there is no
        such process.
    """
    fields = stat_fields(pid)
    return None if fields is None else (int(fields[1]), int(fields[19]))


def stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/PID/stat`` from the third on; None if it is gone."""
    stat = _read(f"/proc/{pid}/stat")
    if stat is None:
        return None
    # The name in field 2 may hold blanks and brackets: count from its last bracket.
    return stat[stat.rindex(b")") + 2 :].split()


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, of all its threads, zombies included.

    The list is complete for the caller's own children, which only it can reap; for
    another process it may miss children that fork or exit meanwhile.
    """
    if not KERNEL_LISTS_CHILDREN:
        return children_by_scan(pid)
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    lists = [_read(f"/proc/{pid}/task/{tid}/children") for tid in threads]
    return [int(child) for found in lists if found for child in found.split()]


class OwnChildren:
    """The direct children of this single-threaded process, by a list that stays open.

    Opening the list takes thirty times as long as reading it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._list = -1
        if KERNEL_LISTS_CHILDREN:
            self._list = os.open(_OWN_CHILDREN, os.O_RDONLY | os.O_CLOEXEC)

    def pids(self) -> list[int]:
        """Return the pids of all direct children, zombies included."""
        if self._list < 0:
            return children_by_scan(self._pid)
        os.lseek(self._list, 0, os.SEEK_SET)
        return [int(child) for child in _rest_of(self._list).split()]

    def close(self) -> None:
        """Close the list."""
        if self._list >= 0:
            os.close(self._list)
            self._list = -1


def children_by_scan(pid: int) -> list[int]:
    """Return the children of a process on a kernel without CONFIG_PROC_CHILDREN."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = ((number, read_parent_and_start(number)) for number in numbers)
    return [number for number, stat in found if stat is not None and stat[0] == pid]


def trees_beneath(parent: int, roots: Iterable[int]) -> list[ProcessIdentity]:
    """Return `roots`, which are children of `parent`, and all processes beneath them.

    Returns:
        Identities, each process before its descendants.  A process that got another
        parent or ended meanwhile is left out.
    """
    found: list[ProcessIdentity] = []
    ahead = [(root, parent) for root in roots]
    for pid, expected_parent in ahead:  # grows while it is walked
        stat = read_parent_and_start(pid)
        if stat is None or stat[0] != expected_parent:
            continue
        children = children_of(pid)
        if children:
            # The list belongs to this process only if the number still names it.
            again = read_parent_and_start(pid)
            if again is None or again[1] != stat[1]:
                continue
        found.append((pid, stat[1]))
        ahead.extend((child, pid) for child in children)
    return found


def open_process(process: ProcessIdentity) -> int | None:
    """Return a pidfd of exactly this process; None if it is gone.

    Raises:
        OSError: no pidfd can be opened (EMFILE, ENFILE, ENOMEM).
    """
    pid, create_time = process
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    is_it = False
    try:
        stat = read_parent_and_start(pid)
        is_it = stat is not None and stat[1] == create_time
    finally:
        if not is_it:
            os.close(pidfd)
    return pidfd if is_it else None


def signal_pidfd(pidfd: int, signal: int) -> bool:
    """Send `signal` to a pidfd's process; pidfd_send_signal(2).

    Returns:
        False if it is gone, or if this user may not signal it (a set-uid program
        started by the child of a host that is not root).
    """
    try:
        _signal.pidfd_send_signal(pidfd, signal)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_process(process: ProcessIdentity, signal: int) -> bool:
    """Send `signal` to exactly this process.

    Returns:
        As ``signal_pidfd``; False if it is gone.

    Raises:
        OSError: as ``open_process``.
    """
    pidfd = open_process(process)
    if pidfd is None:
        return False
    try:
        return signal_pidfd(pidfd, signal)
    finally:
        os.close(pidfd)


def end_processes(pidfds: Collection[int], signal: int, timeout_s: float) -> bool:
    """Signal processes and wait for their ends; return whether all have ended in time.

    Args:
        pidfds: any processes', the caller's children or not; they stay open.
        signal: 0 only waits.
        timeout_s: longest wait.
    """
    until_s = time.monotonic() + timeout_s
    poll = select.poll()
    left = set(pidfds)
    for pidfd in left:
        signal_pidfd(pidfd, signal)
        poll.register(pidfd, select.POLLIN)
    while left:
        ended = poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
        if not ended:
            return False
        for pidfd, _ in ended:
            poll.unregister(pidfd)
            left.discard(pidfd)
    return True


def exit_status(pidfd: int, timeout_s: float | None = None) -> int | None:
    """Reap a child of this process; return its exit status, None if a signal ended it.

    Args:
        pidfd: the child's; it stays open.
        timeout_s: it is killed then; None waits for its own end.
    """
    if timeout_s is not None and not end_processes([pidfd], 0, timeout_s):
        signal_pidfd(pidfd, _signal.SIGKILL)
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    if ended is None or ended.si_code != os.CLD_EXITED:
        return None
    return ended.si_status


def signal_trees(parent: int, roots: Collection[int], signal: int) -> None:
    """Send `signal` to each root and all beneath it, parents before their children."""
    for process in trees_beneath(parent, roots):
        signal_process(process, signal)


def kill_children(pids: Collection[int]) -> None:
    """Send SIGKILL to direct children of this process, which alone can reap them.

    Their pids cannot be reused meanwhile, so they are not read again: this must be faster
    than children that fork and exit.  The youngest first, for the oldest may be dead.
    """
    for pid in reversed(tuple(pids)):
        pidfd = os.pidfd_open(pid)
        try:
            signal_pidfd(pidfd, _signal.SIGKILL)
        finally:
            os.close(pidfd)


def _read(path: str) -> bytes | None:
    """Return a file of /proc; None if its process is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        return _rest_of(fd)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)


def _rest_of(fd: int) -> bytes:
    data = b""
    # A read gives at most a page, whatever the buffer's size: only b"" is the end.
    while part := os.read(fd, _READ_BYTES):
        data += part
    return data


_OWN_CHILDREN = "/proc/thread-self/children"
KERNEL_LISTS_CHILDREN = os.access(_OWN_CHILDREN, os.R_OK)
