"""The head of a ToolExec request: what a parser of HTTP gives, and what follows from that.

A value; nothing is refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLAY = b"/exec/ID"
"""Stands for the paths of executions; no path in lower case is the same."""

_ABSOLUTE = re.compile(rb"https?://[^/?]*", re.IGNORECASE)


@dataclass(frozen=True)
class Head:
    """The head of a request; header names in lower case."""

    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    version: bytes = b"1.1"

    def values(self, name: bytes) -> list[bytes]:
        """Return all values of a header."""
        return [value for key, value in self.headers if key == name]

    def says(self, name: bytes) -> bool:
        """Whether a header switches something on with ``1``."""
        return b"1" in self.values(name)

    @cached_property
    def place(self) -> tuple[bytes, bytes, bytes]:
        """(path in lower case, query, id) of its target; ``REPLAY`` has an id."""
        absolute = _ABSOLUTE.match(self.target)
        target = self.target[absolute.end() :] if absolute else self.target
        path, _, query = target.partition(b"?")
        name = path.lower()
        if name.startswith(b"/exec/") and name != b"/exec/":
            return REPLAY, query, path[len(b"/exec/") :]
        return name, query, b""

    @cached_property
    def speaks(self) -> int:
        """The version that it asks for; 0 for none that is spoken."""
        found = self.values(b"x-aifo-proto")
        if len(found) != 1 or found[0].strip() not in (b"1", b"2"):
            return 0
        return int(found[0])

    @cached_property
    def authorizations(self) -> list[bytes]:
        """The values of ``Authorization``."""
        return self.values(b"authorization")

    @cached_property
    def tokens(self) -> list[bytes]:
        """What may be the token in them.

        Each value as it is, and its last piece between blanks and ``=``, whatever the
        scheme, without the punctuation around it.
        """
        found = []
        for value in self.authorizations:
            last = value.replace(b"=", b" ").rsplit(maxsplit=1)[-1:]
            found += [value, *(piece.strip(b",;\"'") for piece in last)]
        return found
