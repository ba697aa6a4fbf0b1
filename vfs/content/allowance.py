"""What the processes of one child may keep.

Rules of this file.

1. A content counts once, however many descriptors and temporary files of the child hold
   it, as the store keeps it once; it counts until the last of them has gone.
2. What is on its way in (``FD_PUT``) counts by its bytes until it is a content.
3. Any thread may call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vfs.content.errors import FILE_OPERATION, FdError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfs.content.blob import Content


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
        self._lock = threading.Lock()

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

    def hold(self, content: Content) -> None:
        """Count one more holder of a content.

        Raises:
            FdError: ``file_operation``: there is no room for it; it is not counted.
        """
        with self._lock:
            held = self._held
            self._take(sum(blob.size for blob in content.blobs if blob.key not in held))
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
            held = self._held
            for content in contents:
                for blob in content.blobs:
                    held[blob.key] -= 1
                    if not held[blob.key]:
                        del held[blob.key]
                        self.used -= blob.size

    def _take(self, size: int) -> None:
        if self.used + size > self.limit:
            raise FdError(
                FILE_OPERATION,
                "Cannot store content: Disk quota exceeded",
                f"Limit: {self.limit} bytes for all descriptors of this program",
            )
        self.used += size
