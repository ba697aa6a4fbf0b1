"""Kills of a fleet's nodes: when a child is told lost, and placed again.

The fleet is one of its own, with leases of their usual length, and ends with the kills.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from subprocess import SubprocessError

import trio

from benchmarks.measure import MeasureError
from benchmarks.report import Row, at_most
from supervisor.control.client import ControlError
from tests.helpers.fleetkills import (
    Figures,
    Fleet,
    Remains,
    fleet_of,
    kill_in_turn,
    kinds_of,
)
from tests.helpers.fleetmachines import Machine, UnavailableError

NAMES = ("a", "b", "c", "d")
"""Of the machines; the first is the head, and goes on."""

AIMED = 200
SEED = 1
"""Of the order of the kills."""

GONE_S, TOLD_S, PLACED_S = 5.0, 7.0, 10.0
"""Limits, from the kill (FL8, and the aims of the fleet); the first is a lease."""

FAULTS = (AssertionError, ControlError, OSError, SubprocessError, ValueError)
"""Of a kill, or of the fleet around it."""


@dataclass
class Kills:
    """Kills on one fleet, and what is seen of them; the first fault ends them."""

    fleet: Fleet
    remains: list[Remains] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def do(self, count: int) -> None:
        """Do so many kills, on all machines but the head at once.

        Raises:
            MeasureError: one had a fault.
        """
        trio.run(kill_in_turn, self.fleet.others, kinds_of(count, SEED), self._kill)
        if self.faults:
            raise MeasureError(self.faults[0])

    def _kill(self, machine: Machine, kind: str, number: int) -> None:
        """Do one kill, unless one had a fault."""
        if self.faults:
            return
        try:
            self.remains.append(self.fleet.kill(machine, kind, number))
        except FAULTS as why:
            self.faults.append(f"{kind}, kill {number}: {why}")


def rows_of_kills(count: int) -> list[Row]:
    """Return what so many kills of nodes do to the children there."""
    name = f"{count or AIMED} kills of nodes"
    if not count:
        said = f"not measured: --kills {AIMED}"
        return [Row(name, None, "", detail=said, is_absent=True)]
    try:
        with fleet_of(*NAMES) as fleet:
            kills = Kills(fleet)
            kills.do(count)
    except UnavailableError as why:
        return [Row(name, None, "", detail=str(why), is_absent=True)]
    except (MeasureError, *FAULTS) as why:
        return [Row(name, None, "", detail=str(why))]
    twice = [one.name for one in kills.remains if one.ran_twice]
    left = [what for one in kills.remains for what in one.left]
    return [
        row_of_times("gone", fleet.figures, lambda one: one.gone, GONE_S),
        row_of_times("told", fleet.figures, lambda one: one.told, TOLD_S),
        row_of_times("placed again", fleet.figures, lambda one: one.placed, PLACED_S),
        Row(f"ran twice, after {name}", len(twice), "", at_most(0), ", ".join(twice)),
        Row(f"left behind, after {name}", len(left), "", at_most(0), ", ".join(left)),
    ]


def row_of_times(
    name: str,
    figures: Mapping[str, Figures],
    times_of: Callable[[Figures], list[float]],
    limit_s: float,
) -> Row:
    """Return the slowest of all kinds; the middle of each beside it."""
    times = {kind: times_of(one) for kind, one in figures.items() if one.rounds}
    every = [time_s for some in times.values() for time_s in some]
    middles = {kind: statistics.median(some) for kind, some in times.items() if some}
    said = ", ".join(f"{kind} {middle_s:.1f}" for kind, middle_s in middles.items())
    unlost = ", ".join(kind for kind, some in times.items() if not some)
    said = f"medians: {said or 'none'}; none lost: {unlost or 'by no kind'}"
    data = {f"{kind}, rounds": float(figures[kind].rounds) for kind in times}
    data |= {f"{kind}, lost": float(len(some)) for kind, some in times.items()}
    data |= {f"{kind}, median": middle_s for kind, middle_s in middles.items()}
    data |= {f"{kind}, slowest": max(times[kind]) for kind in middles}
    named = f"{name}, slowest of {len(every)}"
    return Row(named, max(every, default=None), "s", at_most(limit_s), said, data)
