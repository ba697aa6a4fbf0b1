"""The layer "cgroup": groups of processes for one child, where it can have them.

1. Version 2: ``memory.max``, ``pids.max`` and ``cpu.max`` where they are delegated; a
   group without them is still made for ``cgroup.kill``.
2. Version 1: ``pids`` and ``memory``; ``cpu`` for a child with a limit of processors or
   processes (``sandbox.fork_watch``).
3. A missing group is left out, and the layer's detail names the joined ones.
4. A group is removed after its child, killed if needed; a process that dies in it delays
   that to the next child's start or the end.
5. A host of several children makes the next one's groups ahead (``launchpad.prefork``).
"""

# ruff: noqa: PTH102, PTH106, PTH116, PTH118, PTH123 - names of a kernel's tree
from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.linux import delegation
from hostlib.linux.cgroup_files import (
    bound_cpus,
    can_bound_cpus,
    set_limits,
    write,
)
from hostlib.user_values import Limits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

OWN_GROUPS = "/proc/self/cgroup"

MOST_TRIED = 16
"""Groups tried again at once: a process that is stuck in the kernel keeps its own."""

PREFIX = "sandhost-child-"
"""Prefix of the names of groups."""


_HOLDING = (
    {"landlock", "seccomp"},
    {"landlock", "mountns"},
    {"mountns", "uid"},
    {"mountns", "pidns", "seccomp"},
)
"""Layers of which each set keeps a child in its groups; fewer leave it a way to their files:
by name, by clone3(2) with what it may not open, by another process's ``root`` in ``/proc``,
or by a mount of its own in a user namespace."""

HOLDERS = "landlock with seccomp or mountns, mountns with uid, or mountns with pidns and seccomp"
"""The same, in words."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A hierarchy of groups, and where this process is in it.

    Attributes:
        kind: ``v2``, or the controller of a version 1 hierarchy.
        group: the directory in which groups are made: this process's own, or the one
            above where that is delegated (``delegation``).
    """

    kind: str
    group: str


@dataclass(frozen=True, slots=True)
class GroupBounds:
    """The groups that a child is to join, and their bounds for all of its processes.

    Attributes:
        procs: files of them that take its pid; none if it joins none.
        why_none: why there is none, if one was wanted.
        processes: how many processes they allow; None if they do not keep that.
        memory_bytes: the bound of their memory; no process has a bound of its own then
            that is no lower. None if they do not keep that.
        is_needed: without them it is not to start: they keep what nothing else can.
    """

    procs: tuple[str, ...] = ()
    why_none: str = ""
    processes: int | None = None
    memory_bytes: int | None = None
    is_needed: bool = False


