"""Which processes stand beneath one process, and how they are ended.

The reading of ``/proc`` for parentage and the signalling of whole trees, for the
launchpad (always) and for the host (when the launchpad is lost).

Rules:
 1. A process is named by ``(pid, create_time)``; a bare pid names nothing. A signal
    goes through a pidfd whose process was re-read *after* the pidfd was opened.
 2. The exception to the re-reading is a direct child of the caller: only the caller
    waits for it, so its pid is its own until then.
 3. One walk is a snapshot. A caller that needs "none left" kills its direct children, waits
    for a death and looks again: orphans come to the nearest subreaper.
 4. Standard library only and nothing heavy: the launchpad starts through it.
Read next: ``supervisor/spawn/launchpad/main.py``.
"""

from __future__ import annotations

# `signal` imports `enum`, 4 ms of the 9 that the launchpad takes to start.
import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# (pid, start of the process in clock ticks since boot: field 22 of /proc/PID/stat).
ProcessIdentity = tuple[int, int]

_READ_BYTES = 65_536


def read_parent_and_start(pid: int) -> tuple[int, int] | None:
    """Parent and start of a process: fields 4 and 22 of ``/proc/PID/stat``, proc(5).

    Args:
        pid: Any process of this pid namespace, a zombie included.

    Returns:
        ``(parent pid, create_time in clock ticks since boot)``, None if there is no
        such process.
    """
    fields = stat_fields(pid)
    return None if fields is None else (int(fields[1]), int(fields[19]))


def stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of ``/proc/PID/stat`` from the third one on, None if it is gone."""
    stat = _read(f"/proc/{pid}/stat")
    if stat is None:
        return None
    # The name in field 2 may hold blanks and brackets: count from its last bracket.
    return stat[stat.rindex(b")") + 2 :].split()


def children_of(pid: int) -> list[int]:
    """The direct children of a process, of all its threads, zombies included.

    Complete for the caller's own children (only it removes from that list, by
    waiting); for another process a snapshot that may miss what forks or exits.
    """
    if not _KERNEL_LISTS_CHILDREN:
        return children_by_scan(pid)
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    lists = [_read(f"/proc/{pid}/task/{tid}/children") for tid in threads]
    return [int(child) for found in lists if found for child in found.split()]


class OwnChildren:
    """The direct children of this process, which has one thread, by an open list.

    For who asks again and again: to open a list costs thirty times what it costs to read.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._list = -1
        if _KERNEL_LISTS_CHILDREN:
            self._list = os.open(_OWN_CHILDREN, os.O_RDONLY | os.O_CLOEXEC)

    def pids(self) -> list[int]:
        """As `children_of`, complete."""
        if self._list < 0:
            return children_by_scan(self._pid)
        os.lseek(self._list, 0, os.SEEK_SET)
        return [int(child) for child in _rest_of(self._list).split()]

    def close(self) -> None:
        """Give the list back; a holder that keeps it to its own end need not."""
        if self._list >= 0:
            os.close(self._list)
            self._list = -1


def children_by_scan(pid: int) -> list[int]:
    """As `children_of`, for kernels without CONFIG_PROC_CHILDREN: reads every stat."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = ((number, read_parent_and_start(number)) for number in numbers)
    return [number for number, stat in found if stat is not None and stat[0] == pid]


def trees_beneath(parent: int, roots: Iterable[int]) -> list[ProcessIdentity]:
    """The processes `roots`, children of `parent`, and all that stands beneath them.

    Returns:
        Identities, each process before its descendants. What was re-parented, reused
        or gone while this looked is left out.
    """
    found: list[ProcessIdentity] = []
    ahead = [(root, parent) for root in roots]
    for pid, expected_parent in ahead:  # grows while it is walked
        stat = read_parent_and_start(pid)
        if stat is None or stat[0] != expected_parent:
            continue
        children = children_of(pid)
        if children:
            # The list is that of our process only if the number still names it.
            again = read_parent_and_start(pid)
            if again is None or again[1] != stat[1]:
                continue
        found.append((pid, stat[1]))
        ahead.extend((child, pid) for child in children)
    return found


def signal_process(process: ProcessIdentity, signal: int) -> bool:
    """Send `signal` to exactly this process; pidfd_send_signal(2).

    Returns:
        False if it is gone, or if this user may not signal it (a set-uid program
        started by the child of a host that is not root).

    Raises:
        OSError: No pidfd could be had (EMFILE, ENFILE, ENOMEM).
    """
    pid, create_time = process
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        stat = read_parent_and_start(pid)
        if stat is None or stat[1] != create_time:
            return False
        _signal.pidfd_send_signal(pidfd, signal)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def signal_trees(parent: int, roots: Collection[int], signal: int) -> None:
    """Send `signal` to each root and all beneath it, parents before their children."""
    for process in trees_beneath(parent, roots):
        signal_process(process, signal)


def kill_children(pids: Collection[int]) -> None:
    """SIGKILL direct children of this process, which alone waits for them.

    Their pids cannot be reused meanwhile, so nothing is re-read: speed decides against
    processes that fork and exit. The youngest first, for the oldest may be dead.
    """
    for pid in reversed(tuple(pids)):
        pidfd = os.pidfd_open(pid)
        try:
            _signal.pidfd_send_signal(pidfd, _signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # dead already; or a set-uid program that only root may kill
        finally:
            os.close(pidfd)


def _read(path: str) -> bytes | None:
    """The whole of a file of /proc; None if its process is gone."""
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
    # A read gives a page at most, however much is asked for: only b"" is the end.
    while part := os.read(fd, _READ_BYTES):
        data += part
    return data


_OWN_CHILDREN = "/proc/thread-self/children"
_KERNEL_LISTS_CHILDREN = os.access(_OWN_CHILDREN, os.R_OK)
