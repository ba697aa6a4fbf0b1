"""What a provider sends in pieces, put together: the message of a choice, lists.

How a delta is added to what is known.

Rules of this file.

1. Nothing of a delta is kept but what is never changed: a writer that passes events on changes
   them afterwards.
2. To add a piece takes time in proportion to the piece, however much is known.
3. Values that are kept are counted: each takes memory beside its text.
"""

from __future__ import annotations

from typing import Any

JOINED = frozenset({"content", "refusal", "arguments", "reasoning_content"})
"""Texts that come in pieces; any other text of a delta stands for itself."""

Object = dict[str, Any]
"""A JSON object; its keys are the provider's."""


def merge(known: Object, delta: Object) -> int:
    """Add a delta to a message; return how many values are kept more than before.

    Nothing of the delta itself is: events are passed on afterwards, and changed on the way.
    """
    size = len(known)
    more = 0
    for key, value in delta.items():
        before = known.get(key)
        if value is None:
            known.setdefault(key, None)
        elif isinstance(value, str) and key in JOINED:
            if not isinstance(before, _Pieces):
                before = known[key] = _Pieces()
            before.append(value)
        elif isinstance(value, dict):
            if not isinstance(before, dict):
                before = known[key] = {}
            more += merge(before, value)
        elif isinstance(value, list):
            known[key], items = _merge_list(before, value)
            more += items
        else:
            known[key] = value
    return more + len(known) - size


def put(known: Object, key: str, value: object) -> int:
    """Set a member as it came; return how many values are kept more than before."""
    more = values_in(value) - (values_in(known[key]) if key in known else 0)
    known[key] = value
    return more


def values_in(value: object) -> int:
    """Return how many values a value is, those within it counted."""
    count = 0
    ahead = [value]
    while ahead:
        one = ahead.pop()
        count += 1
        if isinstance(one, dict):
            ahead += one.values()
        elif isinstance(one, list):
            ahead += one
    return count


class _Pieces(list[str]):
    """A text that is not joined yet: adding to a string would copy it each time."""


def joined(value: object) -> object:
    """Return a message with its texts in one piece."""
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        return {key: joined(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [joined(inner) for inner in value]
    return value


class _Items(list[object]):
    """A list that comes in pieces, and its items by their ``index``."""

    def __init__(self) -> None:
        super().__init__()
        self.by_index: dict[int | str, Object] = {}


def _merge_list(before: object, pieces: list[object]) -> tuple[_Items, int]:
    """Add pieces to a list; those with an ``index`` go to what has it already.

    Returns:
        It, and how many values are kept more than before.
    """
    known = before if isinstance(before, _Items) else _Items()
    more = 0
    for piece in pieces:
        if not isinstance(piece, dict):
            known.append(piece)
            more += values_in(piece)
            continue
        place = piece.get("index")
        item = known.by_index.get(place) if isinstance(place, int | str) else None
        if item is None:
            item = {}
            known.append(item)
            more += 1
            if isinstance(place, int | str):
                known.by_index[place] = item
        more += merge(item, piece)
    return known, more


def extend(known: Object, piece: Object) -> None:
    """Add the lists of a piece to those that are known; what is no list is replaced."""
    for key, value in piece.items():
        if isinstance(value, list):
            if not isinstance(known.get(key), list):
                known[key] = []
            known[key].extend(value)
        elif value is not None:
            known[key] = value
