"""Which of its owner's checkpoints a process may go back to.

A checkpoint holds descriptors and a conversation.  Who was given some of them only must
not get at the others by way of one: from then on it sees the checkpoints that it made
itself.
"""

from __future__ import annotations

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
