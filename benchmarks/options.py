"""The options that every measuring program takes."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parser(name: str, summary: str, *, rounds: int) -> argparse.ArgumentParser:
    """Return the parser of one program, with the common options in it.

    Args:
        name: the program, as in `python -m benchmarks NAME`.
        summary: a summary for `--help`.
        rounds: how often each figure is taken unless `--rounds` says otherwise.
    """
    made = argparse.ArgumentParser(f"python -m benchmarks {name}", description=summary)
    made.add_argument(
        "--rounds",
        type=_count,
        default=rounds,
        metavar="N",
        help=f"how often each figure is taken (default {rounds})",
    )
    made.add_argument(
        "--save", action="store_true", help=f"write benchmarks/results/{name}.json"
    )
    made.add_argument(
        "--strict", action="store_true", help="exit with 1 if an aim is not reached"
    )
    return made


def add_sandhost(made: argparse.ArgumentParser) -> None:
    """Add the option that names the command under test."""
    beside = Path(sys.executable).parent / "sandhost"
    made.add_argument(
        "--sandhost",
        type=Path,
        default=beside,
        metavar="FILE",
        help="the command under test (default: the one beside this interpreter)",
    )


def parse(made: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse, and refuse to save what is not the whole measurement.

    Exits with 2 and a message on a bad option, as argparse does.
    """
    given = made.parse_args(argv)
    if given.save and getattr(given, "only", None):
        made.error("--save keeps whole results: leave --only out")
    return given


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value
