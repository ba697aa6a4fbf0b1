"""Costs of a scrape for a host with a thousand children, and for its clients.

The daemon is a process of its own, scraped over HTTP by this program; beside it stands,
from the same run, a request that is refused on the same connection, which is HTTP without
figures. How long the loop is held is measured within a host in this process, which makes
the same snapshot.
"""

import http.client
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.daemon import CHILD, CHILDREN, daemon, time_ms
from benchmarks.hosts import open_host, run_trio
from benchmarks.measure import MeasureError, workplace
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Report, Row, at_most
from supervisor.client import ControlError

NAME = "metrics"
METHOD = "sandhost serve with sleeping children; scraped over HTTP"
ROUNDS = 1
ASKED = 30
WARM_UP = 3


class Figures(NamedTuple):
    """The figures of one daemon and one host, milliseconds."""

    scrape_ms: float
    refused_ms: float
    page_ms: float
    held_ms: float
    size_bytes: float


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def fetch(line: http.client.HTTPConnection, path: str, status: int) -> int:
    """Ask for one page on an open connection; return its size."""
    line.request("GET", path)
    answer = line.getresponse()
    size = len(answer.read())
    if answer.status != status:
        raise MeasureError(f"{path}: {answer.status} instead of {status}")
    return size


async def hold(place: Path, children: int, times: list[float]) -> int:
    """Take the time of snapshots in a host of this process."""
    async with open_host(place) as host:
        for _ in range(children):
            await host.spawn(CHILD)
        for _ in range(ASKED):
            begun = time.perf_counter()
            host.snapshot()
            times.append((time.perf_counter() - begun) * 1000)
    return 0


def measure(sandhost: Path, children: int) -> Figures:
    """Take the figures of one daemon and one host."""
    port = free_port()
    more = f'[metrics]\nlisten = "tcp://127.0.0.1:{port}"\npage = true\n'
    with workplace() as place, daemon(sandhost, place, children, more):
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        for _ in range(WARM_UP):
            fetch(line, "/metrics", 200)
        scrape_ms = time_ms(lambda: fetch(line, "/metrics", 200), ASKED)
        refused_ms = time_ms(lambda: fetch(line, "/absent", 404), ASKED)
        page_ms = time_ms(lambda: fetch(line, "/", 200), 5)
        size = fetch(line, "/metrics", 200)
        line.close()
    times: list[float] = []
    with workplace() as place:
        run_trio(hold, place, children, times)
    return Figures(scrape_ms, refused_ms, page_ms, statistics.median(times), size)


def rows_of(taken: Sequence[Figures], children: int) -> list[Row]:
    """Return the medians over the rounds."""

    def median(name: str) -> float:
        values: list[float] = [getattr(figures, name) for figures in taken]
        return statistics.median(values)

    text = f"{median('size_bytes') / 1024:.0f} KiB"
    refused = f"a refused request: {median('refused_ms'):.2f} ms; {text}"
    return [
        Row(f"scrape of {children} children", median("scrape_ms"), "ms",
            at_most(50.0), refused),
        Row("a scrape holds the loop", median("held_ms"), "ms", at_most(5.0)),
        Row("the status page", median("page_ms"), "ms", detail="a look may be shared"),
    ]  # fmt: skip


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(options)
    options.add_argument("--children", type=int, default=CHILDREN, metavar="N")
    given = parse(options, argv)
    try:
        taken = [measure(given.sandhost, given.children) for _ in range(given.rounds)]
        rows = rows_of(taken, given.children)
    except (MeasureError, ControlError, OSError) as error:
        rows = [Row("a scrape", None, "", detail=str(error))]
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
