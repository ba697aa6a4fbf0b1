"""Counts of the hot path: requests, errors, bytes, and sampled times.

Plain integers that sessions and the pump increment.

Rules of this file.

1. Counting is always on and costs some 0.1 us a request: an index, two sums, one byte
   compared. There is no lock; one thread counts.
2. The time of a request is taken in one turn of the pump out of ``SAMPLE_TURNS``; of a
   job, which waits anyway, always.
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
"""Upper bounds of the histograms: 5 us, a READ from memory, to 30 s, a model's
answer."""

NAMES: dict[type[m.Request], str] = {
    **{row.message: row.word.decode() for row in COMMANDS.values()},
    m.Refusal: "invalid",
}
"""The name of each request in figures; ``invalid`` is a line that did not parse."""


class Histogram:
    """Numbers of durations by bucket.

    Attributes:
        counts: by bucket, the last one for durations beyond all bounds.
        sum_s: the sum of all, seconds.
    """

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s

    @property
    def total(self) -> int:
        """The number of counted durations."""
        return sum(self.counts)

    def accumulate(self) -> Iterator[tuple[str, int]]:
        """Yield (upper bound, number of durations up to it), ``+Inf`` last."""
        so_far = 0
        bounds = (*map(repr, BOUNDS_S), "+Inf")
        for bound, count in zip(bounds, self.counts, strict=True):
            so_far += count
            yield bound, so_far


class Counts:
    """The counts of all sessions of a host together.

    Attributes:
        requests: by request class.
        errors: error replies, as above.
        inline: times of requests answered at once, as above; sampled.
        jobs: times of requests that had to wait, as above; all of them.
        turns: number of turns until the next timed one.
        gone_in: bytes from clients that are gone.
        gone_out: bytes to them.
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
        self.requests = dict.fromkeys(NAMES, 0)
        self.errors = dict.fromkeys(NAMES, 0)
        self.inline: dict[type[m.Request], Histogram] = {}
        self.jobs: dict[type[m.Request], Histogram] = {}
        self.turns = SAMPLE_TURNS

        self.gone_in = 0
        self.gone_out = 0

    def count_request(
        self,
        among: dict[type[m.Request], Histogram],
        kind: type[m.Request],
        took_s: float,
    ) -> None:
        """Count the time of one request."""
        histogram = among.get(kind)
        if histogram is None:
            histogram = among[kind] = Histogram()
        histogram.add(took_s)
