"""Who follows a log (``log``): the one that it hands pieces to, and who only holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from supervisor.toolexec.output.splice import Tap


class Reader(Protocol):
    """A follower of a log.

    Attributes:
        offset: everything before it has been taken.
    """

    offset: int

    async def take(self, piece: memoryview) -> bool:
        """Take the next piece from memory; False if the log is to keep the rest.

        Only called while it is live, with what begins at ``offset``.
        """
        ...

    def frame(self, size: int) -> tuple[bytes, bytes]:
        """Begin the next piece of ``size`` bytes; return what goes before and after it.

        Only called while it is live, with what begins at ``offset``.
        """
        ...

    async def take_from(self, tap: Tap) -> bool:
        """Take that piece from where it was put aside, or False as ``take``."""
        ...

    def wake(self) -> None:
        """Look at the log: called while it is live and the log is finished."""
        ...


class Holder:
    """Holds a log from its beginning; it is never live."""

    offset = 0

    async def take(self, piece: memoryview) -> bool:
        """See ``Reader``."""
        return False

    def frame(self, size: int) -> tuple[bytes, bytes]:
        """See ``Reader``."""
        return b"", b""

    async def take_from(self, tap: Tap) -> bool:
        """See ``Reader``."""
        return False

    def wake(self) -> None:
        """See ``Reader``."""
