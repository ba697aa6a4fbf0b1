"""Counts of the hot path: requests, errors, bytes, and the times of a few."""

from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from protocol import COMMANDS
from protocol.messages import Read
from supervisor.fsproxy.counts import BOUNDS_S, NAMES, SAMPLE_TURNS, Histogram
from supervisor.fsproxy.dispatch import HANDLERS
from tests.helpers.sessions import Hall, Line, hall
from tests.helpers.stage import eventually

__all__ = ["hall"]


def requests(line: Line) -> dict[str, int]:
    """The counts, without those of requests not made."""
    counts = line.session.counts.requests
    return {name: counts[kind] for kind, name in NAMES.items() if counts[kind]}


def errors(line: Line) -> dict[str, int]:
    """Likewise of errors."""
    counts = line.session.counts.errors
    return {name: counts[kind] for kind, name in NAMES.items() if counts[kind]}


def test_every_request_has_a_name_of_its_own() -> None:
    assert set(NAMES) == set(HANDLERS)
    assert len(set(NAMES.values())) == len(NAMES)
    assert set(NAMES.values()) == {w.decode() for w in COMMANDS} | {"invalid"}


async def test_each_request_is_counted_once_under_its_name(hall: Hall) -> None:
    (hall.root / "a").write_bytes(b"x" * 100)
    line = hall.connect()
    fileno = await line.open(b"a")
    for _ in range(10):
        await line.read(fileno, 3)
    await line.ask(b"CLOSE %d\n" % fileno)
    await line.ask(b"PING\n")
    await line.ask(b"NONSENSE\n")
    assert requests(line) == {
        "OPEN": 1, "READ": 10, "CLOSE": 1, "PING": 1, "invalid": 1,
    }  # fmt: skip
    assert errors(line) == {"invalid": 1}
    assert line.session.errors == 1
    assert line.session.last_error.startswith(b"ERROR ")


async def test_writes_are_counted_once_whole_or_in_pieces(hall: Hall) -> None:
    line = hall.connect()
    fileno = await line.open(b"a", b"w")
    for _ in range(5):
        assert await line.write(fileno, b"abc") == b"OK 3"
    await line.send(b"WRITE %d 100000\n" % fileno)
    await line.send(b"y" * 100_000)
    assert await line.line() == b"OK 100000"
    assert requests(line) == {"OPEN": 1, "WRITE": 6}


async def test_bytes_are_counted_in_both_directions(hall: Hall) -> None:
    size = 300_000
    (hall.root / "a").write_bytes(b"x" * size)
    line = hall.connect()
    fileno = await line.open(b"a")
    sent = [b"OPEN a r false\n", *[b"READ %d 10\n" % fileno] * 5]
    sent.append(b"READ %d %d\n" % (fileno, size - 50))
    for _ in range(5):
        await line.read(fileno, 10)
    await line.read(fileno, size - 50)
    got = len(b"OK %d\n" % fileno) + 5 * len(b"OK 10\n") + 50
    got += len(b"OK %d\n" % (size - 50))
    assert line.session.bytes_in == sum(map(len, sent))
    assert line.session.bytes_out == got + size - 50


async def test_an_error_of_a_job_is_counted_for_its_command(hall: Hall) -> None:
    line = hall.connect()
    assert (await line.ask(b"REMOVE false absent\n")).startswith(b"ERROR ")
    assert errors(line) == {"REMOVE": 1}
    await eventually(lambda: line.session.counts.jobs)
    ((kind, times),) = line.session.counts.jobs.items()
    assert (NAMES[kind], times.total) == ("REMOVE", 1)


async def test_one_request_of_a_turn_in_64_is_timed(hall: Hall) -> None:
    (hall.root / "a").write_bytes(b"x" * 10_000)
    line = hall.connect()
    fileno = await line.open(b"a")
    counts = line.session.counts
    for _ in range(20 * SAMPLE_TURNS):
        await line.read(fileno, 1)
        await trio.lowlevel.checkpoint()
        if counts.inline:
            break
    assert [NAMES[kind] for kind in counts.inline] == ["READ"]
    assert counts.inline[Read].total < requests(line)["READ"]
    assert 0 < counts.inline[Read].sum_s < 5


@pytest.mark.slow
@given(st.lists(st.floats(0, 100, allow_nan=False)))
def test_a_histogram_cumulates_to_all_that_it_was_given(times: list[float]) -> None:
    histogram = Histogram()
    for time_s in times:
        histogram.add(time_s)
    steps = list(histogram.accumulate())
    assert steps[-1] == ("+Inf", len(times))
    for bound_s, (text, count) in zip(BOUNDS_S, steps, strict=False):
        assert float(text) == bound_s
        assert count == sum(time_s <= bound_s for time_s in times)
    assert histogram.sum_s == pytest.approx(sum(times))


async def test_a_client_that_died_counts_what_is_done_for_it(
    hall: Hall, tmp_path: Path
) -> None:
    del tmp_path
    line = hall.connect()
    fileno = await line.open(b"a", b"w")
    await line.send(b"WRITE %d 3\nabc" % fileno)
    line.close()
    await line.gone()
    assert requests(line)["WRITE"] == 1
    assert line.session.bytes_in >= len(b"OPEN a w false\nWRITE 1000 3\nabc")
