"""The wire: operations per second through FD 3, of those of a minimal C server.

The same client binary talks to the host under test and to `fspeer`, both ends on one
core, the directory on a disk, the host's client in the walls of `auto`, peers in turn,
the figure being the median of the ratios of neighbouring runs. The physical limits (a round trip, a bulk transfer) are taken in
the same run. How and why: `benchmarks/README.md`.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compiler import BUILD, yardstick
from benchmarks.crowd import crowd_command
from benchmarks.hosts import run_command
from benchmarks.measure import MeasureError, in_turn, one_core, run, workplace
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Aim, Report, Row, at_least

NAME = "wire"
METHOD = "ratio to a minimal C server, medians of neighbouring runs"
ROUNDS = 7
TEST_S = 0.3  # short: the machine's speed drifts within seconds
LIMIT_S = 0.2
LIMIT_ROUNDS = 3
READ_FILE_BYTES = 64 << 20

SINGLE = {
    "mix": ("a mix, no line twice", at_least(0.6)),
    "read1": ("READ 1 B", at_least(0.7)),
    "write1": ("WRITE 1 B", None),
    "openclose": ("OPEN+CLOSE", at_least(0.55)),
    "read4k": ("READ 4 KiB", None),
    "read64k": ("READ 64 KiB", None),
    "read1m": ("READ 1 MiB", at_least(1.0)),
    "write1m": ("WRITE 1 MiB", None),
}
WITHOUT_WALLS = {"plain-mix": "mix", "plain-read1": "read1", "plain-write1": "write1"}
"""Without an aim, nor walls, which look at each of the client's system calls."""

PIPES = ("READ 1 B, pipes / C socketpair", None)

CROWD = 16
CROWD_TITLE = f"READ 1 B, {CROWD} clients, sum"
CROWD_AIM = at_least(0.5)
# All clients begin together: this long after the start of the server, warming up until
# then. It holds the start of a Python host and the spawns under the load of the first.
CROWD_LEAD_S = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One run's figure: the sum over its clients, and its latencies."""

    ops_per_s: float
    p50_us: float
    p99_us: float


Taker = Callable[[], Sample]


@dataclass(slots=True)
class Duel:
    """One measure: a peer and a host, taken in turn, until one of them fails."""

    title: str
    aim: Aim | None
    peer: Taker
    host: Taker
    pairs: list[tuple[Sample, Sample]] = field(default_factory=list)
    fault: str = ""

    def play(self, number: int) -> None:
        """Take both figures of a round; after a fault there are no more rounds."""
        if self.fault:
            return
        try:
            peer, host = in_turn(number, [self.peer, self.host])
        except MeasureError as error:
            self.fault = str(error)
        else:
            self.pairs.append((peer, host))

    def row(self) -> Row:
        """Return the median of the ratios, and what it was made of."""
        if self.fault or not self.pairs:
            return Row(self.title, None, "of C", self.aim, self.fault)
        ratios = [host.ops_per_s / peer.ops_per_s for peer, host in self.pairs]
        data = {
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            **_medians("peer", [peer for peer, _ in self.pairs]),
            **_medians("host", [host for _, host in self.pairs]),
        }
        detail = (
            f"{data['host_ops_per_s']:,.0f} / {data['peer_ops_per_s']:,.0f} ops/s, "
            f"p50 {data['host_p50_us']:.1f} / {data['peer_p50_us']:.1f} us, "
            f"ratios {data['ratio_min']:.2f} to {data['ratio_max']:.2f}"
        )
        ratio = statistics.median(ratios)
        return Row(self.title, ratio, "of C", self.aim, detail, data)


