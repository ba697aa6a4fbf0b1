"""The descriptors and children of a process, from ``/proc``.

For the leak check and for ``doctor``.

Rules of this file.

1. A process is named by (pid, create_time); a bare pid names nothing (attack 27).
2. A process or file that vanishes between two reads is left out, without an error.

Sources: proc(5).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostlib.linux import processes

if TYPE_CHECKING:
    from collections.abc import Iterable

ZOMBIE = "Z"
"""State of a process that has ended and was not waited for."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Facts of one process, from ``/proc/PID/stat``.

    Attributes:
        pid: its number.
        create_time: clock ticks since boot, field 22.
        parent: its parent's number, field 4.
        state: one letter, field 3.
        name: the name that it gave itself, field 2; it proves nothing.
    """

    pid: int
    create_time: int
    parent: int
    state: str
    name: str

    def row(self) -> dict[str, object]:
        """Return the facts as a JSON object."""
        return {
            "pid": self.pid,
            "create_time": self.create_time,
            "parent": self.parent,
            "state": self.state,
            "name": self.name,
        }


def process_facts(pid: int) -> ProcessFacts | None:
    """Return the facts of a process or zombie; None if the number names none."""
    stat = read_file(f"/proc/{pid}/stat")
    if not stat:
        return None
    # The name may hold blanks and brackets: it ends at the last bracket.
    name_start, name_end = stat.index(b"(") + 1, stat.rindex(b")")
    fields = stat[name_end + 2 :].split()
    return ProcessFacts(
        pid=pid,
        create_time=int(fields[19]),
        parent=int(fields[1]),
        state=fields[0].decode(),
        name=stat[name_start:name_end].decode(errors="replace"),
    )


def is_same_process(pid: int, create_time: int) -> bool:
    """Return whether a number still names the process that began at ``create_time``."""
    found = processes.read_parent_and_start(pid)
    return found is not None and found[1] == create_time


def read_file(path: str) -> bytes | None:
    """Return a small file of ``/proc``; None if it is gone or may not be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def open_descriptors() -> tuple[int, ...]:
    """Return the numbers of this process's open descriptors."""
    listing = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        numbers = tuple(int(name) for name in os.listdir(listing))
    finally:
        os.close(listing)
    return tuple(number for number in numbers if number != listing)


def link_of(fd: int) -> str | None:
    """Return the link text of a descriptor of this process; None if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return None


def descriptors_of(path: str) -> list[int]:
    """Return this process's descriptors of a file and of those named after it.

    SQLite has a journal beside its file, and does not show its descriptors.
    """
    path = os.path.abspath(path)
    links = ((fd, link_of(fd)) for fd in open_descriptors())
    return [fd for fd, link in links if link is not None and link.startswith(path)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The descriptors and children of a process before it became a host.

    Attributes:
        descriptors: number -> link text.  A number with another link text later was
            closed and reused, and is not part of the baseline any more.
        children: (pid, create_time) of its direct children.
    """

    descriptors: dict[int, str]
    children: frozenset[processes.ProcessIdentity]

    @classmethod
    def now(cls) -> Baseline:
        """Return the descriptors and children that this process has now."""
        links = ((fd, link_of(fd)) for fd in open_descriptors())
        return cls(
            {fd: link for fd, link in links if link is not None},
            frozenset(identities(processes.children_of(os.getpid()))),
        )


def pid_of(pidfd: int) -> int | None:
    """Return the pid of a pidfd's process; None if it has ended."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as lines:
            found = [line.split() for line in lines if line.startswith("Pid:")]
    except OSError:
        return None
    pid = int(found[0][1]) if found else -1
    return pid if pid > 0 else None


def identities(pids: Iterable[int]) -> list[processes.ProcessIdentity]:
    """Return (pid, create_time) of the processes that the pids name now."""
    found = ((pid, processes.read_parent_and_start(pid)) for pid in pids)
    return [(pid, stat[1]) for pid, stat in found if stat is not None]
