"""Files of ``/proc`` about the host and its children, which no client may read.

A host opens files for its children, so ``/proc/self`` would be the host's, and the kernel
lets the host read more of other children than a child's walls allow: environments with
tokens, memory.  The rest of ``/proc`` is open to a client by its rights, except for the
memory of the machine.

Sources: proc(5), ptrace(2).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hostlib.linux.holdings import read_file

if TYPE_CHECKING:
    from typing import Protocol

    class MountEntry(Protocol):
        """The part of a mount that is read here."""

        kind: str

    class ProcFile(Protocol):
        """The part of an open file that is read here."""

        @property
        def fd(self) -> int:
            """The host's descriptor."""

        @property
        def mount(self) -> MountEntry:
            """The mount of the file."""


_TOP = "/proc/"
_MEMORY = frozenset({"kcore"})
_MOST_ANCESTORS = 64
"""More than a session has; a process that is nested deeper counts as the host's."""


def shows_host(handle: ProcFile) -> bool:
    """Return whether an open file shows a process of the host, or its memory.

    Args:
        handle: a file of procfs, or of an unknown file system: one of another mount
            namespace, reached by ``/proc/PID/root``.

    Raises:
        OSError: there is no ``/proc``.
    """
    path = os.readlink(f"/proc/self/fd/{handle.fd}")
    # The path belongs to the mount namespace in which the file was opened.  It is used
    # only if it names the same file here: a directory of one process may be mounted over
    # that of another.
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
    """Return whether a process or thread is the host's or beneath it, or is gone."""
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
    """Return the process of a thread, and the parent of that; None if it is gone.

    A thread also has a directory ``/proc/TID``, which no listing of ``/proc`` shows.
    """
    try:
        lines = (read_file(f"/proc/{number}/status") or b"").splitlines()
        fields = dict(line.split(b":", 1) for line in lines if b":" in line)
        return int(fields[b"Tgid"]), int(fields[b"PPid"])
    except (OSError, KeyError, ValueError):
        return None
