"""Content that comes in pieces: in memory while it is short, then on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from vfs.content.index import Reader
from vfs.content.spool import Incoming

if TYPE_CHECKING:
    from vfs.content.blob import Content
    from vfs.content.index import Buffer
    from vfs.content.slots import Slot
    from vfs.content.store import Store

MOST_IN_MEMORY_BYTES = 16 * 1024 * 1024
"""Longest content that comes in pieces and is kept in memory: what lies in a mapped file
is read as quickly, and the kernel may drop it when it needs the room."""

STEP_BYTES = 128 * 1024
"""What is read, written, hashed and looked at in one go: it is in the second cache level
for each of them.  So one thread takes about as long as two that pass longer pieces on,
for less of the processor's time, and needs no second processor."""

JOINED_BYTES = 16 * 1024
"""Shorter pieces are joined: each byte by itself would take forty times its memory."""


class Writer:
    """Takes one content in.

    Args:
        store: will keep it.

    Attributes:
        size: bytes so far.
        incoming: what lies on the disk; None while it is in memory.
    """

    def __init__(self, store: Store) -> None:
        self.size = 0
        self._store = store
        self._pieces: list[bytes] = []
        self.incoming: Incoming | None = None
        self._hash = blake3()
        self._reader = Reader()
        self._reserved = 0

    def add(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            FdError: ``file_operation``: the disk refused; nothing more can be added.
        """
        if self.incoming is None:
            self._keep(piece)
        view = memoryview(piece)
        for start in range(0, len(piece), STEP_BYTES):
            part = view[start : start + STEP_BYTES]
            if self.incoming is not None:
                self.incoming.add(part)
            self._hash.update(part)
            self._reader.feed(piece, start, start + len(part))
        self.size += len(piece)

    def _keep(self, piece: bytes) -> None:
        """Keep a piece in memory, or turn to the disk."""
        if not self._fits(len(piece)):
            self._spill(self.size + len(piece))
        elif self._pieces and len(self._pieces[-1]) < JOINED_BYTES:
            self._pieces[-1] += piece
        else:
            self._pieces.append(piece)

    def _fits(self, size: int) -> bool:
        too_long = self.size + size > MOST_IN_MEMORY_BYTES
        if too_long or not self._store.reserve(size):
            return False
        self._reserved += size
        return True

    def _spill(self, size: int) -> None:
        self.incoming = Incoming(self._store.spool, size)
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self.incoming.add(piece)
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)

    def go_on(self, incoming: Incoming) -> None:
        """Go on with what another program of this host has put on the disk.

        Raises:
            FdError: ``file_operation``: it cannot be read; the caller closes this.
        """
        self.incoming = incoming
        for piece in incoming.pieces(STEP_BYTES):
            self._hash.update(piece)
            self._reader.feed(piece)
        self.size = incoming.size

    def digest(self) -> bytes:
        """Return the BLAKE3 of what was added so far."""
        return self._hash.digest()

    def finish(self) -> Content:
        """Return what was added, held once; the writer is done.

        Raises:
            FdError: ``file_operation``: the disk refused.
        """
        store = self._store
        data: Buffer | Slot
        if self.incoming is None:
            pieces, self._pieces, self._reserved = self._pieces, [], 0
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            data = self.incoming.finish()
        return store.as_content(store.enter(self.digest(), data), self._reader.finish())

    def close(self) -> None:
        """Give everything back that was not finished; safe to call twice."""
        self._pieces = []
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)
        if self.incoming is not None:
            self.incoming.close()
