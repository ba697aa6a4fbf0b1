r"""Lines and characters of a text by counts at every 32 KiB.

1. A line starts at 0 and after each LF that is not the last character. So ``"a"`` and
   ``"a\n"`` have one line, ``"\n\n"`` two, the empty text none.
2. The counts of a text of 1 GiB take 512 KiB; an answer reads one block of the text, so
   it takes the same time at any size and place.
3. ``Scanner`` refuses bytes that are not UTF-8 or that XML 1.0 forbids; every index
   comes from it, so a blob with an index is text.

Measured: a scan takes 30 ms per 100 MB of log. Searching 29 control characters takes
stringzilla 0.05 ns a byte (memchr 0.3, a table 1.1), counting LFs 0.1 for long lines.
"""

from __future__ import annotations

import codecs
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import stringzilla

from protocol.fdxml import FORBIDDEN_CONTROLS
from supervisor.llmfd.errors import NotTextError
from supervisor.llmfd.memory_file import Piece  # noqa: TC001 - msgspec looks at it

if TYPE_CHECKING:
    import mmap

    from supervisor.llmfd.memory_file import MemoryFile

    Buffer = bytes | mmap.mmap


BLOCK_BYTES = 32 * 1024
"""Bytes between two counts: a block fits into the first cache of most processors."""

DENSE_LINES = BLOCK_BYTES // 32
"""LFs in a block from which counting them one by one is quicker."""

_UNUSUAL = FORBIDDEN_CONTROLS + bytes(range(0x80, 0x100))
_find = stringzilla.find_first_of
_NON_CHARACTERS = (b"\xef\xbf\xbe", b"\xef\xbf\xbf")
_CONTINUATION = bytes(range(0x80, 0xC0))


class Text(Protocol):
    """The bytes of a text, of which short parts are asked for."""

    def __getitem__(self, part: slice, /) -> bytes:
        """Return a part."""
        ...


class IndexState(msgspec.Struct):
    """See ``TextIndex``; the counts are in the memory file, 8 bytes each."""

    size: int
    newlines: Piece
    starts: Piece | None
    ends_line: bool


class TextIndex:
    """Counts of one text.

    Args:
        size: bytes.
        newlines: LFs before each block, and in all.
        starts: characters that begin before each block, and in all; None in ASCII.
        ends_line: whether the last character is LF.

    Attributes:
        size: bytes.
        chars: code points.
        lines: lines (rule 1).
    """

    __slots__ = ("_newlines", "_starts", "chars", "lines", "size")

    def __init__(
        self,
        size: int,
        newlines: array[int],
        starts: array[int] | None,
        *,
        ends_line: bool,
    ) -> None:
        self.size = size
        self._newlines = newlines
        self._starts = starts
        self.chars = size if starts is None else starts[-1]
        self.lines = newlines[-1] + (1 if size and not ends_line else 0)

    @property
    def is_ascii(self) -> bool:
        """Whether each character is a byte."""
        return self._starts is None

    @property
    def memory_bytes(self) -> int:
        """The size of the counts in bytes."""
        arrays = (self._newlines, self._starts)
        return sum(len(a) * a.itemsize for a in arrays if a is not None)

    def newlines_before(self, text: Text, offset: int) -> int:
        """Return the number of LFs before a byte offset."""
        block, rest = divmod(offset, BLOCK_BYTES)
        count = self._newlines[block]
        if rest:
            count += text[offset - rest : offset].count(b"\n")
        return count

    def line_start(self, text: Text, line: int) -> int:
        """Return the byte offset where a line starts, counted from 1.

        ``lines + 1`` gives the end of the text.
        """
        if line > self.lines:
            return self.size
        wanted = line - 1
        if not wanted:
            return 0
        counts = self._newlines
        block = bisect_left(counts, wanted) - 1
        offset = block * BLOCK_BYTES
        piece = text[offset : offset + BLOCK_BYTES]
        return offset + _after_newline(piece, wanted - counts[block])

    def chars_before(self, text: Text, offset: int) -> int:
        """Return the number of characters that begin before a byte offset."""
        if self._starts is None:
            return offset
        block, rest = divmod(offset, BLOCK_BYTES)
        count = self._starts[block]
        if rest:
            count += _count_starts(text[offset - rest : offset])
        return count

    def char_offset(self, text: Text, char: int) -> int:
        """Return the byte offset of a character, counted from 0."""
        if self._starts is None:
            return char
        if char >= self.chars:
            return self.size
        block = bisect_right(self._starts, char) - 1
        offset = block * BLOCK_BYTES
        piece = text[offset : offset + BLOCK_BYTES + 3]
        skipped = 0
        while 0x80 <= piece[skipped] < 0xC0:  # the end of the character before
            skipped += 1
        found = piece[skipped:].decode("utf-8", "ignore")
        before = found[: char - self._starts[block]]
        return offset + skipped + len(before.encode())

    # Hand-over

    def snapshot(self, memory: MemoryFile) -> IndexState:
        """Return it as ``restore`` takes it."""
        newlines = memory.put(self._newlines.tobytes())
        starts = None if self._starts is None else memory.put(self._starts.tobytes())
        ends_line = self.lines == self._newlines[-1]
        return IndexState(self.size, newlines, starts, ends_line)

    @classmethod
    def restore(cls, state: IndexState, memory: MemoryFile) -> TextIndex:
        """Return the counts of the program before.

        Raises:
            HandoverError: they were not handed over whole.
        """
        newlines = array("Q", memory.get(state.newlines))
        starts = None if state.starts is None else array("Q", memory.get(state.starts))
        return cls(state.size, newlines, starts, ends_line=state.ends_line)


