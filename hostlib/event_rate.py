"""How many events of one kind a child may have written: a burst, then so many a second."""

from __future__ import annotations

import time


class EventRate:
    """What is left to be written of events that a child can make as many of as it likes.

    Args:
        burst: events at once.
        per_s: events a second, afterwards.

    Attributes:
        left_out: events that were not due since the caller told of that last.
    """

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left: float = burst
        self._at_s = time.monotonic()
        self.left_out = 0

    def take(self) -> bool:
        """Take one event from what is left, or count that there is none."""
        now_s = time.monotonic()
        earned = (now_s - self._at_s) * self._per_s
        self._left = min(self._burst, self._left + earned)
        self._at_s = now_s
        if self._left < 1:
            self.left_out += 1
            return False
        self._left -= 1
        return True
