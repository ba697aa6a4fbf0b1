"""Checks of long JSON documents from children, before they are decoded.

A JSON decoder holds the interpreter lock to its end, in any thread: 16 MiB of empty lists
take seconds, in which no client is answered.  So the values are counted first, by a regex
engine that releases the lock; texts may be of any length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import re2

if TYPE_CHECKING:
    from collections.abc import Iterator

Object = dict[str, Any]
"""A decoded JSON object; its keys are its sender's."""

MOST_VALUES = 50_000
"""Most values of one document; long calls have long texts, not long lists."""

MOST_DEPTH = 100
"""Most lists and objects within one another; requests to models and their answers are
about ten deep.  At this depth recursive code does not run out of stack."""

_TEXT = re2.compile(rb'(?s)"(?:[^"\\]|\\.)*"')


def is_deep(value: object) -> bool:
    """Return whether a decoded value is nested deeper than ``MOST_DEPTH``."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined] # a list
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def check_values(document: bytes | bytearray, advice: str) -> None:
    """Raise ``ValueError`` if a document has too many values; its text ends in advice."""
    for _ in texts_in(document, MOST_VALUES, advice):
        pass


def texts_in(
    document: bytes | bytearray, most_values: int, advice: str
) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each text of a document, with its quotes.

    Raises:
        ValueError: there are more values; the message ends in advice.
    """
    position = values = 0
    while True:
        text = _TEXT.search(document, position)
        end = len(document) if text is None else text.start()
        values += sum(
            document.count(mark, position, end) for mark in (b"[", b"{", b",")
        )
        if values > most_values:
            raise ValueError(f"more than {most_values} values; {advice}")
        if text is None:
            return
        values += 1
        position = text.end()
        yield end, position
