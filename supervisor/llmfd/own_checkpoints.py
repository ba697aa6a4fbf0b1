"""The checkpoints of an owner that one process may restore.

A checkpoint holds descriptors and a conversation. A process that was given only some of
them must not reach the others through a checkpoint: from then on it sees only
checkpoints that it made itself.
"""

from __future__ import annotations

import secrets

MOST_IDS = 1000
"""As many checkpoints as an owner may have (``checkpoints.MOST_CHECKPOINTS``): those
with older ids are gone."""


class OwnCheckpoints:
    """The ids that one process may name.

    Attributes:
        seen: those that it sees, oldest first; None for all of its owner.
        made: those that it made.
    """

    __slots__ = ("made", "seen")

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        self.made: list[str] = []

    def add(self, checkpoint: str) -> None:
        """Add one that the process has made."""
        for ids in (self.made, self.seen):
            if ids is not None:
                ids.append(checkpoint)
                del ids[:-MOST_IDS]

    def remove(self, checkpoint: str) -> None:
        """Remove one that was deleted."""
        for ids in (self.made, self.seen):
            if ids is not None and checkpoint in ids:
                ids.remove(checkpoint)

    def sees(self, checkpoint: str) -> bool:
        """Return whether the process may name it."""
        return self.seen is None or checkpoint in self.seen

    def keep_own(self) -> None:
        """Hide all checkpoints that it did not make, from now on."""
        self.seen = list(self.made)

    def fork(self) -> OwnCheckpoints:
        """Return the checkpoints of a fork: it sees the same, and has made none."""
        other = OwnCheckpoints()
        other.seen = None if self.seen is None else list(self.seen)
        return other


_NAMED = "named:"
_NAMELESS = "nameless:"

NAMELESS = f"{_NAMELESS}*"
"""Random owners, for GLOB."""

NUMBERED = "child-[0-9]*"
"""Owners of older programs, for GLOB: a place in the order of starts, which the next
host gives to another child."""


def owner_of(name: str | None) -> str:
    """Return the owner of a child's checkpoints, as in their rows.

    A child that the configuration names has the same owner in all its lives. Any other
    child gets a random one: its checkpoints are listed for no other child, and only a
    caller that knows their random id can restore them.

    Args:
        name: its configured name; None for a child without one.
    """
    return f"{_NAMELESS}{secrets.token_hex(16)}" if name is None else _NAMED + name


def is_owner(owner: str) -> bool:
    """Return whether ``owner_of`` may have returned it."""
    return owner.startswith((_NAMED, _NAMELESS))
