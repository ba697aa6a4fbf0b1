"""Children's groups in a group of version 2 that a service manager delegates.

1. A group of version 2 has processes, or enables controllers for the groups beneath it,
   but not both.  The service manager starts the host in the group that it delegates, so
   the host and its launchpad move to ``OWN`` beneath it.  Children's groups are made
   beside ``OWN``; ``memory``, ``pids`` and ``cpu`` are enabled if they are there.
2. Only a group that is marked as delegated is changed (``is_delegated``).
3. If it cannot be done, children have groups without these controllers, and their report
   names the groups that they joined.

Sources: cgroup-v2.rst ("No Internal Process Constraint"), systemd's CGROUP_DELEGATION.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.linux.cgroup_files import write

if TYPE_CHECKING:
    from collections.abc import Iterable

OWN = "sandhost-host"
"""The group of the host and its launchpad."""

CONTROLLERS = ("memory", "pids", "cpu")


def place_of_children(own: str) -> str:
    """Return the directory in which the groups of children are made.

    Args:
        own: the directory of this process's group, version 2.
    """
    above = os.path.dirname(own)
    return above if os.path.basename(own) == OWN and is_delegated(above) else own


def make_room(
    place: str, pids: Iterable[int], controllers: Iterable[str] = CONTROLLERS
) -> tuple[str, ...]:
    """Enable controllers for the groups of children; return those that are enabled.

    Args:
        place: the directory in which the groups are made, version 2.
        pids: the processes that must move aside: this one and its launchpad.
        controllers: the wanted controllers.
    """
    useful = controllers_to_enable(place, controllers)
    if not useful:
        return ()
    aside = f"{place}/{OWN}"
    try:
        Path(aside).mkdir(exist_ok=True)
        for pid in pids:
            write(f"{aside}/cgroup.procs", str(pid))
    except OSError:
        return ()
    for name in useful:
        # EBUSY: a process of another program is in there, which the host may not move.
        with contextlib.suppress(OSError):
            write(f"{place}/cgroup.subtree_control", f"+{name}")
    given = _words(place, "cgroup.subtree_control")
    return tuple(name for name in useful if name in given)


def controllers_to_enable(
    place: str, controllers: Iterable[str] = CONTROLLERS
) -> tuple[str, ...]:
    """Return the controllers that ``make_room`` would enable."""
    there = _words(place, "cgroup.controllers")
    useful = tuple(name for name in controllers if name in there)
    return useful if useful and is_delegated(place) else ()


def is_delegated(group: str) -> bool:
    """Return whether a service manager has marked a group as delegated."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):  # no such mark, or it cannot be read
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _words(group: str, name: str) -> list[str]:
    try:
        return Path(group, name).read_text(encoding="ascii").split()
    except OSError:
        return []
