"""Content that comes in pieces: in memory while it is short, then in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from vfs.content.index import Reader
from vfs.content.spool import no_room, write_all
from vfs.hostio import Aside, beside

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfs.content.blob import Content
    from vfs.content.index import Buffer
    from vfs.content.spool import Slot
    from vfs.content.store import Store

MOST_IN_MEMORY_BYTES = 16 * 1024 * 1024
"""Longest content that comes in pieces and is kept in memory: what lies in a mapped file
is read as quickly, and the kernel may drop it when it needs the room."""

BESIDE_BYTES = 1024 * 1024
"""From here on a piece is hashed, and written, beside the look at what is in it."""

JOINED_BYTES = 16 * 1024
"""Shorter pieces are joined: each byte by itself would take forty times its memory."""


class Writer:
    """Takes one content in.

    Args:
        store: will keep it.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, store: Store) -> None:
        self.size = 0
        self._store = store
        self._pieces: list[bytes] = []
        self._fd = -1
        self._hash = blake3()
        self._reader = Reader()
        self._reserved = 0

    def add(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            FdError: ``file_operation``: the disk refused; nothing more can be added.
        """
        if len(piece) < BESIDE_BYTES:
            self._keep(piece)
            self._reader.feed(piece)
        else:
            wait = beside(self._keep, piece)
            self._reader.feed(piece)
            wait()

    def add_all(self, pieces: Iterable[bytes]) -> None:
        """Add pieces: this thread takes them, two others keep them and look at them.

        Not where the first one is short: then it is little, or comes in short pieces.

        Raises:
            FdError: as for ``add``.
        """
        pieces = iter(pieces)
        first = next(pieces, b"")
        self.add(first)
        if len(first) < BESIDE_BYTES:
            for piece in pieces:
                self.add(piece)
            return
        with Aside(self._reader.feed) as look, Aside(self._keep) as keep:
            for piece in pieces:
                keep.hand(piece)
                look.hand(piece)

    def _keep(self, piece: bytes) -> None:
        if self._fd < 0 and not self._fits(len(piece)):
            self._spill()
        self._hash.update(piece)
        if self._fd >= 0:
            self._write(piece)
        elif self._pieces and len(self._pieces[-1]) < JOINED_BYTES:
            self._pieces[-1] += piece
        else:
            self._pieces.append(piece)
        self.size += len(piece)

    def _fits(self, size: int) -> bool:
        too_long = self.size + size > MOST_IN_MEMORY_BYTES
        if too_long or not self._store.reserve(size):
            return False
        self._reserved += size
        return True

    def _spill(self) -> None:
        try:
            self._fd = self._store.spool.open_file()
        except OSError as why:
            raise no_room(why) from None
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._write(piece)
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)

    def _write(self, piece: bytes) -> None:
        try:
            write_all(self._fd, piece)
        except OSError as why:
            raise no_room(why) from None

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
        if self._fd < 0:
            pieces, self._pieces, self._reserved = self._pieces, [], 0
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            fd, self._fd = self._fd, -1
            try:
                data = store.spool.map(fd, self.size)
            except OSError as why:
                raise no_room(why) from None
        return store.as_content(store.enter(self.digest(), data), self._reader.finish())

    def close(self) -> None:
        """Give everything back that was not finished; safe to call twice."""
        self._pieces = []
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._store.spool.close_file(fd)
