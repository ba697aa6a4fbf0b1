"""Leases: a node's reckoning, and the directory's (FL5).

Rules of this file.

1. A node notes its clock before it asks; its deadline is that + L - margin. The directory
   counts L from its answer, on its own clock: its end is always the later one.
2. A new deadline is worth something once the launchpad has armed it, not before.
3. Invariant: no reading of one clock is compared with a reading of another.
"""

from __future__ import annotations

from enum import Enum

LEASE_S = 5.0
"""How long a node is a member without being heard."""

MARGIN_S = 1.0
"""The part of a lease for the end of a node's children, and for drifting clocks."""

LEAST_LEASE_S = 3.0
"""Shortest lease: a beat and three attempts, beside the margin."""

BEAT_S = 1.0
"""Time from an answered beat to the next one."""

RETRY_S = 0.1
"""Time from a failed beat to the next attempt.

With a second, a directory that was killed under load cost children.
"""

ANSWER_S = 0.5
"""Time without an answer before the next attempt; a later answer still counts."""

SILENT_S = 2.0
"""Time without a beat after which a node is shown as unknown."""


class NodeLease:
    """One session's lease, as its node knows it.

    Args:
        lease_s: L, as the directory says.

    Attributes:
        next_s: when the next attempt is due, on the node's clock.
        deadline_s: until then the node may have children and cause effects; the last
            deadline that the launchpad got.
    """

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self.next_s = 0.0
        self.deadline_s = float("-inf")
        self._number = 0
        self._asked: dict[int, float] = {}  # attempt -> the clock before it
        self._is_late = False

    def begin(self, now_s: float) -> int:
        """Note the clock and return the number of this attempt.

        It comes before anything of the attempt: before the daemon is asked, too.
        """
        self._number += 1
        oldest_s = now_s - self.lease_s + MARGIN_S
        self._asked = {n: s for n, s in self._asked.items() if s > oldest_s}
        self._asked[self._number] = now_s
        self.next_s = now_s + (RETRY_S if self._is_late else ANSWER_S)
        self._is_late = True
        return self._number

    def fail(self, now_s: float) -> None:
        """Try again soon: the daemon or the directory has not answered."""
        self.next_s = min(self.next_s, now_s + RETRY_S)

    def renew(self, number: int) -> float | None:
        """Return the deadline that an answer is worth, to be armed; None if no later.

        An answer that comes late is worth what its own question was.
        """
        asked_s = self._asked.pop(number, None)
        if asked_s is None:
            return None
        self._is_late = False
        self.next_s = asked_s + BEAT_S
        deadline_s = asked_s + self.lease_s - MARGIN_S
        return deadline_s if deadline_s > self.deadline_s else None

    def confirm(self, deadline_s: float) -> None:
        """Count on a deadline: the launchpad has armed it."""
        self.deadline_s = max(self.deadline_s, deadline_s)

    def is_held(self, now_s: float) -> bool:
        """Return whether the deadline lies ahead."""
        return now_s < self.deadline_s

    def is_over(self, now_s: float) -> bool:
        """Return whether a deadline was armed, and has passed."""
        return float("-inf") < self.deadline_s <= now_s


class Standing(Enum):
    """A lease in the directory's view."""

    HELD = "held"
    SILENT = "silent"  # the lease goes on
    OUT = "out"


class LeaseTable:
    """The leases of all nodes, as the directory counts them.

    Args:
        lease_s: L.
    """

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._answered: dict[str, float] = {}
        self._lengths: dict[str, float] = {}

    def grant(self, node: str, now_s: float, least_s: float = 0.0) -> None:
        """Count a lease from now: it is answered, or the directory has just started.

        Args:
            node: its name.
            now_s: by the directory's clock.
            least_s: L of another directory, by which the node may still reckon.
        """
        self._answered[node] = now_s
        self._lengths[node] = max(self.lease_s, least_s)

    def drop(self, node: str) -> None:
        """Forget a lease that has ended."""
        self._answered.pop(node, None)
        self._lengths.pop(node, None)

    def standing(self, node: str, now_s: float) -> Standing:
        """Return what is known of a node's lease; one without any is out."""
        answered_s = self._answered.get(node)
        if answered_s is None or now_s - answered_s >= self.length_of(node):
            return Standing.OUT
        return Standing.SILENT if now_s - answered_s >= SILENT_S else Standing.HELD

    def length_of(self, node: str) -> float:
        """Return how long the lease of a node is."""
        return self._lengths.get(node, self.lease_s)

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that have one."""
        return tuple(self._answered)
