"""Counts of the hot path: requests, errors, bytes, and now and then the time.

Plain integers that sessions and the pump raise.

Rules of this file.

1. Counting is always on and costs a request some 0.1 us: an index, two sums, one byte
   compared.  There is no lock; one thread counts.
2. The time of a request is taken of one turn of the pump in ``SAMPLE_TURNS``; of a job,
   which waits for something anyway, always.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from protocol import COMMANDS
from protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLE_TURNS = 64
"""Turns of the pump of which one is timed."""

BOUNDS_S = (
    5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4,
    1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the histograms: 5 us, a READ from memory, to 30 s, a model's answer."""

NAMES_OF: dict[type[m.Request], str] = {
    **{row.message: row.word.decode() for row in COMMANDS.values()},
    m.Refusal: "invalid",
}
"""The name of each request in figures; ``invalid`` is a line that did not parse."""

INDEX: dict[type[m.Request], int] = {
    kind: number for number, kind in enumerate(NAMES_OF)
}
"""Where a request is counted."""

NAMES = {index: NAMES_OF[kind] for kind, index in INDEX.items()}


class Histogram:
    """How often something took how long.

    Attributes:
        counts: by bucket, the last one for what is beyond all bounds.
        sum_s: all of it, seconds.
    """

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        """Count one that took so many seconds."""
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s

    @property
    def total(self) -> int:
        """How many were counted."""
        return sum(self.counts)

    def cumulated(self) -> Iterator[tuple[str, int]]:
        """Yield (upper bound, how many were at most so long), ``+Inf`` last."""
        so_far = 0
        bounds = (*map(repr, BOUNDS_S), "+Inf")
        for bound, count in zip(bounds, self.counts, strict=True):
            so_far += count
            yield bound, so_far


class Counts:
    """The counts of all sessions of a host together.

    Attributes:
        requests: by ``INDEX``.
        errors: replies that were errors, as above.
        inline: times of requests that were answered at once, by ``INDEX``; sampled.
        jobs: times of requests that had to wait, as above; all of them.
        turns: until a turn is timed.
        gone_in: bytes that came from clients that are gone.
        gone_out: bytes that went to them.
    """

    __slots__ = (
        "errors",
        "gone_in",
        "gone_out",
        "inline",
        "jobs",
        "requests",
        "turns",
    )

    def __init__(self) -> None:
        self.requests = [0] * len(INDEX)
        self.errors = [0] * len(INDEX)
        self.inline: dict[int, Histogram] = {}
        self.jobs: dict[int, Histogram] = {}
        self.turns = SAMPLE_TURNS

        self.gone_in = 0
        self.gone_out = 0

    def took(self, among: dict[int, Histogram], kind: int, took_s: float) -> None:
        """Count the time of one request."""
        histogram = among.get(kind)
        if histogram is None:
            histogram = among[kind] = Histogram()
        histogram.add(took_s)
