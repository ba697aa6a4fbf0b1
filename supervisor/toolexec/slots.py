"""Slots: how many executions a host runs at once, and whose turn it is.

A slot is there for a child that has few, however many others have (spec S7).
"""

from __future__ import annotations

GUARANTEED_SLOTS = 8
"""Slots that are there for a child however many others have."""


class BusyError(Exception):
    """There is no slot."""


class Slots:
    """How many executions a host may run at once.

    A child may have all of them; one that has fewer than ``guaranteed`` gets its next
    one in any case.

    Args:
        limit: slots of the host.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.guaranteed = max(1, min(GUARANTEED_SLOTS, limit // 8))
        self.used = 0

    def take(self, of_child: int) -> None:
        """Take one for a child that has ``of_child`` already.

        Raises:
            BusyError: there is none.
        """
        if of_child >= self.limit:
            raise BusyError
        if self.used >= self.limit and of_child >= self.guaranteed:
            raise BusyError
        self.used += 1

    def give(self) -> None:
        """Give one back."""
        self.used -= 1
