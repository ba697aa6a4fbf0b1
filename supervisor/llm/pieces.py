"""Merging the deltas of a provider's stream into messages and lists.

Rules of this file.

1. Only immutable values of a delta are kept, for a writer later changes the events.
2. Adding a piece takes time in proportion to the piece, not to the message.
3. Kept values are counted: each takes memory beside its text.
"""

from __future__ import annotations

from typing import Any

JOINED = frozenset({"content", "refusal", "arguments", "reasoning_content"})
"""Texts that come in pieces; other texts of a delta are complete."""

Object = dict[str, Any]
"""A JSON object; its keys are the provider's."""


def merge(known: Object, delta: Object) -> int:
    """Add a delta to a message, without keeping the delta; return the new kept values."""
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
    """Set a member; return the number of new kept values."""
    more = values_in(value) - (values_in(known[key]) if key in known else 0)
    known[key] = value
    return more


def values_in(value: object) -> int:
    """Return the number of values in a value, itself included."""
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
    """The pieces of a text: adding to a string would copy it each time."""


def join_texts(value: object) -> object:
    """Return a message with its texts in one piece."""
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        return {key: join_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [join_texts(inner) for inner in value]
    return value


class _Items(list[object]):
    """A list that comes in pieces, and its items by their ``index``."""

    def __init__(self) -> None:
        super().__init__()
        self.by_index: dict[int | str, Object] = {}


def _merge_list(before: object, pieces: list[object]) -> tuple[_Items, int]:
    """Add pieces to a list; one with an ``index`` is merged into the item with it.

    Returns:
        (the list, the number of new kept values).
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
    """Add the lists of a piece to the known ones; other members are replaced."""
    for key, value in piece.items():
        if isinstance(value, list):
            if not isinstance(known.get(key), list):
                known[key] = []
            known[key].extend(value)
        elif value is not None:
            known[key] = value
