"""What the processes of one child may keep.

Rules of this file.

1. A content counts once, however many descriptors and temporary files of the child hold
   it, as the store keeps it once; it counts until the last of them has gone.
2. What is on its way in (``FD_PUT``) counts by its bytes until it is a content.
3. Where contents take the place of others, what is there afterwards has to fit; until
   then both count, so that nobody else takes what is not free yet.
4. Any thread may call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from hostlib.threads import ThreadLock
from supervisor.llmfd.errors import FILE_OPERATION, FdError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from supervisor.llmfd.blob import Content


class Exchange:
    """Contents that take the place of others: all of them count, or none (rule 3).

    Args:
        allowance: what they are charged to; None: nothing bounds them.
        leaving: those whose place they take, as far as that is known.
    """

    def __init__(self, allowance: Allowance | None, leaving: Sequence[Content]) -> None:
        self._allowance = allowance
        self._room = 0 if allowance is None else allowance.leaving(leaving)
        self._held: list[Content] = []

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """What has not taken its place counts no more."""
        if self._allowance is not None:
            self._allowance.drop(self._held)

    def add(self, content: Content) -> None:
        """Count a content that comes in.

        Raises:
            FdError: ``file_operation``: there would be too much.
        """
        if self._allowance is not None:
            self._allowance.hold(content, self._room)
            self._held.append(content)

    def settle(self, left: Sequence[Content]) -> None:
        """Count what leaves no longer, now that all that comes in is there.

        Raises:
            FdError: ``file_operation``: there would be too much: others hold by now what
                leaves, or have taken the room.
        """
        if self._allowance is None:
            return
        if self._held:
            self._allowance.exchange(left)
        else:  # to give up only is never too much
            self._allowance.drop(left)
        self._held.clear()


class Allowance:
    """Bytes of content that the processes of one child may keep.

    Args:
        limit: bytes.

    Attributes:
        limit: as above.
        used: what is kept and on its way, bytes.
    """

    __slots__ = ("_held", "_lock", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: dict[bytes, int] = {}  # holders, by the key of a blob
        self._lock = ThreadLock()

    def take(self, size: int) -> None:
        """Take room for bytes on their way.

        Raises:
            FdError: ``file_operation``: there is not so much left.
        """
        with self._lock:
            self._take(size)

    def give_back(self, size: int) -> None:
        """Give that room back."""
        with self._lock:
            self.used -= size

    def hold(self, content: Content, leaving: int = 0) -> None:
        """Count one more holder of a content.

        Args:
            content: what is held.
            leaving: room that will be free again: see ``Exchange``.

        Raises:
            FdError: ``file_operation``: there is no room for it; it is not counted.
        """
        with self._lock:
            held = self._held
            size = sum(blob.size for blob in content.blobs if blob.key not in held)
            self._take(size, leaving)
            for blob in content.blobs:
                held[blob.key] = held.get(blob.key, 0) + 1

    def hold_again(self, contents: Iterable[Content]) -> None:
        """Count one more holder of each; what was let in once is not refused."""
        with self._lock:
            held = self._held
            for content in contents:
                for blob in content.blobs:
                    if blob.key not in held:
                        self.used += blob.size
                    held[blob.key] = held.get(blob.key, 0) + 1

    def drop(self, contents: Iterable[Content]) -> None:
        """Count one holder of each less; the last one's room is free again."""
        with self._lock:
            self._drop(contents)

    def leaving(self, contents: Sequence[Content]) -> int:
        """Return what room would be free if each had one holder less."""
        with self._lock:
            return self._leaving(contents)

    def exchange(self, contents: Sequence[Content]) -> None:
        """Do as ``drop`` if what is left then fits, or change nothing.

        Raises:
            FdError: ``file_operation``: it does not.
        """
        with self._lock:
            self._take(0, self._leaving(contents))
            self._drop(contents)

    def _drop(self, contents: Iterable[Content]) -> None:
        held = self._held
        for content in contents:
            for blob in content.blobs:
                held[blob.key] -= 1
                if not held[blob.key]:
                    del held[blob.key]
                    self.used -= blob.size

    def _leaving(self, contents: Iterable[Content]) -> int:
        left: dict[bytes, int] = {}
        room = 0
        for content in contents:
            for blob in content.blobs:
                left[blob.key] = left.get(blob.key, self._held[blob.key]) - 1
                if not left[blob.key]:
                    room += blob.size
        return room

    def _take(self, size: int, leaving: int = 0) -> None:
        if self.used + size > self.limit + leaving:
            raise FdError(
                FILE_OPERATION,
                "Cannot store content: Disk quota exceeded",
                f"Limit: {self.limit} bytes for all descriptors of this program",
            )
        self.used += size
