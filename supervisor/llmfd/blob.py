"""A blob: bytes that are kept once; a content: the object of a descriptor."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from supervisor.llmfd.index import IndexState, PageTable, TextIndex, paginate
from supervisor.llmfd.memory_file import Piece  # noqa: TC001 - msgspec looks at it

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.blob_files import BlobFiles
    from supervisor.llmfd.index import Buffer
    from supervisor.llmfd.memory_file import MemoryFile

PIECE_BYTES = 4 * 1024 * 1024
"""One step of a copy, about a millisecond."""


class BlobState(msgspec.Struct):
    """See ``Blob``.

    Attributes:
        place: of the bytes in the memory file; None if they are a file of the store.
        index: None if it is no text.
        tables: (page size, place of the starts of its pages).
    """

    key: bytes
    size: int
    place: Piece | None
    index: IndexState | None
    tables: list[tuple[int, Piece]]


class Blob:
    """Bytes that are kept once, in memory or as a file named by their key.

    Invariant: the bytes never change, wherever they lie. A reader that has taken
    ``data`` may use it while the blob moves to the disk, or ends.

    Args:
        key: their BLAKE3.
        size: bytes.
        in_memory: the bytes; None if they are a file.
        files: has that file.

    Attributes:
        key, size, in_memory: as above.
        refs: the number of holders.
        was_used: whether a caller has asked for it since it was last considered for the
            disk.
    """

    __slots__ = (
        "_files",
        "_index",
        "_tables",
        "in_memory",
        "key",
        "refs",
        "size",
        "was_used",
    )

    def __init__(
        self, key: bytes, size: int, in_memory: bytes | None, files: BlobFiles
    ) -> None:
        self.key = key
        self.size = size
        self.in_memory = in_memory
        self.refs = 1
        self.was_used = False
        self._files = files
        self._index: TextIndex | None = None
        self._tables: dict[int, PageTable] = {}

    @property
    def data(self) -> Buffer:
        """Return the bytes, or a mapping of the file that has them.

        The caller drops it soon: a mapping is two descriptors of the host.

        Raises:
            FdError: ``file_operation``: the disk refused, or the file is gone.
        """
        data = self.in_memory
        if data is not None:
            return data
        return self._files.read(self.name, self.size)

    def __getitem__(self, part: slice) -> bytes:
        """Return a part, without a mapping of the file.

        Raises:
            FdError: as for ``data``.
        """
        data = self.in_memory
        if data is not None:
            return data[part]
        start, end, _ = part.indices(self.size)
        return self._files.read_part(self.name, start, max(0, end - start))

    @property
    def name(self) -> str:
        """The name of its file, which it has once it lies on the disk."""
        return self.key.hex()

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
        data = self.in_memory
        end = self.size if end is None else end
        for offset in range(start, end, step):
            stop = min(offset + step, end)
            yield self[offset:stop] if data is None else data[offset:stop]

    # Hand-over

    def snapshot(self, memory: MemoryFile) -> BlobState:
        """Return it as ``restore`` takes it."""
        place = None if self.in_memory is None else memory.put(self.in_memory)
        index = None if self._index is None else self._index.snapshot(memory)
        tables = [
            (size, memory.put(table.starts.tobytes()))
            for size, table in self._tables.items()
        ]
        return BlobState(self.key, self.size, place, index, tables)

    @classmethod
    def restore(cls, state: BlobState, memory: MemoryFile, files: BlobFiles) -> Blob:
        """Return the blob of the program before.

        Raises:
            HandoverError: its bytes were not handed over whole.
        """
        data = None if state.place is None else memory.get(state.place)
        blob = cls(state.key, state.size, data, files)
        if state.index is not None:
            blob.give_index(TextIndex.restore(state.index, memory))
        for page_size, starts in state.tables:
            table = PageTable(page_size, array("Q", memory.get(starts)), state.size)
            blob._tables[page_size] = table
        return blob


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
    def keys(self) -> list[bytes]:
        """Return the keys of its blobs."""
        return [blob.key for blob in self.blobs]

    @property
    def original(self) -> Blob:
        """Return the bytes as they were put in."""
        return self.text if self.raw is None else self.raw

    def touch(self) -> None:
        """Mark it as used: others move to the disk before it."""
        self.text.was_used = True
        if self.raw is not None:
            self.raw.was_used = True
