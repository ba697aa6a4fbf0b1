"""What a process holds at one moment, as ``/proc`` tells it: descriptors, children.

Reading, for the leak check and for ``doctor``.

Rules of this file.

1. A process is named by (pid, create_time); a bare pid names nothing (attack 27).
2. What is gone between two reads is left out, never an error.

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
    """One process, as its ``/proc/PID/stat`` had it.

    Attributes:
        pid: its number.
        create_time: clock ticks since boot, field 22.
        parent: its parent's number, field 4.
        state: one letter, field 3.
        name: what it calls itself, field 2; anybody may call himself anything.
    """

    pid: int
    create_time: int
    parent: int
    state: str
    name: str

    def row(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {
            "pid": self.pid,
            "create_time": self.create_time,
            "parent": self.parent,
            "state": self.state,
            "name": self.name,
        }


def process_facts(pid: int) -> ProcessFacts | None:
    """Return what a number names now, a zombie included; None if it names nothing."""
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
    """Tell whether a number still names the process that began at ``create_time``."""
    found = processes.read_parent_and_start(pid)
    return found is not None and found[1] == create_time


def read_file(path: str) -> bytes | None:
    """Return a small file of ``/proc``; None if it, or its process, is not there.

    Also None where this user may not read it.
    """
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
    """Return what a descriptor of this process refers to, None if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return None


def descriptors_of(path: str) -> list[int]:
    """Return this process's descriptors of a file and of those named after it.

    SQLite has a journal beside its file, and tells nobody its descriptors.
    """
    path = os.path.abspath(path)
    links = ((fd, link_of(fd)) for fd in open_descriptors())
    return [fd for fd, link in links if link is not None and link.startswith(path)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a process held before it became a host: not the host's to explain.

    Attributes:
        descriptors: number -> what it referred to.  A number that refers to something
            else later was closed and given again, and explains nothing.
        children: (pid, create_time) of its direct children.
    """

    descriptors: dict[int, str]
    children: frozenset[processes.ProcessIdentity]

    @classmethod
    def now(cls) -> Baseline:
        """Take down what this process holds."""
        links = ((fd, link_of(fd)) for fd in open_descriptors())
        return cls(
            {fd: link for fd, link in links if link is not None},
            frozenset(identities(processes.children_of(os.getpid()))),
        )


def pid_of(pidfd: int) -> int | None:
    """Return the number that a pidfd's process has here; None if it has ended."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as lines:
            found = [line.split() for line in lines if line.startswith("Pid:")]
    except OSError:
        return None
    pid = int(found[0][1]) if found else -1
    return pid if pid > 0 else None


def identities(pids: Iterable[int]) -> list[processes.ProcessIdentity]:
    """Return (pid, create_time) of what the numbers name now."""
    found = ((pid, processes.read_parent_and_start(pid)) for pid in pids)
    return [(pid, stat[1]) for pid, stat in found if stat is not None]
