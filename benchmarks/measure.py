"""How figures are taken: programs on chosen cores, in turn, and robust statistics.

Rules:
1. Two things are compared only by the ratio of runs that stand next to each other: the
   speed of a machine drifts within seconds, so a lone time says nothing.
2. The order within a round alternates (A B, B A, ...), which cancels a steady drift.
3. A program that fails or hangs raises `MeasureError` with what it said.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

REPOSITORY = Path(__file__).parent.parent
TMPFS = Path("/dev/shm")  # noqa: S108 - file systems on disk would add their own noise
TMPFS_FREE_BYTES = 512 << 20  # the file that is read, 64 MiB, and those being written
RUN_TIMEOUT_S = 20.0  # a run takes about a second; one that takes 20 will not end


Result = TypeVar("Result")


class MeasureError(Exception):
    """A figure cannot be taken; the text is one line and says why."""


class AbsentError(MeasureError):
    """A program that stands beside the host is not on this machine."""


@contextmanager
def workplace(where: Path = TMPFS) -> Iterator[Path]:
    """Make a directory, on tmpfs where nothing is said, and remove it at the end.

    Raises:
        MeasureError: it cannot be written to, or is nearly full.
    """
    try:
        free_bytes = shutil.disk_usage(where).free
        place = tempfile.TemporaryDirectory(prefix="bench-", dir=where)
    except OSError as error:
        raise MeasureError(f"cannot use {where}: {error.strerror}") from error
    with place as name:
        if free_bytes < TMPFS_FREE_BYTES:
            raise MeasureError(
                f"cannot use {where}: {free_bytes >> 20} MiB free, "
                f"{TMPFS_FREE_BYTES >> 20} MiB needed"
            )
        yield Path(name)


def one_core() -> set[int]:
    """Return the core for measurements that want both ends on one.

    The second one where there is a choice: interrupts prefer the first.
    """
    allowed = sorted(os.sched_getaffinity(0))
    return {allowed[1] if len(allowed) > 1 else allowed[0]}


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Let what is started inside run on these cores only (they are inherited)."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def clean_environment() -> dict[str, str]:
    """Return this environment without what a host tells its children.

    The measurements may themselves run inside a child of some host.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FSPROXY_", "AIFO_"))
    }


def run(
    argv: Sequence[str],
    cores: Collection[int] | None = None,
    timeout_s: float = RUN_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its successful end and return what it printed.

    Args:
        argv: the program and its arguments.
        cores: the cores for it and all that it starts; None for every core.
        timeout_s: for the whole run.

    Raises:
        MeasureError: it cannot be started, failed, or did not end in time.
    """
    name = " ".join(Path(word).name for word in argv[:2])
    try:
        with on_cores(cores or os.sched_getaffinity(0)):
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                cwd=REPOSITORY,
                env=clean_environment(),
                timeout=timeout_s,
            )
    except subprocess.TimeoutExpired:
        raise MeasureError(f"{name} did not end in {timeout_s:g} s") from None
    except OSError as error:
        raise MeasureError(f"cannot start {name}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or "and said nothing"
        raise MeasureError(f"{name} failed with status {done.returncode}: {said}")
    return done


def in_turn(number: int, contenders: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run one round and return the results in the order of the contenders.

    Args:
        number: of the round, from 0; odd ones run backwards.
        contenders: each takes one figure.
    """
    order = range(len(contenders))
    results = {i: contenders[i]() for i in (reversed(order) if number % 2 else order)}
    return [results[i] for i in order]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: a value that was really seen."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]
