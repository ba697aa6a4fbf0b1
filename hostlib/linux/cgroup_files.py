"""The files of one group of processes: what bounds it, in both versions.

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
"""What a group can bound, and the files of that in both versions."""

_REFUSALS = {
    "pids.events": ("processes", b"max"),
    "memory.events": ("memory", b"oom"),
    "memory.oom_control": ("memory", b"oom_kill"),
}
"""Files that count refusals: of what, and the word before the number.

Not ``memory.events`` ``max`` or ``memory.failcnt``: these count what was reclaimed, too.
"""

# As the kernel has it where nobody says anything.
_PERIOD_US = 100_000


def set_limits(kind: str, path: str, limits: Limits) -> None:
    """Set the bounds of one group, but its processors' time, as far as it has them.

    Args:
        kind: ``v2``, or the controller of a version 1 hierarchy.
        path: its directory.
        limits: ``memory`` and ``processes`` are kept here.

    Raises:
        OSError: it is gone, or cannot be bounded so.
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
    """Bound the processors' time of a group; whether it is one that keeps that.

    Args:
        path: its directory.
        cpus: 0.5 is half of one's time; None is no bound.

    Raises:
        OSError: it is gone.
    """
    file = _cpu_file(path)
    if file.endswith("cpu.max"):
        write(file, f"{_quota(cpus) or 'max'} {_PERIOD_US}")
    elif file:
        write(f"{path}/cpu.cfs_period_us", str(_PERIOD_US))
        write(file, str(_quota(cpus) or -1))
    return bool(file)


def has_cpus_bound(path: str, cpus: float | None) -> bool | None:
    """Tell whether a group's time is bounded so; None if it is none that keeps that.

    Raises:
        OSError: it is gone.
    """
    file = _cpu_file(path)
    if not file:
        return None
    now, *_ = Path(file).read_text(encoding="ascii").split() or [""]
    return now == str(_quota(cpus) or -1) or (cpus is None and now == "max")


def can_bound_cpus(path: str) -> bool:
    """Tell whether a group keeps the processors' time of what is in it."""
    return bool(_cpu_file(path))


def refusals(paths: Iterable[str]) -> dict[str, int]:
    """Return how often the bounds of groups refused something, by limit.

    Args:
        paths: their directories; of one that is gone nothing is told.
    """
    found: dict[str, int] = {}
    for path in paths:
        for name, (limit, word) in _REFUSALS.items():
            try:
                data = Path(f"{path}/{name}").read_bytes()
            except OSError:  # another controller's, an old kernel's, or it is gone
                continue
            found[limit] = max(found.get(limit, 0), count_of(data, word))
    return found


_TAKEN = (b"anon", b"shmem", b"total_rss", b"total_shmem")
"""Of memory.stat, version 2 and version 1: what the kernel cannot just drop, as caches."""


def memory_taken(paths: Iterable[str]) -> int | None:
    """Return the bytes of memory of all processes in groups; None if nothing tells.

    Args:
        paths: their directories.
    """
    for path in paths:
        with contextlib.suppress(OSError):  # another controller's, or it is gone
            data = Path(f"{path}/memory.stat").read_bytes()
            return sum(count_of(data, word) for word in _TAKEN)
    return None


def count_of(data: bytes, word: bytes) -> int:
    """Return the number behind a word, as files of events have it: ``max 17``."""
    for line in data.splitlines():
        name, _, number = line.partition(b" ")
        if name == word:
            return int(number)
    return 0


def bounds_of(paths: Iterable[str]) -> str:
    """Say what groups bound of all processes in them together.

    Args:
        paths: their directories.
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
    """Write to a file of a group, which is never made.

    Raises:
        OSError: it is not there, or the kernel does not take that.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