def _after_newline(piece: bytes, number: int) -> int:
    """Return the offset after the LF with that number, counted from 1."""
    low, high = 0, len(piece)
    while high - low > 256:
        middle = (low + high) // 2
        count = piece.count(b"\n", low, middle)
        if count < number:
            number -= count
            low = middle
        else:
            high = middle
    for _ in range(number):
        low = piece.find(b"\n", low, high) + 1
    return low


def _count_starts(piece: bytes) -> int:
    if piece.isascii():
        return len(piece)
    return len(piece.translate(None, _CONTINUATION))


class Scanner:
    """Reads a text once, block by block, and collects the counts of an index.

    Every block but the last has ``BLOCK_BYTES``.
    """

    def __init__(self) -> None:
        self._size = 0
        self._lines = 0
        self._newlines = array("Q", [0])
        self._starts: array[int] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._pending = b""
        self._chars = 0
        self._dense = False
        self._last = b""

    def feed(self, text: bytes, start: int, end: int) -> None:
        """Scan the next block.

        Args:
            text: contains the block.
            start: offset of the block in ``text``.
            end: end of the block.

        Raises:
            NotTextError: it is not UTF-8, or has characters that XML 1.0 forbids.
        """
        if self._pending or _find(text, _UNUSUAL, start, end) >= 0:
            self._look_closely(text[start:end])
        else:
            self._chars += end - start
        if self._dense:
            count = text.count(b"\n", start, end)
        else:
            count = stringzilla.count(text, b"\n", start, end)
        self._dense = count > DENSE_LINES
        self._size += end - start
        self._lines += count
        self._newlines.append(self._lines)
        if self._starts is not None:
            self._starts.append(self._chars + (1 if self._pending else 0))
        self._last = text[max(start, end - 3) : end] or self._last

    def _look_closely(self, block: bytes) -> None:
        if _find(block, FORBIDDEN_CONTROLS) >= 0:
            raise NotTextError
        try:
            text = self._decoder.decode(block)
        except UnicodeDecodeError:
            raise NotTextError from None
        joined = self._last + block
        if any(stringzilla.find(joined, code) >= 0 for code in _NON_CHARACTERS):
            raise NotTextError
        if self._starts is None:
            # All before was ASCII: one byte a character.
            blocks = len(self._newlines)
            self._starts = array("Q", (n * BLOCK_BYTES for n in range(blocks)))
        self._chars += len(text)
        self._pending = self._decoder.getstate()[0]

    def finish(self) -> TextIndex:
        """Return the index.

        Raises:
            NotTextError: the text ends inside a character.
        """
        if self._pending:
            raise NotTextError
        ends_line = self._last.endswith(b"\n")
        return TextIndex(self._size, self._newlines, self._starts, ends_line=ends_line)


