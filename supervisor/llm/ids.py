"""Ids of answers and their parts, for providers that give none."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostlib.documents import Object


def random_id(prefix: str) -> str:
    """Return a unique id with a prefix."""
    return f"{prefix}_{secrets.token_hex(24)}"


def put_id(answer: Object, prefix: str, known: str = "") -> str:
    """Return the id of an answer; one that has none gets the known one, or a new one."""
    found = answer.get("id")
    if not found or not isinstance(found, str):
        found = answer["id"] = known or random_id(prefix)
    return found
