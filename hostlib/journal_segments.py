"""The daemon's journal: the same lines as everywhere, in files that rotate.

Each event is appended at once, as ``journal`` promises; the bell rings for those who
follow (``sandhost events``) and read the files by offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from hostlib.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostlib.segments import Segments

MAX_BYTES = 64 * 1024 * 1024
KEEP = 5
"""Some two million events are kept."""


class SegmentJournal(Journal):
    """A journal in segments.

    Args:
        segments: where it is kept; owned.
        complain: told once when writing begins to fail.
    """

    def __init__(self, segments: Segments, complain: Callable[[str], None]) -> None:
        last = segments.last_byte()
        super().__init__(-1, complain, is_torn=last not in {b"", b"\n"})
        self.segments = segments
        self._changed = trio.Event()
        self._is_taken = False
        self._is_open = True

    @property
    def is_on(self) -> bool:
        """Whether events go anywhere."""
        return self._is_open

    @property
    def changed(self) -> trio.Event:
        """An event that is set with the next line; take it before reading."""
        self._is_taken = True
        return self._changed

    def descriptors(self) -> tuple[int, ...]:
        """Return what the journal holds of the process's descriptors."""
        return self.segments.descriptors()

    def _put(self, data: bytes) -> tuple[int, OSError | None]:
        before = self.segments.end
        kept = self.segments.append(data)
        if self.segments.has_vanished:
            self.segments.has_vanished = False
            where = self.segments.directory
            self._complain(f"The journal's files vanished: begun anew in {where}")
        # Set although nobody waits yet: who has taken it may be about to.
        if self._is_taken:
            self._is_taken = False
            self._changed.set()
            self._changed = trio.Event()
        return self.segments.end - before, None if kept else self.segments.failure

    def close(self) -> None:
        """Close the file."""
        self._is_open = False
        self.segments.close()
