"""A patch for a terminal: coloured, and without controls that it obeys.

A program that has written into a file can move the cursor or overwrite a line by what it
wrote, and so hide what it changed from the person who looks.
"""

from __future__ import annotations

import codecs
from itertools import chain
from typing import TYPE_CHECKING

from hostlib.messages import show_controls

if TYPE_CHECKING:
    from collections.abc import Iterator

_COLOURS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}
_HEAD, _END = "\x1b[1m", "\x1b[0m"


def show_patch(pieces: Iterator[bytes], *, coloured: bool) -> Iterator[bytes]:
    """Yield the pieces of a patch for a terminal.

    Args:
        pieces: of any size.
        coloured: lines have colours by what they begin with.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    is_begun = False
    for data in chain(pieces, (None,)):
        text = decoder.decode(data or b"", final=data is None)
        lines = text.split("\n")
        shown = [show_controls(line) for line in lines]
        if coloured:
            first = shown[:1] if is_begun else []
            shown = first + [_colour(line) for line in shown[len(first) :]]
        yield "\n".join(shown).encode()
        is_begun = bool(lines[-1]) or (is_begun and len(lines) == 1)


def _colour(line: str) -> str:
    colour = _COLOURS.get(line[:1], _HEAD if line.startswith("diff") else "")
    return f"{colour}{line}{_END}" if colour else line
