"""Upper bounds for the memory that a child's bytes take once decoded or encoded.

They are found by counting, without decoding.  A request reserves this memory before it is
parsed (``vfs.payload.MemoryReservation``, attack 42).
"""

from __future__ import annotations

from typing import Final

LIST_BYTES: Final = 64
TABLE_BYTES: Final = 200
ITEM_BYTES: Final = 100
"""Memory that a JSON decoder takes for a ``[`` (an empty list), a ``{`` (a small table)
and a ``,`` (a place in either, with the head of a text)."""

_WIDEST: Final = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")
"""First bytes of characters beyond U+FFFF: a text with one takes four bytes for each
character."""

_TWICE: Final = b'\b\t\n\f\r"\\'
"""Characters that JSON writes with two bytes; other control characters take six."""

_CONTROLS: Final = bytes(set(range(32)) - set(_TWICE))

PIECE_BYTES: Final = 256 * 1024
"""Bytes that are counted at once, about 0.2 ms; other threads may run in between."""


def text_bytes(data: bytes | memoryview) -> int:
    """Return the most that UTF-8 bytes take as a text."""
    data = bytes(data)
    if data.isascii():
        return len(data)
    return len(data) * (4 if any(lead in data for lead in _WIDEST) else 2)


def json_bytes(data: bytes) -> int:
    """Return the most that UTF-8 bytes take as a text of JSON."""
    size = len(data)
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        size += len(piece) - len(piece.translate(None, _TWICE))
        size += 5 * (len(piece) - len(piece.translate(None, _CONTROLS)))
    return size


def message_bytes(data: bytes) -> int:
    """Return the memory of a text until it is sent: in two texts and twice as JSON."""
    return 2 * (text_bytes(data) + json_bytes(data))


def document_bytes(document: bytes | bytearray, most_values: int) -> int:
    """Return the most that a JSON document takes once it is decoded.

    Args:
        document: the bytes, well-formed or not.
        most_values: the bound on its values; see ``hostlib.documents``.
    """
    size = len(document)
    if any(lead in document for lead in (*_WIDEST, b"\\ud", b"\\uD")):
        size *= 4
    elif b"\\u" in document or not document.isascii():
        size *= 2
    tables = min(most_values, document.count(b"{"))
    lists = min(most_values - tables, document.count(b"["))
    items = min(most_values - tables - lists, document.count(b","))
    return size + TABLE_BYTES * tables + LIST_BYTES * lists + ITEM_BYTES * items
