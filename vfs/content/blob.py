"""A blob: bytes that are kept once; a content: what a descriptor stands for."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

from vfs.content.pages import PageTable, paginate

if TYPE_CHECKING:
    from vfs.content.index import Buffer, TextIndex


class Blob:
    """Bytes that are kept once.

    Attributes:
        key: their BLAKE3.
        size: bytes.
        data: the bytes, or a mapping of the file that has them.
        refs: who holds it.
    """

    __slots__ = ("_index", "_tables", "data", "is_mapped", "key", "refs", "size")

    def __init__(self, key: bytes, data: Buffer, index: TextIndex | None) -> None:
        self.key = key
        self.size = len(data)
        self.data = data
        self.is_mapped = isinstance(data, mmap.mmap)
        self.refs = 1
        self._index = index
        self._tables: dict[int, PageTable] = {}

    @property
    def index(self) -> TextIndex:
        """Return the counts of a text.

        Precondition: it is a text; the raw bytes of binary content have no lines.
        """
        if self._index is None:
            raise RuntimeError("the raw bytes of binary content have no lines")
        return self._index

    @property
    def is_text(self) -> bool:
        """Whether it has lines."""
        return self._index is not None

    def give_index(self, index: TextIndex) -> None:
        """Take the counts that a scan has found."""
        self._index = index

    def pages(self, page_size: int) -> PageTable:
        """Return its pages of at most ``page_size`` characters, made once for all."""
        table = self._tables.get(page_size)
        if table is None:
            table = paginate(self.data, self.index, page_size)
            self._tables[page_size] = table
        return table

    def close(self) -> None:
        """Unmap it; nobody holds it any more."""
        if isinstance(self.data, mmap.mmap):
            # A search of a client that is gone may still read: then it ends with that.
            with contextlib.suppress(BufferError):
                self.data.close()


class Content:
    """What a descriptor stands for.

    Attributes:
        text: what is paged.
        raw: the original bytes where these are no text; ``text`` is then base64.
    """

    __slots__ = ("raw", "text")

    def __init__(self, text: Blob, raw: Blob | None = None) -> None:
        self.text = text
        self.raw = raw

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Return what it holds."""
        return (self.text,) if self.raw is None else (self.text, self.raw)

    @property
    def original(self) -> Blob:
        """Return the bytes that were put in."""
        return self.text if self.raw is None else self.raw

    @property
    def stored_bytes(self) -> int:
        """Return what it takes, if nobody else holds the same."""
        return sum(blob.size for blob in self.blobs)
