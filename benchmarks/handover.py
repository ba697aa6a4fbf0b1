"""The pause that a child sees when its daemon's program is replaced.

One child does nothing but PING on its door and says how long the slowest took; around it
sleep others, for a host with more to hand over takes longer. The peer, from the same run,
is the start of the program alone: `sandhost handover-check` imports what a host imports.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.daemon import daemon
from benchmarks.measure import MeasureError, clean_environment, workplace
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Report, Row
from supervisor.client import ControlError, HostClient
from supervisor.handover.state import versions

NAME = "handover"
METHOD = "sandhost serve, replaced by reload --exec; one child PINGs, the others sleep"
ROUNDS = 1
CHILDREN = 100
EXCHANGES = 7
PING = (
    sys.executable,
    "-ISc",
    """
import os, time
while True:
    begun = time.perf_counter()
    os.write(3, b"PING\\n")
    if os.read(3, 3) != b"OK\\n":
        raise SystemExit("no answer")
    taken = time.perf_counter() - begun
    if taken > 0.05:
        os.write(1, b"%.6f\\n" % taken)
""",
)


class Figures(NamedTuple):
    """The figures of one daemon, in ms."""

    pause_ms: float
    order_ms: float
    start_ms: float


def start_ms(sandhost: Path, times: int) -> float:
    """Return the median time in which the program starts and has imported everything."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        command = [str(sandhost), "handover-check", versions()]
        subprocess.run(
            command, check=True, capture_output=True, env=clean_environment()
        )
        taken.append((time.perf_counter() - begun) * 1000)
    return statistics.median(taken)


def slowest_ms(client: HostClient, seen: int) -> list[float]:
    """Return what the child has said of slow answers, but for the first so many."""
    text = b"".join(entry.data for entry in client.logs("ping")).decode()
    return [float(line) * 1000 for line in text.split()][seen:]


def measure(sandhost: Path, children: int) -> Figures:
    """Take the figures of one daemon."""
    with workplace() as place, daemon(sandhost, place, children) as (_, client):
        pids = {row.name: row.pid for row in client.ps()}
        pid = client.spawn(list(PING), name="ping").pid
        pauses, orders = [], []
        for _ in range(EXCHANGES):
            seen = len(slowest_ms(client, 0))
            begun = time.perf_counter()
            client.replace()
            orders.append((time.perf_counter() - begun) * 1000)
            found = slowest_ms(client, seen)
            if not found:
                raise MeasureError("the child noticed no pause")
            pauses.append(max(found))
        now = {row.name: row.pid for row in client.ps()}
        if now != {**pids, "ping": pid}:
            raise MeasureError("children have other pids than before")
        return Figures(
            statistics.median(pauses),
            statistics.median(orders),
            start_ms(sandhost, EXCHANGES),
        )


def rows_of(taken: Sequence[Figures], children: int) -> list[Row]:
    """Return the medians over the rounds."""
    pause, order, start = (
        statistics.median(values) for values in zip(*taken, strict=True)
    )
    peer = f"{pause / start:.2f} x the start of the program, {start:.0f} ms"
    return [
        Row(f"pause of a child, {children} others", pause, "ms", detail=peer),
        Row("reload --exec", order, "ms", detail="check, pause and answer"),
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(options)
    options.add_argument("--children", type=int, default=CHILDREN, metavar="N")
    given = parse(options, argv)
    try:
        taken = [measure(given.sandhost, given.children) for _ in range(given.rounds)]
        rows = rows_of(taken, given.children)
    except (MeasureError, ControlError, TimeoutError) as error:
        rows = [Row("a replaced daemon", None, "", detail=str(error))]
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
