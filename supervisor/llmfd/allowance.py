"""Bytes of content that the processes of one child may keep.

Rules of this file.

1. A content counts once, however many descriptors and temporary files of the child hold
   it, until the last of them is gone; the store keeps it once, too.
2. Pieces of ``FD_PUT`` count by their bytes until they are a content.
3. In an exchange, the result has to fit; until then old and new contents both count, so
   that no other process takes room that is not free yet.
4. Any thread may call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from hostlib.threads import ThreadLock
from supervisor.llmfd.errors import FILE_OPERATION, FdError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from supervisor.llmfd.blob import Content


class Replacement:
    """Contents that replace others: all of them count, or none (rule 3).

    Args:
        allowance: charged for them; None if there is no bound.
        leaving: the contents that they replace, as far as known.
    """

    def __init__(self, allowance: Allowance | None, leaving: Sequence[Content]) -> None:
        self._allowance = allowance
        self._room = 0 if allowance is None else allowance.leaving(leaving)
        self._held: list[Content] = []

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting the contents that replaced none."""
        if self._allowance is not None:
            self._allowance.drop(self._held)

    def add(self, content: Content) -> None:
        """Count a new content.

        Raises:
            FdError: ``file_operation``: there is no room.
        """
        if self._allowance is not None:
            self._allowance.hold(content, self._room)
            self._held.append(content)

    def settle(self, left: Sequence[Content]) -> None:
        """Stop counting the replaced contents, now that all new ones are there.

        Raises:
            FdError: ``file_operation``: there is no room, because others hold the
                replaced contents by now or have taken the room.
        """
        if self._allowance is None:
            return
        if self._held:
            self._allowance.exchange(left)
        else:  # giving up always fits
            self._allowance.drop(left)
        self._held.clear()


class Allowance:
    """Bytes of content that the processes of one child may keep.

    Args:
        limit: bytes.

    Attributes:
        limit: as above.
        used: contents and pieces so far, bytes.
    """

    __slots__ = ("_held", "_lock", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: dict[bytes, int] = {}  # holders, by the key of a blob
        self._lock = ThreadLock()

    def take(self, size: int) -> None:
        """Take room for pieces.

        Raises:
            FdError: ``file_operation``: there is no room.
        """
        with self._lock:
            self._take(size)

    def give_back(self, size: int) -> None:
        """Give room of pieces back."""
        with self._lock:
            self.used -= size

    def hold(self, content: Content, leaving: int = 0) -> None:
        """Count one more holder of a content.

        Args:
            content: the held one.
            leaving: room that will be free soon: see ``Replacement``.

        Raises:
            FdError: ``file_operation``: there is no room; it is not counted.
        """
        with self._lock:
            held = self._held
            size = sum(blob.size for blob in content.blobs if blob.key not in held)
            self._take(size, leaving)
            for blob in content.blobs:
                held[blob.key] = held.get(blob.key, 0) + 1

    def hold_again(self, contents: Iterable[Content]) -> None:
        """Count one more holder of each; contents that were held before always fit."""
        with self._lock:
            held = self._held
            for content in contents:
                for blob in content.blobs:
                    if blob.key not in held:
                        self.used += blob.size
                    held[blob.key] = held.get(blob.key, 0) + 1

    def drop(self, contents: Iterable[Content]) -> None:
        """Count one holder less of each; the last one frees its room."""
        with self._lock:
            self._drop(contents)

    def leaving(self, contents: Sequence[Content]) -> int:
        """Return the room that would be free if each had one holder less."""
        with self._lock:
            return self._leaving(contents)

    def exchange(self, contents: Sequence[Content]) -> None:
        """Drop as ``drop`` does if the rest then fits, or change nothing.

        Raises:
            FdError: ``file_operation``: it does not fit.
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
