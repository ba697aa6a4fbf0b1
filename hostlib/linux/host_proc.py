"""What ``/proc`` shows of the host, and of all that runs beneath it: for no client's eyes.

A host opens files for its children, so ``/proc/self`` is its own there, and what the
kernel lets it see of a child's neighbours is more than their walls let the child see:
environments with tokens, memory.  Of the rest of ``/proc`` a client has what its rights
say, but for the memory of the whole machine.

Sources: proc(5), ptrace(2).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hostlib.linux.holdings import read_file

if TYPE_CHECKING:
    from typing import Protocol

    class Mounted(Protocol):
        """What this looks at of a mount."""

        kind: str

    class Handle(Protocol):
        """What this looks at of an open file."""

        @property
        def fd(self) -> int:
            """The host's descriptor."""

        @property
        def mount(self) -> Mounted:
            """Where it lies."""


_TOP = "/proc/"
_MEMORY = frozenset({"kcore"})
_MOST_ANCESTORS = 64
"""More than a session has; what is nested deeper is taken for the host's."""


def shows_host(handle: Handle) -> bool:
    """Tell whether an open file shows a process of the host, or its memory.

    Args:
        handle: of a file of procfs, or of a file system that nothing is known of: one of
            another mount namespace, reached by ``/proc/PID/root``.

    Raises:
        OSError: there is no ``/proc``.
    """
    path = os.readlink(f"/proc/self/fd/{handle.fd}")
    # The path is one of the mount namespace that the file was opened in.  Only what has
    # the same name here can be told from its name: a directory of a process may be
    # mounted over that of another.
    try:
        here = os.stat(path)
    except OSError:
        return True
    if not os.path.samestat(here, os.fstat(handle.fd)):
        return True
    if not path.startswith(_TOP):
        return handle.mount.kind == "proc"
    first = path[len(_TOP) :].partition("/")[0]
    if first.isdecimal():
        return _is_hosts(int(first))
    return first in _MEMORY


def _is_hosts(number: int) -> bool:
    """Whether a process or thread is of the host, or beneath it; so are those gone."""
    host = os.getpid()
    for _ in range(_MOST_ANCESTORS):
        found = _group_and_parent(number)
        if found is None:
            return True
        group, parent = found
        if group == host:
            return True
        if parent == 0:
            return False
        number = parent
    return True


def _group_and_parent(number: int) -> tuple[int, int] | None:
    """Return whose thread it is, and that process's parent; None if there is none.

    A thread has a directory of its own that no listing of ``/proc`` names.
    """
    try:
        lines = (read_file(f"/proc/{number}/status") or b"").splitlines()
        fields = dict(line.split(b":", 1) for line in lines if b":" in line)
        return int(fields[b"Tgid"]), int(fields[b"PPid"])
    except (OSError, KeyError, ValueError):
        return None
