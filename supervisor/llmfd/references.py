"""``<ref id="...">`` in a model's replies: parts of it that it wants to speak of later.

One pass over the tags with a stack: linear, whatever is nested in what.  A tag without
its other half means nothing.  The text of a part is without the tags inside it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TAG = re.compile(r"<ref id=\"([^\"<>]{1,200})\">|</ref>")

MOST_REFS = 1000
"""Parts of one reply; what comes after is left alone."""


class Ref(NamedTuple):
    """One part.

    Attributes:
        id: as it was given.
        text: what stands between the tags.
    """

    id: str
    text: str


def extract(reply: str) -> tuple[Ref, ...]:
    """Return the parts of a reply, in the order in which they end."""
    bare: list[str] = []  # the reply without tags
    size = 0
    opened: list[tuple[str, int]] = []
    closed: list[tuple[str, int, int]] = []
    position = 0
    for tag in _TAG.finditer(reply):
        bare.append(reply[position : tag.start()])
        size += tag.start() - position
        position = tag.end()
        if tag[1] is not None:
            opened.append((tag[1], size))
        elif opened:
            ref_id, start = opened.pop()
            closed.append((ref_id, start, size))
        if len(closed) == MOST_REFS:
            break
    bare.append(reply[position:])
    text = "".join(bare)
    return tuple(_bounded(text, closed))


def _bounded(text: str, closed: list[tuple[str, int, int]]) -> list[Ref]:
    """Return the parts; nested a thousand deep they would be quadratic: bound the sum."""
    left = 8 * len(text) + 1024
    found = []
    for ref_id, start, end in closed:
        left -= end - start
        if left < 0:
            break
        found.append(Ref(ref_id, text[start:end]))
    return found
