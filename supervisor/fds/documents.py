"""Long documents of calls: looked at before they are decoded.

A decoder of JSON holds the interpreter to its end, in whichever thread it runs: for 16 MiB
of empty lists that is seconds in which no client is answered.  So the values are counted
first, by an engine that lets go of the interpreter; texts may be of any length.
"""

from __future__ import annotations

import json

import msgspec
import re2

MOST_VALUES = 50_000
"""In one call: what is long in a call is a text, not a list."""

_TEXT = re2.compile(rb'(?s)"(?:[^"\\]|\\.)*"')


def decoded(document: bytes) -> object:
    """Return the value of a document.

    Raises:
        ValueError, RecursionError: it is no JSON, or has too many values.
    """
    _check_values(document)
    try:
        return msgspec.json.decode(document)
    except msgspec.DecodeError:
        return json.loads(document)  # says what is wrong, and takes what is odd


def _check_values(document: bytes) -> None:
    position = values = 0
    while True:
        text = _TEXT.search(document, position)
        end = len(document) if text is None else text.start()
        values += sum(
            document.count(mark, position, end) for mark in (b"[", b"{", b",")
        )
        if values > MOST_VALUES:
            raise ValueError(
                f"more than {MOST_VALUES} values; put long content in with FD_PUT"
            )
        if text is None:
            return
        values += 1
        position = text.end()
