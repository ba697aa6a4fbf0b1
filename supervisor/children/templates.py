"""Texts with places that are filled in when a child starts, for only then are they known."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PLACES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "HOME")
"""Variables of the child that a text may name, as ``${NAME}``."""

_PLACE = re.compile(r"\$\{(" + "|".join(PLACES) + r")\}")


class MissingPlaceError(Exception):
    """The child has no such variable; the argument is its name."""


def fill(text: str, env: Mapping[str, str]) -> str:
    """Return a text with a child's variables put in; every other ``$`` stays.

    Raises:
        MissingPlaceError: the child has not got one of them.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in env:
            raise MissingPlaceError(name)
        return env[name]

    return _PLACE.sub(value, text)
