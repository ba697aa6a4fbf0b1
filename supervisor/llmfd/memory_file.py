"""The memory file: bytes of contents that the next program of a host takes over.

A content on the disk stays where it is. The others go into this file, and the state of
each part (``snapshot``, ``restore`` of its class) says where its bytes lie.
"""

from __future__ import annotations

import os

from hostlib.handover import HandoverError

PIECE_BYTES = 4 * 1024 * 1024
"""Bytes of one read or write."""

Piece = tuple[int, int]
"""(offset, size) in the memory file."""


class MemoryFile:
    """A file in memory.

    Args:
        fd: of the program before; None for a new one.

    Attributes:
        fd: owned.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("sandhost-contents", os.MFD_CLOEXEC)
        self.fd = fd
        self._size = 0

    def put(self, data: bytes) -> Piece:
        """Write bytes; return where they lie.

        Raises:
            OSError: there is no memory left.
        """
        at, left = self._size, memoryview(data)
        while left:
            left = left[os.write(self.fd, left[:PIECE_BYTES]) :]
        self._size += len(data)
        return at, len(data)

    def get(self, piece: Piece) -> bytes:
        """Return bytes.

        Raises:
            HandoverError: they were not written whole.
        """
        at, left = piece
        parts = []
        while left:
            data = os.pread(self.fd, min(left, 64 * PIECE_BYTES), at)
            if not data:
                raise HandoverError("a content was not handed over whole")
            parts.append(data)
            at, left = at + len(data), left - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close it; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
