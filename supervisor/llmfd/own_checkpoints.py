"""Which of its owner's checkpoints a process may go back to.

A checkpoint holds descriptors and a conversation.  Who was given some of them only must
not get at the others by way of one: from then on it sees the checkpoints that it made
itself.
"""

from __future__ import annotations

import secrets

MOST_IDS = 1000
"""As many checkpoints as an owner may have (``checkpoints.MOST_CHECKPOINTS``): older ids
than these are of checkpoints that have gone."""


class OwnCheckpoints:
    """The ids that one process may name.

    Attributes:
        seen: those it sees, oldest first; None: every one of its owner.
        made: those it made itself.
    """

    __slots__ = ("made", "seen")

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        self.made: list[str] = []

    def add(self, checkpoint: str) -> None:
        """Add one that the process made."""
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
        """Tell whether the process may name it."""
        return self.seen is None or checkpoint in self.seen

    def keep_own(self) -> None:
        """See only what was made here, from now on."""
        self.seen = list(self.made)

    def fork(self) -> OwnCheckpoints:
        """Return what a fork sees: the same; it has made none."""
        other = OwnCheckpoints()
        other.seen = None if self.seen is None else list(self.seen)
        return other


# Whose a checkpoint is, as its row says it.
#
# A child that the configuration names has the same owner in all its lives.  Any other child
# has one that is drawn for it, so that no later child is taken for it: its checkpoints are
# listed for nobody else, and reached by who names their id, which nobody guesses.

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
