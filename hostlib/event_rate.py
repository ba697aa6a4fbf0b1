"""A rate limit: a burst at once, then a number of events a second."""

from __future__ import annotations


class EventRate:
    """The number of events that are still allowed, for events that a child causes.

    Args:
        burst: events at once.
        per_s: events a second, afterwards.

    Attributes:
        left_out: events that were refused since the caller last reported them.
    """

    __slots__ = ("_at_s", "_burst", "_left", "_per_s", "left_out")

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left: float = burst
        self._at_s: float | None = None
        self.left_out = 0

    def take(self, now_s: float) -> bool:
        """Use one allowed event; count a refused one and return False if none is left.

        Args:
            now_s: time of a monotonic clock.
        """
        self._earn(now_s)
        if self._left < 1:
            self.left_out += 1
            return False
        self._left -= 1
        return True

    def is_used_up(self, now_s: float) -> bool:
        """Return whether no event is allowed at this moment."""
        self._earn(now_s)
        return self._left < 1

    def _earn(self, now_s: float) -> None:
        if self._at_s is not None:
            earned = (now_s - self._at_s) * self._per_s
            self._left = min(self._burst, self._left + earned)
        self._at_s = now_s
