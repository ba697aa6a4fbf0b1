"""A blob: bytes that are kept once; a content: the object of a descriptor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.llmfd.index import PageTable, paginate
from supervisor.llmfd.slots import Slot
from supervisor.llmfd.spool import FileMap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.index import Buffer, TextIndex

PIECE_BYTES = 4 * 1024 * 1024
"""One step of a copy, about a millisecond."""


class Blob:
    """Bytes that are kept once.

    Invariant: the bytes never change, wherever they lie. A reader that has taken
    ``data`` may use it while the blob moves to the disk.

    Attributes:
        key: their BLAKE3.
        size: bytes.
        refs: the number of holders.
        was_used: whether a caller has asked for it since it was last considered for the
            disk.
    """

    __slots__ = (
        "_buffer",
        "_index",
        "_slot",
        "_tables",
        "key",
        "refs",
        "size",
        "was_used",
    )

    def __init__(self, key: bytes, place: Buffer | Slot) -> None:
        self.key = key
        self.refs = 1
        self.was_used = False
        self._index: TextIndex | None = None
        self._tables: dict[int, PageTable] = {}
        self._buffer: Buffer | None = None
        self._slot: Slot | None = None
        if isinstance(place, Slot):
            self._slot = place
            self.size = place.size
        else:
            self._buffer = place
            self.size = len(place)

    @property
    def data(self) -> Buffer:
        """Return the bytes, or a mapping of the file that has them.

        The caller drops it soon: a mapping of a slot is a descriptor of the host.

        Raises:
            FdError: ``file_operation``: they lie in a slot and the disk refused.
        """
        buffer = self._buffer
        if buffer is not None:
            return buffer
        if self._slot is None:
            raise RuntimeError("the bytes of a blob are asked for after its end")
        return self._slot.read()

    @property
    def in_memory(self) -> bytes | None:
        """Return the bytes if they are in memory, None if they are on the disk."""
        return self._buffer if isinstance(self._buffer, bytes) else None

    @property
    def mapping(self) -> FileMap | None:
        """Return the mapping of its file, if it has one."""
        return self._buffer if isinstance(self._buffer, FileMap) else None

    def move(self, place: Buffer | Slot) -> None:
        """Move the bytes to another place."""
        if isinstance(place, Slot):
            self._slot = place  # first: a concurrent reader finds the old place
            self._buffer = None
        else:
            self._buffer = place

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
        """Set the counts that a scan has found."""
        self._index = index

    def pages(self, page_size: int) -> PageTable:
        """Return its pages of at most ``page_size`` characters, made once."""
        table = self._tables.get(page_size)
        if table is None:
            table = paginate(self.data, self.index, page_size)
            self._tables[page_size] = table
        return table

    def pieces(
        self, start: int = 0, end: int | None = None, step: int = PIECE_BYTES
    ) -> Iterator[bytes]:
        """Yield a part of the bytes, at most ``step`` at once."""
        data = self.data
        end = self.size if end is None else end
        for offset in range(start, end, step):
            yield data[offset : min(offset + step, end)]

    def close(self) -> None:
        """Free its place: the last holder is gone."""
        if self._slot is not None:
            self._slot.free()
        elif isinstance(self._buffer, FileMap):
            self._buffer.free()


class Content:
    """The text or binary bytes of a descriptor.

    Attributes:
        text: the paged text.
        raw: the original bytes if they are no text; ``text`` is then base64.
    """

    __slots__ = ("raw", "text")

    def __init__(self, text: Blob, raw: Blob | None = None) -> None:
        self.text = text
        self.raw = raw

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Return its blobs."""
        return (self.text,) if self.raw is None else (self.text, self.raw)

    @property
    def original(self) -> Blob:
        """Return the bytes as they were put in."""
        return self.text if self.raw is None else self.raw

    def touch(self) -> None:
        """Mark it as used: others move to the disk before it."""
        self.text.was_used = True
        if self.raw is not None:
            self.raw.was_used = True
