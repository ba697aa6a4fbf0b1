"""Room for children's groups in a group of version 2 that a service manager delegates.

Moving the host and its launchpad aside, and having controllers given on.

Rules of this file.

1. A group of version 2 has processes, or gives controllers on to the groups beneath it,
   but not both. The service manager starts the host in the group that it delegates
   (``Delegate=yes``), so nothing beneath that could be bounded.
2. The host and its launchpad move to ``OWN`` in there; children's groups are made beside
   it, and ``memory``, ``pids`` and ``cpu`` are given on as far as they are there.
3. Only what is marked as delegated is touched (the extended attribute ``user.delegate``,
   or ``trusted.delegate``): any other group is somebody else's to arrange.
4. What cannot be done is left: children then have groups without these controllers, and
   their report names what they joined.

Sources: cgroup-v2.rst of the kernel ("No Internal Process Constraint"), systemd's page
CGROUP_DELEGATION.
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
    """Return where the groups of children belong.

    Args:
        own: the directory of this process's group, version 2.
    """
    above = os.path.dirname(own)
    return above if os.path.basename(own) == OWN and is_delegated(above) else own


def make_room(
    place: str, pids: Iterable[int], controllers: Iterable[str] = CONTROLLERS
) -> tuple[str, ...]:
    """Have controllers given on to the groups of children; return which are.

    Args:
        place: the directory in which these are to be made, version 2.
        pids: who has to move aside: this process and its launchpad.
        controllers: that are of use.
    """
    useful = to_be_given(place, controllers)
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
        # EBUSY: somebody else is in there, whom nobody here may move.
        with contextlib.suppress(OSError):
            write(f"{place}/cgroup.subtree_control", f"+{name}")
    given = _words(place, "cgroup.subtree_control")
    return tuple(name for name in useful if name in given)


def to_be_given(
    place: str, controllers: Iterable[str] = CONTROLLERS
) -> tuple[str, ...]:
    """Return which controllers a host would have given on, as ``make_room`` does."""
    there = _words(place, "cgroup.controllers")
    useful = tuple(name for name in controllers if name in there)
    return useful if useful and is_delegated(place) else ()


def is_delegated(group: str) -> bool:
    """Tell whether a service manager has marked a group as delegated."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):  # no such mark, or nobody's to read
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _words(group: str, name: str) -> list[str]:
    try:
        return Path(group, name).read_text(encoding="ascii").split()
    except OSError:
        return []
