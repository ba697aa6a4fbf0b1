"""Start times of the `fs` commands, `sandhost run` and a child's client library.

Each is compared with what it cannot be faster than: a bare interpreter, the imports
that the host needs. Wall time from spawn to exit, in turn.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import alternate
from benchmarks.hosts import run_command
from benchmarks.measure import MeasureError, run, workplace
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Aim, Report, Row, at_most

NAME = "startup"
METHOD = "wall time from spawn to exit, medians of neighbouring runs"
ROUNDS = 15
BARE = [sys.executable, "-I", "-c", "pass"]
IMPORTS = [sys.executable, "-c", "import trio, msgspec, click"]
FS_AIM = at_most(2.5)
RUN_AIM = at_most(1.5)
CLIENT_AIM = at_most(15.0)


def fs_rows(sandhost: Path, rounds: int) -> list[Row]:
    """Time `fs` commands inside a restricted child, where they are at home."""
    fs = [str(sandhost), "fs"]
    commands = [[*fs, "stat", "note.txt"], [*fs, "cat", "note.txt"], BARE]
    with workplace() as place:
        (place / "note.txt").write_text("a small file\n", encoding="utf-8")
        timer = [sys.executable, "-I", "-S", alternate.__file__]
        child = [*timer, str(rounds), json.dumps(commands)]
        printed = run(run_command(sandhost, place, child, top_level=False)).stdout
    try:
        stat_ms, cat_ms, bare_ms = json.loads(printed)
    except ValueError:
        raise MeasureError(f"the child printed no figures: {printed[:80]!r}") from None
    return [
        compared("sandhost fs stat / bare python -I", stat_ms, bare_ms, FS_AIM),
        compared("sandhost fs cat / bare python -I", cat_ms, bare_ms, FS_AIM),
    ]


def run_rows(sandhost: Path, rounds: int) -> list[Row]:
    """Time a whole `sandhost run` of a child that does nothing."""
    with workplace() as place:
        command = run_command(sandhost, place, ["/bin/true"], top_level=False)
        try:
            run_ms, imports_ms = alternate.alternate(rounds, [command, IMPORTS])
        except (RuntimeError, OSError) as error:
            raise MeasureError(str(error)) from error
    return [compared("sandhost run -- true / its imports", run_ms, imports_ms, RUN_AIM)]


def client_rows(_: Path, rounds: int) -> list[Row]:
    """Add up what importing the blocking client costs a child."""
    argv = [sys.executable, "-X", "importtime", "-c", "import vfs.client"]
    times_ms = [import_time_ms(run(argv).stderr, "vfs") for _ in range(rounds)]
    median_ms = statistics.median(times_ms)
    data = {"min_ms": min(times_ms), "max_ms": max(times_ms)}
    detail = f"{data['min_ms']:.1f} to {data['max_ms']:.1f}"
    return [Row("import vfs.client", median_ms, "ms", CLIENT_AIM, detail, data)]


def import_time_ms(report: str, package: str) -> float:
    """Add up the cumulative times of a package's outermost imports.

    Args:
        report: the output of `python -X importtime`: "import time: SELF | CUMULATIVE |
            NAME", in us, a nested import being indented deeper than its cause.
        package: its own root and modules count, each with all that they import.

    Raises:
        MeasureError: the package is not in the report.
    """
    times_us = []
    for line in report.splitlines():
        _, cumulative, name = line.rpartition("import time:")[2].split("|")
        outermost = not name.startswith("  ")
        if outermost and name.strip().partition(".")[0] == package:
            times_us.append(int(cumulative))
    if not times_us:
        raise MeasureError(f"no import of {package} was reported")
    return sum(times_us) / 1000


def compared(
    name: str, tried_ms: Sequence[float], floor_ms: Sequence[float], aim: Aim
) -> Row:
    """Return the median of the ratios of neighbouring runs."""
    pairs = zip(tried_ms, floor_ms, strict=True)
    data = {
        "tried_ms": statistics.median(tried_ms),
        "floor_ms": statistics.median(floor_ms),
    }
    detail = f"{data['tried_ms']:.1f} / {data['floor_ms']:.1f} ms"
    ratio = statistics.median(tried / floor for tried, floor in pairs)
    return Row(name, ratio, "x", aim, detail, data)


PARTS: dict[str, Callable[[Path, int], list[Row]]] = {
    "sandhost fs": fs_rows,
    "sandhost run": run_rows,
    "import vfs.client": client_rows,
}


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    options = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(options)
    given = parse(options, argv)
    rows: list[Row] = []
    for name, part in PARTS.items():
        try:
            rows += part(given.sandhost, given.rounds)
        except MeasureError as error:
            rows.append(Row(name, None, "", detail=str(error)))
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
