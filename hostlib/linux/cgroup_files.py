"""The files of one cgroup: its bounds and counters, in both versions.

Source: cgroup-v2.rst and cgroup-v1 of the kernel.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostlib.user_values import Limits

BOUNDS = {
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "processes": ("pids.max",),
    "cpus": ("cpu.max", "cpu.cfs_quota_us"),
}
"""Limit -> files in which a group of either version keeps it."""

_REFUSALS = {
    "pids.events": ("processes", b"max"),
    "memory.events": ("memory", b"oom"),
    "memory.oom_control": ("memory", b"oom_kill"),
}
"""File that counts refusals -> (limit, the word before the number).

Not ``memory.events`` ``max`` or ``memory.failcnt``: these also count reclaims.
"""

# The kernel's default.
_PERIOD_US = 100_000


def set_limits(kind: str, path: str, limits: Limits) -> None:
    """Set the memory and process limits of one group, if it has their files.

    Args:
        kind: ``v2``, or the controller of a version 1 hierarchy.
        path: the group's directory.
        limits: ``memory`` and ``processes`` are set.

    Raises:
        OSError: the group is gone, or refuses a value.
    """
    files: dict[str, str] = {}
    if limits.memory is not None:
        name = "memory.max" if kind == "v2" else "memory.limit_in_bytes"
        files[name] = str(limits.memory)
    if limits.processes is not None:
        files["pids.max"] = str(limits.processes)
    for name, value in files.items():
        # A hierarchy has the files of its controllers only.
        if os.access(f"{path}/{name}", os.F_OK):
            write(f"{path}/{name}", value)


def bound_cpus(path: str, cpus: float | None) -> bool:
    """Set the processors' time of a group; return whether it can bound that.

    Args:
        path: the group's directory.
        cpus: 0.5 is half of one processor's time; None is no bound.

    Raises:
        OSError: the group is gone.
    """
    file = _cpu_file(path)
    if file.endswith("cpu.max"):
        write(file, f"{_quota(cpus) or 'max'} {_PERIOD_US}")
    elif file:
        write(f"{path}/cpu.cfs_period_us", str(_PERIOD_US))
        write(file, str(_quota(cpus) or -1))
    return bool(file)


def has_cpus_bound(path: str, cpus: float | None) -> bool | None:
    """Return whether a group has this bound; None if it cannot bound time.

    Raises:
        OSError: the group is gone.
    """
    file = _cpu_file(path)
    if not file:
        return None
    now, *_ = Path(file).read_text(encoding="ascii").split() or [""]
    return now == str(_quota(cpus) or -1) or (cpus is None and now == "max")


def can_bound_cpus(path: str) -> bool:
    """Return whether a group can bound processors' time."""
    return bool(_cpu_file(path))


def refusals(paths: Iterable[str]) -> dict[str, int]:
    """Return the number of refusals of groups, by limit.

    Args:
        paths: the groups' directories; a group that is gone is left out.
    """
    found: dict[str, int] = {}
    for path in paths:
        for name, (limit, word) in _REFUSALS.items():
            try:
                data = Path(f"{path}/{name}").read_bytes()
            except OSError:  # another controller, an old kernel, or the group is gone
                continue
            found[limit] = max(found.get(limit, 0), count_of(data, word))
    return found


_TAKEN = (b"anon", b"shmem", b"total_rss", b"total_shmem")
"""Fields of memory.stat, versions 2 and 1: memory that the kernel cannot drop as cache."""


def memory_use(paths: Iterable[str]) -> int | None:
    """Return the bytes of memory of all processes in groups; None if unknown.

    Args:
        paths: the groups' directories.
    """
    for path in paths:
        with contextlib.suppress(OSError):  # another controller, or the group is gone
            data = Path(f"{path}/memory.stat").read_bytes()
            return sum(count_of(data, word) for word in _TAKEN)
    return None


def count_of(data: bytes, word: bytes) -> int:
    """Return the number after a word, in lines such as ``max 17``; 0 if there is none."""
    for line in data.splitlines():
        name, _, number = line.partition(b" ")
        if name == word:
            return int(number)
    return 0


def describe_bounds(paths: Iterable[str]) -> str:
    """Return a phrase that names the bounds of groups.

    Args:
        paths: the groups' directories.
    """
    there = {file.name for path in paths for file in Path(path).iterdir()}
    bound = [what for what, files in BOUNDS.items() if not there.isdisjoint(files)]
    if bound:
        return f"bounds {', '.join(bound)} of all together"
    return "bounds nothing" + (", ends all at once" if "cgroup.kill" in there else "")


def _cpu_file(path: str) -> str:
    for name in BOUNDS["cpus"]:
        if os.access(f"{path}/{name}", os.F_OK):
            return f"{path}/{name}"
    return ""


def _quota(cpus: float | None) -> int | None:
    return None if cpus is None else int(cpus * _PERIOD_US)


def write(path: str, text: str) -> None:
    """Write to an existing file of a group.

    Raises:
        OSError: the file does not exist, or the kernel refuses the value.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
