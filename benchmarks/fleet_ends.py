"""Ends of a fleet's parts: how long its tables are untrue, or anything is left.

The fleet is one of its own, with leases of their usual length; its parts end one after the
other, and start again. Tables are those of the directory and of the daemons, beside the
processes that run (`tests.helpers.fleetends`).
"""

import statistics
from subprocess import SubprocessError

from benchmarks.report import Row, at_most
from supervisor.control.client import ControlError
from tests.helpers.fleetends import (
    ENDS,
    ENDS_OF_HEAD,
    Outcome,
    end_head,
    end_part,
)
from tests.helpers.fleetkills import fleet_of
from tests.helpers.fleetmachines import UnavailableError

ROUNDS = 5
"""Of each end."""

LIMIT_S = 5.0
"""Limit (FL8); a lease is as long."""

RAY_S = 1.0
"""Limit from the end of a raylet to that of all of its node's Ray (FL8)."""

SHOWN = 100
"""Characters of what was untrue."""

FAULTS = (
    AssertionError,
    ControlError,
    OSError,
    SubprocessError,
    LookupError,
    ValueError,
)
"""Of an end, or of the fleet around it."""


def rows_of_ends(rounds: int = ROUNDS) -> list[Row]:
    """Return how long the tables of a fleet are untrue after each end, at most."""
    seen: list[tuple[str, Outcome]] = []
    rows = []
    kind = "the start of the fleet"
    try:
        with fleet_of("a", "b") as fleet:
            for number, kind in enumerate(list(ENDS) * rounds):
                seen.append((kind, end_part(fleet, kind, number)))
            for number, end in enumerate(list(ENDS_OF_HEAD) * rounds, len(seen)):
                kind = f"{end} of the head"
                seen.append((kind, end_head(fleet, end, number)))
            kind = "the end of the fleet"
    except UnavailableError as why:
        name = "tables untrue after an end"
        return [Row(name, None, "", detail=str(why), is_absent=True)]
    except FAULTS as why:
        rows = [Row(f"tables untrue after {kind}", None, "", detail=repr(why))]
    for kind in dict.fromkeys(kind for kind, _ in seen):
        rows.append(row_of_end(kind, [one for other, one in seen if other == kind]))
    if raylets := [one.ray_s for kind, one in seen if kind == "kill raylet"]:
        name = "kill raylet until all of its Ray has ended, slowest"
        rows.append(Row(name, max(raylets), "s", at_most(RAY_S)))
    return rows


def row_of_end(kind: str, seen: list[Outcome]) -> Row:
    """Return the longest time of one kind of end; the middle beside it."""
    times = [one.untrue_s for one in seen]
    longest = max(seen, key=lambda one: one.untrue_s)
    middle_s = statistics.median(times)
    last = longest.untrue[:SHOWN] or "nothing"
    lost = sum(one.is_lost for one in seen)
    said = f"median {middle_s:.1f}; children lost: {lost}; untrue last: {last}"
    data = {f"round {number}": time_s for number, time_s in enumerate(times)}
    data["longest look"] = max(one.look_s for one in seen)
    name = f"tables untrue after {kind}, slowest of {len(times)}"
    return Row(name, longest.untrue_s, "s", at_most(LIMIT_S), said, data)
