"""Bounds of a workspace's layer: its limits, and the disk's reserve (spec WS17).

The kernel bounds neither, as ADR 56 says of what tools make, so the host looks.

Rules:
 1. A child is ended while a limit is passed, and passed by more than when it began; so one
    that removes from too much is left alone.
 2. While the disk has less free than its reserve, a child is ended if its layer grows.
 3. A look at the disk waits for what can be written till the next one: with far to go it
    is rare. A count of the layer, which takes longer the more files it has, has a pause of
    its own.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

import trio

from hostlib.linux.files import DIRECTORY, closing_fd
from hostlib.threads import in_thread
from supervisor.workspace.directory import path_of
from supervisor.workspace.settings import disk_room
from vfs.growth import MovedError, PlacesContent, content_beneath

if TYPE_CHECKING:
    from supervisor.workspace.use import WorkspaceUse

PAUSE_S = 0.1
"""Time between two looks, in which a child can write beyond a limit."""

LONGEST_PAUSE_S = 5.0
PAUSE_COUNTS = 20
"""Pause in lengths of the last count: counts use at most a twentieth of a thread.

On a disk below its reserve the pause has one such length, and counts use half of one.
"""

_BYTES_PER_S = 4 << 30
"""More than a disk writes today: room for this is not used up before the next look."""


class PassedLimit(NamedTuple):
    """A limit that a layer has passed.

    Attributes:
        limit: ``bytes``, ``files``, ``reserve`` or ``closed directories``.
        used: of the reserve, what is free.
        allowed: of the reserve, what has to be.
    """

    limit: str
    used: int
    allowed: int

    def __str__(self) -> str:
        if self.limit == "reserve":
            return f"its disk has {self.used} bytes free, of {self.allowed} to keep"
        return f"its layer has {self.used} {self.limit}, of {self.allowed} allowed"


class LayerBounds:
    """Looks at the layer of one workspace while a child writes to it."""

    def __init__(self, use: WorkspaceUse) -> None:
        self._path = os.path.join(path_of(use.state_dir, use.name), "upper")
        self._most = {"bytes": use.settings.max_bytes, "files": use.settings.max_files}
        self._counts = any(most is not None for most in self._most.values())
        self._first: dict[str, int] | None = None
        self._low: int | None = None
        self._pause_s = 0.0
        self._count_at_s = 0.0

    async def wait_passed(self) -> PassedLimit:
        """Wait until a limit is passed; say which.

        Raises:
            OSError: the layer cannot be looked at.
        """
        while True:
            passed = await in_thread(self.look)
            if passed is not None:
                return passed
            await trio.sleep(self._pause_s)

    def look(self) -> PassedLimit | None:
        """Look once, the first time for what was there before; for a worker thread.

        Raises:
            OSError: the layer cannot be read.
        """
        with closing_fd(os.open(self._path, DIRECTORY)) as upper:
            passed = self._look_at_disk(upper)
            now_s = time.monotonic()
            if self._counts and passed is None:
                if now_s >= self._count_at_s:
                    passed = self._look_at_limits(upper)
                    began_s, now_s = now_s, time.monotonic()
                    pause_s = max(PAUSE_S, PAUSE_COUNTS * (now_s - began_s))
                    self._count_at_s = now_s + pause_s
                self._pause_s = min(self._pause_s, self._count_at_s - now_s)
        return passed

    def _look_at_limits(self, upper: int) -> PassedLimit | None:
        found = _count(upper)
        if found is None:
            return None
        used = {
            "bytes": found.size_bytes,
            "files": found.files,
            "closed directories": found.closed,
        }
        if self._first is None:
            self._first = used
        most = {**self._most, "closed directories": 0}
        for limit, allowed in most.items():
            if allowed is not None and used[limit] > max(allowed, self._first[limit]):
                return PassedLimit(limit, used[limit], allowed)
        return None

    def _look_at_disk(self, upper: int) -> PassedLimit | None:
        free, kept = disk_room(upper)
        slack_s = max(0, free - kept) / _BYTES_PER_S
        self._pause_s = min(LONGEST_PAUSE_S, max(PAUSE_S, slack_s))
        if free >= kept:
            self._low = None
            return None
        began_s = time.monotonic()
        found = _count(upper)
        self._pause_s = max(PAUSE_S, time.monotonic() - began_s)
        if found is None:
            return None
        if self._low is not None and found.size_bytes > self._low:
            return PassedLimit("reserve", free, kept)
        self._low = found.size_bytes
        return None


def _count(upper: int) -> PlacesContent | None:
    """Count what lies in the layer; None if something was moved meanwhile."""
    try:
        return content_beneath(upper)
    except MovedError:
        return None