class IndexReader:
    """Feeds a scanner with pieces of any size, and records whether they are text."""

    def __init__(self) -> None:
        self._scanner: Scanner | None = Scanner()
        self._tail = b""

    def feed(self, text: bytes, start: int = 0, end: int | None = None) -> None:
        """Scan the next piece: ``text``, or a part of it."""
        scanner = self._scanner
        if scanner is None:
            return
        try:
            self._feed(scanner, text, start, len(text) if end is None else end)
        except NotTextError:
            self._scanner = None
            self._tail = b""

    def _feed(self, scanner: Scanner, text: bytes, start: int, end: int) -> None:
        if self._tail:
            middle = min(end, start + BLOCK_BYTES - len(self._tail))
            block = self._tail + text[start:middle]
            if len(block) < BLOCK_BYTES:
                self._tail = block
                return
            scanner.feed(block, 0, BLOCK_BYTES)
            start = middle
        while end - start >= BLOCK_BYTES:
            scanner.feed(text, start, start + BLOCK_BYTES)
            start += BLOCK_BYTES
        self._tail = text[start:end]

    def finish(self) -> TextIndex | None:
        """Return the index of all pieces joined; None if they are no text."""
        scanner = self._scanner
        if scanner is None:
            return None
        try:
            if self._tail:
                scanner.feed(self._tail, 0, len(self._tail))
            return scanner.finish()
        except NotTextError:
            return None


def scan(text: Buffer) -> TextIndex:
    """Return the index of a whole text.

    Raises:
        NotTextError: it is no text.
    """
    scanner = Scanner()
    for offset in range(0, len(text), BLOCK_BYTES):
        block = text[offset : offset + BLOCK_BYTES]
        scanner.feed(block, 0, len(block))
    return scanner.finish()


class Span(NamedTuple):
    """A part of a text, in bytes; the end is behind it."""

    start: int
    end: int


class PageTable:
    """The pages of one text at one page size: each character is in exactly one page.

    From s: e = min(s + page size, length) in characters.  If e is the length, the rest is
    one page.  Else the page ends after the last LF in [s, e), or at e if there is none.

    Attributes:
        page_size: characters.
        starts: byte offset of each page, 8 bytes each.
    """

    __slots__ = ("_size", "page_size", "starts")

    def __init__(self, page_size: int, starts: array[int], size: int) -> None:
        self.page_size = page_size
        self.starts = starts
        self._size = size

    def __len__(self) -> int:
        return len(self.starts)

    def span(self, page: int) -> Span:
        """Return the place of a page, counted from 1."""
        starts = self.starts
        end = starts[page] if page < len(starts) else self._size
        return Span(starts[page - 1], end)


def paginate(text: Buffer, index: TextIndex, page_size: int) -> PageTable:
    """Return the pages of a text; an empty text has one page."""
    starts = array("Q")
    if index.is_ascii:
        _cut_bytes(text, index.size, page_size, starts)
    else:
        _cut_characters(text, index, page_size, starts)
    return PageTable(page_size, starts, index.size)


def _cut_bytes(text: Buffer, size: int, page_size: int, starts: array[int]) -> None:
    rfind, append = text.rfind, starts.append
    start, end = 0, page_size
    append(start)
    while end < size:
        start = (rfind(b"\n", start, end) + 1) or end
        append(start)
        end = start + page_size


def _cut_characters(
    text: Buffer, index: TextIndex, page_size: int, starts: array[int]
) -> None:
    start = char = 0
    while True:
        starts.append(start)
        end_char = char + page_size
        if end_char >= index.chars:
            return
        end = _skip(text, start, page_size)
        cut = text.rfind(b"\n", start, end) + 1
        if cut:
            char = end_char - len(text[cut:end].decode())
            start = cut
        else:
            char = end_char
            start = end


def _skip(text: Buffer, start: int, page_size: int) -> int:
    """Return the byte offset of the character a page behind ``start``."""
    piece = text[start : start + page_size]
    if piece.isascii():
        return start + page_size
    found = text[start : start + 4 * page_size].decode("utf-8", "ignore")
    return start + len(found[:page_size].encode())
