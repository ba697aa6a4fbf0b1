"""How much memory the bytes of a child take once they are decoded or encoded.

Bounds, found by counting: nothing is decoded to find them. A request reserves them before
it is taken apart (``vfs.payload.Reservation``, attack 42).
"""

from __future__ import annotations

from typing import Final

LIST_BYTES: Final = 64
TABLE_BYTES: Final = 200
ITEM_BYTES: Final = 100
"""What the decoder of JSON makes of a ``[``, of a ``{``, and of what a ``,`` divides, its
texts apart: an empty list, a small table, a place in either with the head of a text."""

_WIDEST: Final = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")
"""First bytes of characters beyond U+FFFF: with one of those each takes four bytes."""

_TWICE: Final = b'\b\t\n\f\r"\\'
"""Written with two bytes in JSON; other control characters with six."""

_CONTROLS: Final = bytes(set(range(32)) - set(_TWICE))

PIECE_BYTES: Final = 256 * 1024
"""So much is counted at once, about 0.2 ms: another thread may have its turn then."""


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
    """Return what a text takes until it is sent: alone, in a message, and twice as JSON."""
    return 2 * (text_bytes(data) + json_bytes(data))


def document_bytes(document: bytes | bytearray, most_values: int) -> int:
    """Return the most that a JSON document takes once it is decoded.

    Args:
        document: it, of any form.
        most_values: what it is held to; see ``hostlib.documents``.
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
