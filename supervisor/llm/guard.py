"""Which files no client may have, whatever its rights: those that show the key (L13).

A top-level child opens files as the host does, so its ``/proc/self`` is the host's own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class Handle(Protocol):
        """What this looks at of an open file."""

        fd: int

        def identity(self) -> tuple[int, int]:
            """Return what tells the file from any other."""


class SecretFiles:
    """Answers ``Filesystem.is_secret``.

    Args:
        identities: (device, inode) of the key files; a link to one has the same.
        pids: the host, and who else holds what it holds.
    """

    def __init__(
        self, identities: frozenset[tuple[int, int]], pids: tuple[int, ...]
    ) -> None:
        self._identities = identities
        self._prefixes = tuple(f"/proc/{pid}/" for pid in pids)

    def __call__(self, handle: Handle) -> bool:
        """Tell whether an open file is one of them."""
        if handle.fd < 0:
            return False
        if handle.identity() in self._identities:
            return True
        # What /proc shows of a process is named by its pid there, however it was
        # reached (proc(5)).
        target = os.readlink(f"/proc/self/fd/{handle.fd}")  # noqa: PTH115
        return target.startswith(self._prefixes)
