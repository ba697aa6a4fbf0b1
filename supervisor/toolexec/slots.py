"""Slots: how many executions a host runs at once, and whose turn it is.

A slot is there for a child that has few, however many others have (spec S7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.toolexec.descriptors import OF_EXECUTION, Descriptors

if TYPE_CHECKING:
    from vfs.filesystem import Filesystem

GUARANTEED_SLOTS = 8
"""Slots that are there for a child however many others have."""


class BusyError(Exception):
    """There is no slot."""


class Slots:
    """How many executions a host may run at once.

    A child may have all of them; one that has fewer than ``guaranteed`` gets its next
    one in any case.  Where the host lacks descriptors a child has one, and more as soon as
    there are some.

    Args:
        limit: slots of the host.
        fs: has the account of the host's descriptors.

    Attributes:
        descriptors: what ToolExec holds of them.
    """

    def __init__(self, limit: int, fs: Filesystem) -> None:
        self.limit = limit
        self.guaranteed = max(1, min(GUARANTEED_SLOTS, limit // 8))
        self.used = 0
        self.descriptors = Descriptors(fs)

    def take(self, of_child: int) -> None:
        """Take one for a child that has ``of_child`` already.

        Raises:
            BusyError: there is none.
        """
        if of_child >= self.limit:
            raise BusyError
        if self.used >= self.limit and of_child >= self.guaranteed:
            raise BusyError
        if of_child and not self.descriptors.has(OF_EXECUTION):
            raise BusyError
        self.enter()

    def enter(self) -> None:
        """Take one for an execution of the program before."""
        self.used += 1
        self.descriptors.hold(OF_EXECUTION)

    def give(self) -> None:
        """Give one back."""
        self.used -= 1
        self.descriptors.hold(-OF_EXECUTION)
