"""The processes that see a workspace, or can come to see it, as ``/proc`` tells.

Rules:
 1. A process sees a workspace if one of its threads has that mount in its table. The table
    of the first thread is not enough: it may have ended, or left the mount namespace.
 2. A process in the pid namespace of such a process, or beneath one, belongs to it. It
    may have hidden the mount from its table (pivot_root(2)) and hold a file in it open.
 3. A look that met a process which ended meanwhile is not whole: that one may have belonged
    to them, and have forked.

Sources: proc_pid_mountinfo(5), pid_namespaces(7).
"""

from __future__ import annotations

import os

from hostlib.linux.processes import read_parent_and_start, stat_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hostlib.linux.processes import ProcessIdentity

_GONE = (FileNotFoundError, ProcessLookupError)
_AT_REST = frozenset({b"T", b"t", b"Z", b"X"})
_VFORK_WAITS = frozenset({b"kernel_clone", b"wait_for_vfork_done"})
"""Places (wchan) of a process in vfork(2) until its child has its program."""


class Sighting:
    """The processes of one look.

    Attributes:
        starts: pid -> its start.
        spaces: pid -> its pid namespace, as the link in ``/proc`` says; "" for unknown.
        is_whole: no process ended while it was taken.
    """

    __slots__ = ("is_whole", "spaces", "starts")

    def __init__(
        self, starts: dict[int, int], spaces: dict[int, str], *, is_whole: bool
    ) -> None:
        self.starts = starts
        self.spaces = spaces
        self.is_whole = is_whole

    def identities(self) -> list[ProcessIdentity]:
        """Return each with its start."""
        return list(self.starts.items())


def find_processes(device: bytes, firsts: Collection[ProcessIdentity]) -> Sighting:
    """Return the processes that see a mount, and what belongs to them.

    Args:
        device: of the mount, as in ``/proc/PID/mountinfo``: ``MAJOR:MINOR``.
        firsts: processes of the children that have it, whatever they see now.
    """
    own = pid_space(os.getpid())
    parents: dict[int, int] = {}
    starts: dict[int, int] = {}
    spaces: dict[int, str] = {}
    seers: set[int] = set()
    is_whole = True
    for pid in _pids():
        try:
            found = read_parent_and_start(pid)
        except PermissionError:  # another user's, where /proc hides it (hidepid=)
            continue
        sees = None if found is None else sees_mount(pid, device)
        if found is None or sees is None:
            is_whole = False
            continue
        parents[pid], starts[pid] = found
        spaces[pid] = pid_space(pid)
        if sees or (pid, found[1]) in firsts:
            seers.add(pid)
    inner = {spaces[pid] for pid in seers} - {own, ""}
    belong = {pid for pid in parents if pid in seers or spaces[pid] in inner}
    for pid in parents:
        belong.update(_line_to(belong, pid, parents))
    return Sighting(
        {pid: starts[pid] for pid in belong},
        {pid: spaces[pid] for pid in belong},
        is_whole=is_whole,
    )


def _line_to(belong: set[int], pid: int, parents: dict[int, int]) -> list[int]:
    """Return a process and those above it up to one that belongs; none without that."""
    line = []
    while pid in parents and pid not in belong:
        line.append(pid)
        pid = parents[pid]
    return line if pid in belong else []


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def pid_space(pid: int) -> str:
    """Return the pid namespace of a process; "" if it is not told."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def sees_mount(pid: int, device: bytes) -> bool | None:
    """Tell whether a thread of a process has a mount in its table; None: it is gone."""
    mark = b" " + device + b" "
    views = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            top = f"/proc/{pid}/task/{thread}"
            try:
                view = os.readlink(f"{top}/ns/mnt")
                if view in views:
                    continue
                views.add(view)
                if mark in read_file(f"{top}/mountinfo"):
                    return True
            except OSError:  # that thread has ended, or is another user's
                continue
    except _GONE:
        return None
    except PermissionError:
        return False
    is_gone = not views and read_parent_and_start(pid) is None
    return None if is_gone else False


def is_at_rest(pid: int) -> bool:
    """Tell whether no thread of a process goes on until it gets a signal."""
    return all(
        state in _AT_REST or (state == b"D" and _wait_of(pid, thread) in _VFORK_WAITS)
        for thread, state in _states(pid)
    )


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal."""
    return any(state == b"T" for _, state in _states(pid))


def _states(pid: int) -> Iterator[tuple[int, bytes]]:
    """Yield the threads of a process with the state of each."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except _GONE:
        return
    for thread in map(int, threads):
        fields = stat_fields(thread)
        if fields is not None:
            yield thread, fields[0]


def _wait_of(pid: int, thread: int) -> bytes:
    """Return the kernel's function in which a thread waits; b"" if it is not told."""
    try:
        return read_file(f"/proc/{pid}/task/{thread}/wchan")
    except OSError:
        return b""


def read_file(path: str) -> bytes:
    """Return the content of a file of the kernel's.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    with open(path, "rb") as file:
        return file.read()
