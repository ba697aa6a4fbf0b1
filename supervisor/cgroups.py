"""The layer "cgroup": groups of processes for one child, where they can be had.

What it is: making a group beneath the host's own in each hierarchy that is of use,
setting its bounds, and removing it.  What it is not: joining it; the forked child does
that before it becomes its program.

Rules of this file.

1. Version 2: ``memory.max``, ``pids.max`` and ``cpu.max`` where the controllers are
   delegated; a group without them is still made, for ``cgroup.kill`` ends all in it.
2. Version 1: the hierarchies ``pids`` and ``memory``, where this user may make groups.
3. What cannot be had of these is left out, and the detail of the layer names what was
   joined.  Nothing at all is a reason.
4. A group is removed when its child is gone: it is empty then, or it is killed.
"""

# ruff: noqa: PTH102, PTH106, PTH118, PTH123 - names of a kernel's tree
from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.options import Limits

PREFIX = "sandhost-child-"
"""How the names of groups begin."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A hierarchy of groups, and where this process is in it.

    Attributes:
        kind: ``v2``, or the controller of a version 1 hierarchy.
        group: the directory of this process's group.
    """

    kind: str
    group: str


@dataclass(slots=True)
class Groups:
    """The groups of one child.

    Attributes:
        made: their directories.
        version_2: those of them that are of version 2.
        why_not: why there is none.
    """

    made: list[str] = field(default_factory=list)
    version_2: set[str] = field(default_factory=set)
    why_not: str = ""

    @classmethod
    def of_files(cls, files: Iterable[str]) -> Groups:
        """Return the groups whose ``procs`` are these files."""
        return cls([name.rpartition("/")[0] for name in files])

    def procs(self) -> tuple[str, ...]:
        """Return the files that take the pid of who joins, in version 1 a thread's.

        A process that moves all its threads waits 4 to 20 ms for every processor; one
        that moves itself by ``tasks`` does not, and who joins has one thread. A
        process can be forked into a group of version 2.
        """
        return tuple(
            f"{path}/{'cgroup.procs' if path in self.version_2 else 'tasks'}"
            for path in self.made
        )

    def remove(self) -> None:
        """Remove them; what is still in one is killed first, where the kernel can."""
        for path in self.made:
            with contextlib.suppress(OSError):  # version 1, or Linux before 5.14
                _write(f"{path}/cgroup.kill", "1")
            # EBUSY: a process in it is stuck in the kernel, and nothing can be done.
            with contextlib.suppress(OSError):
                os.rmdir(path)
        self.made.clear()


def hierarchies(
    mounts: str = "/proc/self/mountinfo", groups: str = "/proc/self/cgroup"
) -> tuple[Hierarchy, ...]:
    """Return the hierarchies of use that are mounted, version 2 first."""
    own: dict[str, str] = {}
    for line in _lines(groups):
        _, controllers, path = line.rstrip("\n").split(":", 2)
        for name in controllers.split(","):
            own[name or "v2"] = path
    found = []
    for line in _lines(mounts):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        where, top = before.split()[4], before.split()[3]
        names = {"cgroup2": ["v2"], "cgroup": options.split(",")}.get(kind, [])
        for name in {"v2", "pids", "memory"}.intersection(names):
            if name in own:
                path = own[name]
                inside = os.path.relpath(path, top) if top != "/" else path.lstrip("/")
                group = os.path.normpath(os.path.join(where, inside))
                found.append(Hierarchy(name, group))
    return tuple(sorted(found, key=lambda each: (each.kind != "v2", each.kind)))


def make(
    child: str,
    limits: Limits,
    *,
    cpus: float | None = None,
    among: tuple[Hierarchy, ...] | None = None,
) -> Groups:
    """Make the groups of a child.

    Args:
        child: its id.
        limits: ``memory`` and ``processes`` are kept here.
        cpus: how many processors' time it may take; None for no bound.
        among: the hierarchies; None for this process's.
    """
    found = Groups()
    reasons = []
    for hierarchy in hierarchies() if among is None else among:
        path = f"{hierarchy.group}/{PREFIX}{os.getpid()}-{child}"
        try:
            os.mkdir(path)
        except OSError as why:
            reasons.append(f"{hierarchy.kind}: {why.strerror}")
            continue
        found.made.append(path)
        if hierarchy.kind == "v2":
            found.version_2.add(path)
        try:
            _bound(hierarchy.kind, path, limits, cpus)
        except OSError as why:
            reasons.append(f"{hierarchy.kind}: {why.strerror}")
            found.made.pop()
            os.rmdir(path)
    if not found.made:
        found.why_not = "; ".join(reasons) or "no hierarchy of groups is mounted"
    return found


def remove_stale(among: tuple[Hierarchy, ...] | None = None) -> int:
    """Remove the groups of hosts that are gone; return how many.

    A group is made by a host that lives, and named after its pid: one whose pid nobody
    has is nobody's.

    Args:
        among: the hierarchies; None for this process's.
    """
    removed = 0
    for hierarchy in hierarchies() if among is None else among:
        for path in Path(hierarchy.group).glob(f"{PREFIX}*"):
            pid = path.name.removeprefix(PREFIX).partition("-")[0]
            if Path(f"/proc/{pid}").exists():
                continue
            with contextlib.suppress(OSError):  # somebody is in it, or it is not ours
                path.rmdir()
                removed += 1
    return removed


def _bound(kind: str, path: str, limits: Limits, cpus: float | None) -> None:
    files: dict[str, str] = {}
    if limits.memory is not None:
        name = "memory.max" if kind == "v2" else "memory.limit_in_bytes"
        files[name] = str(limits.memory)
    if limits.processes is not None:
        files["pids.max"] = str(limits.processes)
    if cpus is not None and kind == "v2":
        files["cpu.max"] = f"{int(cpus * 100_000)} 100000"
    for name, value in files.items():
        # A hierarchy has the files of its controllers only.
        if os.access(f"{path}/{name}", os.F_OK):
            _write(f"{path}/{name}", value)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readlines()
    except FileNotFoundError:
        return []
