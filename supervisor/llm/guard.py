"""Which files no client may have, whatever its rights: those that hold the key (L13).

What shows the host's memory is nobody's in any case: ``host_proc``.
"""

from __future__ import annotations

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
    """

    def __init__(self, identities: frozenset[tuple[int, int]]) -> None:
        self._identities = identities

    def __call__(self, handle: Handle) -> bool:
        """Tell whether an open file is one of them."""
        return handle.fd >= 0 and handle.identity() in self._identities
