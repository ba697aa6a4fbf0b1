"""Whose a checkpoint is, as its row says it.

A child that the configuration names has the same owner in all its lives.  Any other child
has one that is drawn for it, so that no later child is taken for it: its checkpoints are
listed for nobody else, and reached by who names their id, which nobody guesses.
"""

from __future__ import annotations

import secrets

_NAMED = "named:"
_NAMELESS = "nameless:"

NAMELESS = f"{_NAMELESS}*"
"""Owners that were drawn, for GLOB."""

NUMBERED = "child-[0-9]*"
"""Owners of older programs, for GLOB: a place in the order of starts, which the next host
gives to another child."""


def owner_of(name: str | None) -> str:
    """Return the owner of a child's checkpoints.

    Args:
        name: what the configuration calls it; None for a child that it does not name.
    """
    return f"{_NAMELESS}{secrets.token_hex(16)}" if name is None else _NAMED + name


def is_owner(owner: str) -> bool:
    """Tell whether ``owner_of`` may have returned it."""
    return owner.startswith((_NAMED, _NAMELESS))
