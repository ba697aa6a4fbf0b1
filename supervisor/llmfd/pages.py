"""Where the pages of a text begin: line-aware, every character in exactly one page.

From s: e = min(s + page size, length) in characters.  If e is the length, the rest is one
page.  Else the page ends after the last LF in [s, e), or at e if there is none.  So no
page is longer than the page size, and the pages joined are the text.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from supervisor.llmfd.index import Buffer, TextIndex


class Span(NamedTuple):
    """A part of a text, in bytes; the end is behind it."""

    start: int
    end: int


class PageTable:
    """The pages of one text at one page size.

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
        """Return where a page is, counted from 1."""
        starts = self.starts
        end = starts[page] if page < len(starts) else self._size
        return Span(starts[page - 1], end)


def paginate(text: Buffer, index: TextIndex, page_size: int) -> PageTable:
    """Return the pages of a text; an empty one has one page."""
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
        end = _skip(text, start, index, end_char, page_size)
        cut = text.rfind(b"\n", start, end) + 1
        if cut:
            char = end_char - len(text[cut:end].decode())
            start = cut
        else:
            char = end_char
            start = end


NEAR_CHARS = 32 * 1024
"""Pages up to this size are measured by decoding them; longer ones by the index."""


def _skip(
    text: Buffer, start: int, index: TextIndex, end_char: int, page_size: int
) -> int:
    """Return the byte offset of ``end_char``, which is a page behind ``start``."""
    if page_size > NEAR_CHARS:
        return index.char_offset(text, end_char)
    piece = text[start : start + page_size]
    if piece.isascii():
        return start + page_size
    found = text[start : start + 4 * page_size].decode("utf-8", "ignore")
    return start + len(found[:page_size].encode())
