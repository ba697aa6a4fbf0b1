"""What ToolExec holds of the host's descriptors, in the account that all have.

Rules of this file.

1. What children can make the host hold stands in one account (``vfs.filesystem``): what is
   taken for tools is not there for files, and the other way round, so that together they
   leave the host its reserve (attack 18).
2. A part of the limit is there for tools in any case: files that stay open stop none.
3. Who asks for more and has something is refused where there is no more.  Who has nothing
   yet is not: so little stands in the part of rule 2.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfs.filesystem import Filesystem

OWN_PART = 8
"""For tools alone is one of so many descriptors that the process may have."""

OF_EXECUTION = 7
"""Of a tool that runs: its output, two pipes that it is moved by, its process, the line of
its signals."""


class Descriptors:
    """What one host's ToolExec holds.

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
        """Take note that so many more are held; less than 0: fewer."""
        self._fs.set_aside(self._beyond(count))
        self.held += count

    def _beyond(self, count: int) -> int:
        """Return what so many more take from others."""
        return max(self._own, self.held + count) - max(self._own, self.held)
