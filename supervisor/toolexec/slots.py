"""ToolExec's bounds: descriptors, places for connections, slots for executions.

1. Descriptors that children can make the host hold are in one account
   (``vfs.filesystem``): those of tools are not there for files and vice versa, and both
   together leave the host its reserve (attack 18).  A part is for tools in any case.
2. A child that has some and asks for more may be refused.  A child without one gets it
   from that part.
3. All listeners together have a quarter of the host's descriptors; beyond that each has
   an equal part, so that floods at some take nothing from others.
4. A child with few executions always has a slot, however many others have (spec S7).
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostlib.accounts import Account

OWN_PART = 8
"""One of so many descriptors of the process is for tools alone."""

OF_EXECUTION = 7
"""Descriptors of a running tool: its output, two pipes that move it, its process, its
line of signals."""


MAX_CONNECTIONS = 256
"""Connections of one listener: its executions, their readers, and signalling ones."""

MIN_CONNECTIONS = 4
"""The listeners' part of the descriptors, however many listeners there are."""


class Descriptors:
    """The descriptors of one host's ToolExec: its own part, and those beyond it.

    Args:
        account: of the host; charged for the own part until `close`, used or not.

    Attributes:
        held: their number, those about to be taken included.
    """

    def __init__(self, account: Account[int]) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.held = 0
        self._own = soft // OWN_PART
        self._account = account
        account.record(self._own)

    def has(self, count: int) -> bool:
        """Return whether so many more may be taken."""
        return self._beyond(count) <= self._account.left

    def hold(self, count: int) -> None:
        """Count so many more as held; fewer if negative."""
        self._account.record(self._beyond(count))
        self.held += count

    def close(self) -> None:
        """Give all of them back."""
        self._account.record(-max(self._own, self.held))

    def _beyond(self, count: int) -> int:
        """Return how many of them other parts of the host would lose."""
        return max(self._own, self.held + count) - max(self._own, self.held)


class ConnectionPlaces:
    """The places for connections of one host, over all its listeners.

    Args:
        descriptors: the account of the host's.

    Attributes:
        descriptors: as above.
        listeners: their number.
        taken: places of served connections.
    """

    def __init__(self, descriptors: Descriptors) -> None:
        self.descriptors = descriptors
        self.listeners = 0
        self.taken = 0

    def has_one(self, held: int) -> bool:
        """Return whether a listener with so many connections may have one more."""
        if held >= MAX_CONNECTIONS:
            return False
        if held >= MIN_CONNECTIONS and not self.descriptors.has(1):
            return False
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        all_of_them = soft // 4
        part = max(MIN_CONNECTIONS, all_of_them // max(1, self.listeners))
        return self.taken < all_of_them or held < part

    def take(self, count: int) -> None:
        """Take so many; give them back if negative."""
        self.taken += count
        self.descriptors.hold(count)


GUARANTEED_SLOTS = 8
"""Slots of a child that others cannot take."""


class BusyError(Exception):
    """No slot is left."""


class Slots:
    """The bound on executions of a host.

    A child may have all of them; one with fewer than ``guaranteed`` gets its next one
    in any case. Where the host lacks descriptors a child has one, and more when there
    are some.

    Args:
        limit: slots of the host.
        account: the descriptors of the host.

    Attributes:
        descriptors: ToolExec's account of them.
    """

    def __init__(self, limit: int, account: Account[int]) -> None:
        self.limit = limit
        self.guaranteed = max(1, min(GUARANTEED_SLOTS, limit // 8))
        self.used = 0
        self.descriptors = Descriptors(account)

    def take(self, of_child: int) -> None:
        """Take a slot for a child that has ``of_child`` already.

        Raises:
            BusyError: no slot is left.
        """
        if of_child >= self.limit:
            raise BusyError
        if self.used >= self.limit and of_child >= self.guaranteed:
            raise BusyError
        if of_child and not self.descriptors.has(OF_EXECUTION):
            raise BusyError
        self.enter()

    def enter(self) -> None:
        """Take a slot for an execution of the program before."""
        self.used += 1
        self.descriptors.hold(OF_EXECUTION)

    def give(self) -> None:
        """Give a slot back."""
        self.used -= 1
        self.descriptors.hold(-OF_EXECUTION)
