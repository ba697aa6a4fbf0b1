"""Costs of a child's network beside connections: starts, idling, live changes.

The host is a program of its own (`benchmarks.network_host`) in a world of its own, with a
server of HTTP by TLS. Wake-ups are counted from the outside, through /proc, of the host,
its launchpad and all children together.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from benchmarks.idle import stream, usage
from benchmarks.measure import (
    REPOSITORY,
    MeasureError,
    clean_environment,
    percentile,
    workplace,
)
from benchmarks.network_host import CHILDREN, PORTS
from benchmarks.report import Row, at_most
from tests.helpers.certificates import certificate

STARTS = 10
"""Of each kind in a round."""
WINDOW_S = 5.0
SETTLE_S = 2.0

Taken = dict[str, list[float]]


def measure_costs(rounds: int) -> list[Row]:
    """Take the figures of one host."""
    # Not below /dev, which a host may hide.
    with workplace(Path(tempfile.gettempdir())) as place:
        place.chmod(0o755)
        certificate(place, "web.test")
        key = place / "key"
        key.touch(0o600)
        key.write_text("of-the-benchmark-0123456789\n")
        words = ["unshare", "--net", "--mount", sys.executable, "-m"]
        words += ["benchmarks.network_host", str(place)]
        words += [str(STARTS * rounds), str(rounds)]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=REPOSITORY, env=clean_environment(),
        ) as process:  # fmt: skip
            output = stream(process.stdout)
            rows = [
                *_starts(_next(output, "starts")),
                *_changes(_next(output, "changes")),
                *_requests(_next(output, "requests")),
                _idle(_next(output, "idle")["processes"]),
            ]
            stream(process.stdin).close()
        return rows


def _next(output: IO[str], kind: str) -> Taken:
    found: dict[str, Taken] = json.loads(output.readline() or "{}")
    if kind not in found:
        raise MeasureError(str(found.get("failed", "the host has ended")))
    return found[kind]


def _starts(taken: Taken) -> list[Row]:
    rows = []
    without_ms = statistics.median(taken["none"])
    for count in PORTS:
        took_ms = statistics.median(taken[str(count)])
        pairs = zip(taken[str(count)], taken["none"], strict=True)
        beyond = statistics.median(took - without for took, without in pairs)
        detail = f"{took_ms:.2f} / {without_ms:.2f} ms = {took_ms / without_ms:.2f}"
        name = f"start with {count} granted ports, beyond netns alone"
        data = {"took_ms": took_ms, "without_ms": without_ms}
        aim = at_most(1.0) if count else None
        rows.append(Row(name, beyond, "ms", aim, detail, data))
    return rows


def _changes(taken: Taken) -> list[Row]:
    usual_ms = statistics.median(taken["unchanged"])
    rows = []
    for kind in ("allow", "deny"):
        took_ms = taken[kind]
        detail = f"at most {max(took_ms):.1f} ms of {len(took_ms)}; "
        detail += f"a connection without a change: {usual_ms:.2f} ms"
        data = {"p99": percentile(took_ms, 99), "unchanged_ms": usual_ms}
        name = f"change ({kind}), to the end of the next connection"
        median_ms = statistics.median(took_ms)
        rows.append(Row(name, median_ms, "ms", at_most(10.0), detail, data))
    return rows


def _requests(taken: Taken) -> list[Row]:
    rows = []
    for kind in ("new", "kept"):
        pairs = list(
            zip(taken[f"credential {kind}"], taken[f"direct {kind}"], strict=True)
        )
        beyond = statistics.median(own - direct for own, direct in pairs)
        own_ms, direct_ms = (
            statistics.median(column) for column in zip(*pairs, strict=True)
        )
        detail = f"{own_ms:.2f} / {direct_ms:.2f} ms = {own_ms / direct_ms:.1f}"
        name = f"credential's request, {kind} connection, beyond TLS itself"
        rows.append(
            Row(
                name,
                beyond,
                "ms",
                None,
                detail,
                {"own_ms": own_ms, "direct_ms": direct_ms},
            )
        )
    return rows


def _idle(processes: list[float]) -> Row:
    pids = [*map(int, processes)]
    time.sleep(SETTLE_S)
    before = usage(pids)
    time.sleep(WINDOW_S)
    woken = usage(pids).switches - before.switches
    name = f"wake-ups of a host and {CHILDREN} idle children of {max(PORTS)} ports"
    return Row(name, woken, "", at_most(0), f"{len(pids)} processes in {WINDOW_S:g} s")