def _medians(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    return {
        f"{prefix}_{unit}": statistics.median(
            getattr(sample, unit) for sample in samples
        )
        for unit in ("ops_per_s", "p50_us", "p99_us")
    }


def sample(argv: Sequence[str], cores: Collection[int], clients: int = 1) -> Sample:
    """Run a server with its clients and return the figure of its one test.

    Args:
        argv: the server's command line with the client's in it.
        cores: the cores for all of them.
        clients: how many lines of figures must come.

    Raises:
        MeasureError: the server or a client failed, or printed something else.
    """
    lines = [line.split() for line in run(argv, cores).stdout.splitlines() if line]
    if len(lines) != clients or any(len(words) != 7 for words in lines):
        raise MeasureError(
            f"{Path(argv[0]).name} printed no {clients} line(s) of figures"
        )
    return Sample(
        ops_per_s=sum(float(words[3]) for words in lines),
        p50_us=statistics.median(float(words[5]) for words in lines),
        p99_us=max(float(words[6]) for words in lines),
    )


def client(place: Path, test: str, start_s: float | None = None) -> list[str]:
    """Return the client's command line: a warm-up that prints nothing, then the test.

    Args:
        place: the directory with read.dat.
        test: as in `yardsticks/fsclient.c`.
        start_s: of the test, on CLOCK_MONOTONIC; None: after the warm-up.
    """
    length = f"{TEST_S}" if start_s is None else f"{TEST_S}@{start_s:.3f}"
    return [yardstick("fsclient"), "3", str(place), length, f"~{test},{test}"]


def single(
    sandhost: Path,
    place: Path,
    test: str,
    measure: tuple[str, Aim | None],
    *,
    transport: str = "socketpair",
    sandbox: str = "auto",
) -> Duel:
    """Return a measure (title, aim) of one client, on one core with its server.

    The peer's transport is the socketpair always, and its client has no walls: what
    pipes give and walls take is compared with that.
    """
    core = one_core()
    child = client(place, test)
    peer = [yardstick("fspeer"), "--", *child]
    host = run_command(sandhost, place, child, transport=transport, sandbox=sandbox)
    return Duel(*measure, lambda: sample(peer, core), lambda: sample(host, core))


def many(place: Path) -> Duel:
    """Return the measure of many clients of one server, on all cores."""
    cores = os.sched_getaffinity(0)

    def child() -> list[str]:
        return client(place, "read1", time.monotonic() + CROWD_LEAD_S)

    def peer() -> Sample:
        argv = [yardstick("fspeer"), f"-n{CROWD}", "--", *child()]
        return sample(argv, cores, CROWD)

    def host() -> Sample:
        return sample(crowd_command("run", CROWD, place, child()), cores, CROWD)

    return Duel(CROWD_TITLE, CROWD_AIM, peer, host)


def duels(sandhost: Path, place: Path, transport: str) -> dict[str, Duel]:
    """Return every measure by the name that `--only` knows it by."""
    made: dict[str, Duel] = {}
    if transport != "pipes":
        for test, measure in SINGLE.items():
            made[test] = single(sandhost, place, test, measure)
        made["crowd"] = many(place)
        for name, test in WITHOUT_WALLS.items():
            title, _ = SINGLE[test]
            plain = f"{title}, client without walls", None
            made[name] = single(sandhost, place, test, plain, sandbox="none")
    if transport != "socketpair":
        made["pipes"] = single(sandhost, place, "read1", PIPES, transport="pipes")
    return made


def limits(place: Path) -> list[Row]:
    """Return the physical limits: a bare round trip, and a bare bulk transfer."""
    rows = []
    for transport in ("socketpair", "pipe"):
        argv = [yardstick("pingpong"), transport, str(LIMIT_S)]
        rows.append(limit(f"limit: round trip, {transport}", argv, "us"))
    for transport, method in (
        ("socketpair", "copy"),
        ("socketpair", "sendfile"),
        ("pipe", "splice"),
    ):
        source = str(place / "read.dat")
        argv = [yardstick("bulk"), transport, method, str(LIMIT_S), source]
        rows.append(limit(f"limit: bulk, {transport}, {method}", argv, "MB/s"))
    return rows


def limit(name: str, argv: Sequence[str], unit: str) -> Row:
    """Run a limit's program a few times; its fifth word is the figure."""
    core = one_core()
    try:
        words = [run(argv, core).stdout.split() for _ in range(LIMIT_ROUNDS)]
    except MeasureError as error:
        return Row(name, None, unit, detail=str(error))
    return Row(name, statistics.median(float(line[4]) for line in words), unit)


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(options)
    options.add_argument(
        "--transport",
        choices=["socketpair", "pipes", "both"],
        default="both",
        help="which transports of the host to measure (default both)",
    )
    options.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="TEST[,TEST]",
        help=f"some of: {', '.join([*SINGLE, *WITHOUT_WALLS, 'pipes', 'crowd'])}",
    )
    options.add_argument(
        "--place",
        type=Path,
        default=BUILD,
        metavar="DIR",
        help="where the files lie, on which disk (default: beside the yardsticks)",
    )
    given = parse(options, argv)
    BUILD.mkdir(exist_ok=True)
    with workplace(given.place) as place:
        (place / "read.dat").write_bytes(b"x" * READ_FILE_BYTES)
        made = duels(given.sandhost, place, given.transport)
        only = given.only or list(made)
        if unknown := set(only) - set(made):
            options.error(f"no such test: {', '.join(sorted(unknown))}")
        for number in range(given.rounds):
            for test in only:
                made[test].play(number)
        rows = [made[test].row() for test in only]
        report = Report(NAME, METHOD, given.rounds, [*rows, *limits(place)])
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
