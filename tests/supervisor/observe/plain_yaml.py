"""The plain part of YAML.

Block mappings, sequences of mappings, strings in double quotes.

All accepted text means the same to every reader of YAML 1.2, and what is not plain is
refused.
"""

import json
import re
from typing import Any

Value = str | dict[str, "Value"] | list["Value"]

_LINE = re.compile(r"( *)(- )?([A-Za-z_][A-Za-z0-9_]*):(?: (\".*\"))?")


def plain_yaml(text: str) -> dict[str, Any]:
    """Return a document.

    Raises:
        ValueError: it is not of the plain part; with the number of the line.
    """
    lines: list[tuple[int, int, bool, str, str | None]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number}: not plain YAML")
        indent, dash, key, quoted = found.groups()
        try:
            value = None if quoted is None else str(json.loads(quoted))
        except ValueError:
            raise ValueError(f"line {number}: no string in double quotes") from None
        lines.append((number, len(indent), dash is not None, key, value))
    document, rest = _mapping(lines, 0)
    if rest:
        raise ValueError(f"line {rest[0][0]}: indented otherwise than what is above it")
    return document


Lines = list[tuple[int, int, bool, str, str | None]]


def _mapping(lines: Lines, indent: int) -> tuple[dict[str, Value], Lines]:
    """Return the mapping that begins here, and the lines after it."""
    mapping: dict[str, Value] = {}
    while lines and lines[0][1] == indent and not lines[0][2]:
        (number, _, _, key, value), lines = lines[0], lines[1:]
        if key in mapping:
            raise ValueError(f"line {number}: {key!r} stands there twice")
        if value is not None:
            mapping[key] = value
        elif lines and lines[0][1] == indent + 2:
            mapping[key], lines = _nested(lines, indent + 2)
        else:
            raise ValueError(f"line {number}: {key!r} has no value")
    return mapping, lines


def _nested(lines: Lines, indent: int) -> tuple[Value, Lines]:
    if not lines[0][2]:
        return _mapping(lines, indent)
    sequence: list[Value] = []
    while lines and lines[0][1] == indent and lines[0][2]:
        number, _, _, key, value = lines[0]
        # Behind its dash an item's first key stands as deep as the others.
        first = (number, indent + 2, False, key, value)
        item, lines = _mapping([first, *lines[1:]], indent + 2)
        sequence.append(item)
    return sequence, lines
