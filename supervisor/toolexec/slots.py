"""Slots: how many executions a host runs at once, and whose turn it is.

A slot is there for a child that has few, however many others have (spec S7).
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from vfs.filesystem import Filesystem


# ToolExec's share of the host's descriptors; places for its connections.
#
# Rules.
#
# 1. Descriptors that children can make the host hold stand in one account
#    (``vfs.filesystem``): those taken for tools are not there for files, and the other way
#    round, so that together they leave the host its reserve (attack 18).
# 2. A part of the limit is there for tools in any case: files that stay open stop none.
# 3. A child that has something and asks for more is refused where there is no more.  A
#    child that has nothing yet is not: so little stands in the part of rule 2.
# 4. All listeners together have a quarter of the host's descriptors; beyond that each has
#    only its equal part, so that floods at some take nothing from the others.  Where other
#    parts of the host hold what that would take, each has ``MIN_CONNECTIONS``.

OWN_PART = 8
"""For tools alone is one of so many descriptors that the process may have."""

OF_EXECUTION = 7
"""Of a tool that runs: its output, two pipes that it is moved by, its process, the line of
its signals."""


MAX_CONNECTIONS = 256
"""Connections of one listener: its executions, their readers, and those that signal."""

MIN_CONNECTIONS = 4
"""A listener's part of the descriptors, however many listeners there are."""

SHORTAGE_TOLD_S = 5.0
"""Between two lines of log about one shortage of descriptors."""


class Descriptors:
    """The descriptors and places of one host's ToolExec.

    Args:
        fs: has the account.

    Attributes:
        held: so many, with those that are about to be taken.
    """

    def __init__(self, fs: Filesystem) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.held = 0
        self._own = soft // OWN_PART
        self._fs = fs
        fs.set_aside(self._own)

    def has(self, count: int) -> bool:
        """Whether so many more may be taken."""
        return self._beyond(count) <= max(0, self._fs.spare)

    def hold(self, count: int) -> None:
        """Count so many more as held; less than 0: fewer."""
        self._fs.set_aside(self._beyond(count))
        self.held += count

    def _beyond(self, count: int) -> int:
        """Return what so many more take from others."""
        return max(self._own, self.held + count) - max(self._own, self.held)


class Places:
    """The places for connections of one host, over all its listeners.

    Args:
        descriptors: what is held of the host's.

    Attributes:
        descriptors: as above.
        listeners: how many there are.
        taken: by connections that are served.
    """

    def __init__(self, descriptors: Descriptors) -> None:
        self.descriptors = descriptors
        self.listeners = 0
        self.taken = 0
        self._told_at = -SHORTAGE_TOLD_S

    def has_one(self, held: int) -> bool:
        """Whether a listener that holds so many may have one more."""
        if held >= MAX_CONNECTIONS:
            return False
        if held >= MIN_CONNECTIONS and not self.descriptors.has(1):
            return False
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        all_of_them = soft // 4
        part = max(MIN_CONNECTIONS, all_of_them // max(1, self.listeners))
        return self.taken < all_of_them or held < part

    def take(self, count: int) -> None:
        """Take so many; less than 0: give them back."""
        self.taken += count
        self.descriptors.hold(count)

    def is_shortage_news(self) -> bool:
        """Whether a shortage of descriptors is to be told now."""
        now = trio.current_time()
        if now - self._told_at < SHORTAGE_TOLD_S:
            return False
        self._told_at = now
        return True


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