@dataclass(slots=True)
class Groups:
    """The groups of one child.

    Attributes:
        made: their directories.
        version_2: those of them that are of version 2.
        why_not: why there is none.
        kinds: the hierarchy that each is of.
        keeps_cpus: a bound of the processors' time was set.
        left_out_cpu: there could be one of ``cpu``, but no limit needed it.
    """

    made: list[str] = field(default_factory=list)
    version_2: set[str] = field(default_factory=set)
    why_not: str = ""
    kinds: dict[str, str] = field(default_factory=dict)
    keeps_cpus: bool = False
    left_out_cpu: bool = False

    @classmethod
    def of_files(cls, files: Iterable[str]) -> Groups:
        """Return the groups whose ``procs`` are these files."""
        made = [name.rpartition("/")[::2] for name in files]
        version_2 = {path for path, file in made if file == "cgroup.procs"}
        return cls([path for path, _ in made], version_2)

    def procs(self) -> tuple[str, ...]:
        """Return the files that take the pid, in version 1 a thread's, of what joins.

        A process that moves all its threads waits 4 to 20 ms for every processor; one
        that moves itself by ``tasks`` does not, and one that joins has one thread. A
        process can be forked into a group of version 2.
        """
        return tuple(
            f"{path}/{'cgroup.procs' if path in self.version_2 else 'tasks'}"
            for path in self.made
        )

    def describe_groups(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return (directory, file that takes a pid) of each, as the launchpad has them."""
        return tuple(as_pair(file) for file in self.procs())

    def bound(self, limits: Limits) -> None:
        """Set their bounds.

        Raises:
            OSError: one is gone, or cannot be bounded so.
        """
        for path in self.made:
            os.stat(path)
            self.set_bounds(path, self.kinds[path], limits)

    def set_bounds(self, path: str, kind: str, limits: Limits) -> None:
        """Set the bounds of one of them.

        Raises:
            OSError: as ``bound``.
        """
        set_limits(kind, path, limits)
        self.keeps_cpus |= limits.cpus is not None and bound_cpus(path, limits.cpus)

    def kept_processes(self, limits: Limits) -> int | None:
        """Return how many processes they allow; None if they do not keep that."""
        if limits.processes is None:
            return None
        kept = any(os.access(f"{path}/pids.max", os.F_OK) for path in self.made)
        return limits.processes if kept else None

    def bounds(self, limits: Limits) -> GroupBounds:
        """Return what they keep of the limits that they were given."""
        return GroupBounds(
            procs=self.procs(),
            why_none=self.why_not,
            processes=self.kept_processes(limits),
            memory_bytes=limits.memory if self.keep_memory(limits) else None,
            is_needed=limits.cpus is not None,
        )

    def keep_memory(self, limits: Limits) -> bool:
        """Tell whether one of them bounds memory as it is to be."""
        if limits.memory is None:
            return False
        for path in self.made:
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # none, or "max"
                    with open(f"{path}/{name}", encoding="ascii") as file:
                        if int(file.read()) <= limits.memory:
                            return True
        return False

    def can_serve(self, limits: Limits) -> bool:
        """Tell whether these spare groups can be those of a child."""
        if limits.cpus is not None:
            return any(can_bound_cpus(path) for path in self.made)
        return limits.processes is None or not self.left_out_cpu

    def remove(self) -> bool:
        """Remove them; kill the processes in them first, where the kernel can.

        Returns:
            Whether none is left. A process in one was killed, and takes a while to end.
        """
        for path in tuple(self.made):
            with contextlib.suppress(OSError):  # version 1, or Linux before 5.14
                write(f"{path}/cgroup.kill", "1")
            try:
                os.rmdir(path)
            except FileNotFoundError:
                pass
            except OSError:  # EBUSY
                continue
            self.made.remove(path)
        return not self.made


_OF_USE = frozenset({"v2", "pids", "memory", "cpu"})


def hierarchies(
    mounts: str = "/proc/self/mountinfo", groups: str = OWN_GROUPS
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
        for name in _OF_USE.intersection(names):
            if name in own:
                path = own[name]
                inside = os.path.relpath(path, top)
                if inside.split("/")[0] == "..":  # a mount there lies beneath it
                    continue
                group = os.path.normpath(os.path.join(where, inside))
                if name == "v2":
                    group = delegation.place_of_children(group)
                found.append(Hierarchy(name, group))
    return tuple(sorted(found, key=lambda each: (each.kind != "v2", each.kind)))


def settle(launchpad: int) -> None:
    """Arrange the group that a service manager has delegated to this process, if any.

    Args:
        launchpad: the pid of its launchpad.
    """
    for hierarchy in hierarchies():
        if hierarchy.kind == "v2":
            delegation.make_room(hierarchy.group, (os.getpid(), launchpad))


def make(
    child: str,
    limits: Limits,
    *,
    among: tuple[Hierarchy, ...] | None = None,
    with_cpu: bool = False,
) -> Groups:
    """Make the groups of a child.

    Args:
        child: its id.
        limits: ``memory``, ``processes`` and ``cpus`` are kept here.
        among: the hierarchies; None for this process's.
        with_cpu: a group of ``cpu`` in version 1, whatever the limits are.
    """
    with_cpu = with_cpu or _wants_cpu(limits)
    found = Groups()
    reasons = []
    for hierarchy in hierarchies() if among is None else among:
        if hierarchy.kind == "cpu" and not with_cpu:
            found.left_out_cpu = True
            continue  # a group that bounds nothing
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
            found.kinds[path] = hierarchy.kind
            found.set_bounds(path, hierarchy.kind, limits)
        except OSError as why:
            reasons.append(f"{hierarchy.kind}: {why.strerror}")
            found.made.pop()
            os.rmdir(path)
    if not found.made:
        found.why_not = "; ".join(reasons) or "no hierarchy of groups is mounted"
    return found


class Reserve:
    """The groups of a host's children, those of the next one beforehand.

    Where groups can be made is looked up once, and again when the host was moved.
    """

    def __init__(self) -> None:
        self._among: tuple[Hierarchy, ...] = ()
        self._place = ""
        self._spare: Groups | None = None
        self._taken = 0
        self._made = 0
        self._with_cpu = False  # somebody had a group of `cpu`: the next one may
        self._left: deque[Groups] = deque()

    def take(self, child: str, limits: Limits, *, is_new: bool = False) -> Groups:
        """Return groups for a child; those made beforehand, if they are there.

        Args:
            child: its id.
            limits: of the child.
            is_new: not those: a process of the host's launchpad waits in them.
        """
        if is_new:
            return self._make(child, limits)
        self._taken += 1
        self.tidy()
        spare, self._spare = self._spare, None
        self._with_cpu |= _wants_cpu(limits)
        if spare is not None and not spare.can_serve(limits):
            self._spare, spare = spare, None  # another's: it has no group for that
        if spare is not None:
            try:
                spare.bound(limits)
            except OSError:  # another process of this user's removed them, say
                self.give_back(spare)
            else:
                return spare
        return self._make(child, limits)

    def _make(self, child: str, limits: Limits) -> Groups:
        place = "".join(_lines(OWN_GROUPS))
        if place != self._place:
            self._among, self._place = hierarchies(), place
        return make(child, limits, among=self._among, with_cpu=self._with_cpu)

    def restock(self) -> Groups | None:
        """Make the next child's; None if there are some, or a next one is unlikely."""
        if self._spare is not None or self._taken < 2:
            return None
        self._made += 1
        spare = self._make(f"next-{self._made}", Limits())
        self._spare = spare if spare.made else None
        return self._spare

    def give_back(self, groups: Groups) -> bool:
        """Remove the groups of a child that is gone; False if that has to wait."""
        is_gone = groups.remove()
        if not is_gone:
            self._left.append(groups)
        return is_gone

    def tidy(self) -> bool:
        """Remove what could not be removed before; tell whether nothing is left."""
        for _ in range(min(len(self._left), MOST_TRIED)):
            self.give_back(self._left.popleft())
        return not self._left

    def close(self) -> None:
        """Remove the groups that no child took; the processes in them are dead."""
        spare, self._spare = self._spare, None
        if spare is not None:
            self.give_back(spare)
        for groups in self._left:
            groups.remove()


def remove_stale(among: tuple[Hierarchy, ...] | None = None) -> int:
    """Remove the groups of hosts that are gone; return how many.

    A group is named after the pid of the living host that makes it: if no process has that
    pid, the group is stale.

    Args:
        among: the hierarchies; None for this process's.
    """
    removed = 0
    for hierarchy in hierarchies() if among is None else among:
        found: list[Path] = []
        with contextlib.suppress(OSError):  # it is mounted where this user may not look
            found += Path(hierarchy.group).iterdir()
        for path in found:
            pid = path.name.removeprefix(PREFIX).partition("-")[0]
            if not path.name.startswith(PREFIX) or Path(f"/proc/{pid}").exists():
                continue
            with contextlib.suppress(OSError):  # somebody is in it, or it is not ours
                path.rmdir()
                removed += 1
    return removed


def is_held(layers: Collection[str]) -> bool:
    """Return whether these layers keep a process in its groups, unchanged."""
    return any(holding <= set(layers) for holding in _HOLDING)


def as_pair(file: str) -> tuple[bytes, bytes]:
    """Return (directory, name) of a file that takes a pid."""
    directory, _, name = os.fsencode(file).rpartition(b"/")
    return directory, name


def _wants_cpu(limits: Limits) -> bool:
    return limits.cpus is not None or limits.processes is not None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readlines()
    except FileNotFoundError:
        return []
