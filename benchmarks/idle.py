"""Costs of 1,000 idle children: memory, processor time, wake-ups.

The host is a program of its own (`benchmarks.crowd hold`), seen from the outside
through /proc. Counted are the host's process and its direct children that are not
hosted: the launchpad, which spawns for it, is part of the host.
"""

import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.crowd import crowd_command
from benchmarks.measure import REPOSITORY, MeasureError, clean_environment, workplace
from benchmarks.options import parse, parser
from benchmarks.probes import fifo
from benchmarks.report import Report, Row, at_most

NAME = "idle"
METHOD = "1,000 children that were served once and then do nothing"
ROUNDS = 1
CHILDREN = 1000
WINDOW_S = 5.0
SETTLE_S = 2.0  # exits of the spawning threads, if any, and freed memory
START_TIMEOUT_S = 10.0  # a host starts in half a second
STOP_TIMEOUT_S = 30.0  # 1,000 children are ended in a second
RSS_AIM = at_most(100.0)
CPU_AIM = at_most(1.0)
SWITCH_AIM = at_most(0)


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory and use of the processes of a host."""

    rss_bytes: int
    cpu_s: float
    switches: int  # voluntary: each is a wait that ended, so a wake-up


@dataclass(frozen=True, slots=True)
class Figures:
    """One round's result."""

    child_kib: float
    cpu_percent: float
    switches: int
    empty_mib: float
    full_mib: float


def usage(pids: Sequence[int]) -> Usage:
    """Add up what /proc says of these processes and all their threads."""
    rss_pages = cpu_ticks = switches = 0
    for pid in pids:
        process = Path("/proc") / str(pid)
        rss_pages += int((process / "statm").read_text().split()[1])
        # After the command's name, which may hold blanks: fields 14 and 15 of proc(5).
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        cpu_ticks += int(fields[11]) + int(fields[12])
        for thread in (process / "task").iterdir():
            for line in (thread / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches:"):
                    switches += int(line.split()[1])
    return Usage(
        rss_bytes=rss_pages * os.sysconf("SC_PAGE_SIZE"),
        cpu_s=cpu_ticks / os.sysconf("SC_CLK_TCK"),
        switches=switches,
    )


def host_pids(pid: int, probes: Collection[int]) -> list[int]:
    """Return the processes of a host: its own, and direct children but the probes."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    words = " ".join((task / "children").read_text() for task in tasks)
    return [pid, *(child for child in map(int, words.split()) if child not in probes)]


@contextmanager
def crowd(argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a host that holds a crowd; at the end its standard input ends."""
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=clean_environment(),
    ) as process:
        try:
            yield process
        finally:
            stream(process.stdin).close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise MeasureError(
                    f"the host did not end its children in {STOP_TIMEOUT_S:g} s"
                ) from None


def stream(pipe: IO[str] | None) -> IO[str]:
    """Return a pipe that Popen was asked for."""
    if pipe is None:
        raise MeasureError("no pipe to the host")
    return pipe


def wait_empty(process: subprocess.Popen[str]) -> None:
    """Wait until the host has started and has no child yet.

    Raises:
        MeasureError: it did not start; it has said why on standard error.
    """
    output = stream(process.stdout)
    ready, _, _ = select.select([output], [], [], START_TIMEOUT_S)
    if not ready or output.readline() != "empty\n":
        raise MeasureError("the host did not start")


def measure(children: int) -> Figures:
    """Take the figures of one host."""
    with workplace() as place, fifo(place) as heard:
        argv = crowd_command("hold", children, place, heard.probe())
        with crowd(argv) as process:
            wait_empty(process)
            empty = usage(host_pids(process.pid, set()))
            orders = stream(process.stdin)
            orders.write("spawn\n")
            orders.flush()
            probes = {heard.next_blocking().pid for _ in range(children)}
            own = host_pids(process.pid, probes)
            time.sleep(SETTLE_S)
            begun_s, before = time.monotonic(), usage(own)
            time.sleep(WINDOW_S)
            after, taken_s = usage(own), time.monotonic() - begun_s
    return Figures(
        child_kib=(after.rss_bytes - empty.rss_bytes) / children / 1024,
        cpu_percent=(after.cpu_s - before.cpu_s) / taken_s * 100,
        switches=after.switches - before.switches,
        empty_mib=empty.rss_bytes / (1 << 20),
        full_mib=after.rss_bytes / (1 << 20),
    )


def rows_of(taken: Sequence[Figures]) -> list[Row]:
    """Return the medians over the rounds."""

    def median(name: str) -> float:
        values: list[float] = [getattr(figures, name) for figures in taken]
        return statistics.median(values)

    data = {"empty_mib": median("empty_mib"), "full_mib": median("full_mib")}
    memory = f"host {data['empty_mib']:.1f} to {data['full_mib']:.1f} MiB"
    window = f"in {WINDOW_S:g} s"
    return [
        Row("memory per child", median("child_kib"), "KiB", RSS_AIM, memory, data),
        Row("CPU of the host", median("cpu_percent"), "%", CPU_AIM, window),
        Row("wake-ups of the host", median("switches"), "", SWITCH_AIM, window),
    ]


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    options.add_argument("--children", type=int, default=CHILDREN, metavar="N")
    given = parse(options, argv)
    try:
        rows = rows_of([measure(given.children) for _ in range(given.rounds)])
    except MeasureError as error:
        rows = [Row("idle children", None, "", detail=str(error))]
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
