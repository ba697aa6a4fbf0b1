"""Marks of any part of a log, in any state of their files."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.kept_children import log_marks
from supervisor.kept_children.log_marks import (
    DIRECTORY,
    ERR,
    OUT,
    Mark,
    Marks,
    offset_since,
)
from supervisor.kept_children.log_marks import marks_between as between


class Clock:
    """Stands for `time`, and is turned by a test."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.step_s = 1.0

    def time(self) -> float:
        """Tell what it shows, and go on by a step."""
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(log_marks, "time", clock)
    return clock


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    begin=st.integers(0, 900),
    length=st.integers(1, 900),
)
def test_a_part_has_the_mark_that_covers_it_and_those_within(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], begin: int, length: int
) -> None:
    where = str(tmp_path_factory.mktemp("log"))
    marks, all_of_them, at = Marks(where, 200, 1000, 0), [], 0
    for number, size in enumerate(sizes):
        stream = (OUT, ERR)[number % 2]
        marks.add(at, stream, begins=number % 5 == 0)
        all_of_them.append((at, stream, number % 5 == 0))
        at += size
    marks.close()
    end = begin + length
    # Of marks in the same place the last counts, if it is the one that covers the beginning.
    before = [mark for mark in all_of_them if mark[0] <= begin][-1:]
    wanted = before + [mark for mark in all_of_them if begin < mark[0] < end]
    assert [
        (m.offset, m.stream, m.begins) for m in between(where, begin, end)
    ] == wanted


def test_what_comes_at_once_by_the_same_stream_shares_a_mark(
    tmp_path: Path, clock: Clock
) -> None:
    clock.step_s = 0.0
    marks = Marks(str(tmp_path), 1000, 1, 0)
    for offset, stream, begins in (
        (0, OUT, True),
        (1, OUT, False),
        (2, ERR, False),
        (3, ERR, True),
    ):
        marks.add(offset, stream, begins=begins)
    marks.close()
    found = [(m.offset, m.stream, m.begins) for m in between(str(tmp_path), 0, 9)]
    assert (1, OUT, False) not in found
    assert found == [(0, OUT, True), (2, ERR, False), (3, ERR, True)]


def test_what_came_since_a_time_is_found(tmp_path: Path, clock: Clock) -> None:
    where = str(tmp_path)
    assert offset_since(where, 0.0) is None
    marks = Marks(where, 80, 1000, 0)
    for number in range(20):
        marks.add(number * 10, OUT, begins=False)  # at 1001 s and so on
    marks.close()
    assert offset_since(where, 0.0) == 0
    assert offset_since(where, 1001.0) == 0
    assert offset_since(where, 1001.5) == 10
    assert offset_since(where, 1020.0) == 190
    assert offset_since(where, 1020.5) is None


# A full disk, or a crash, cuts a record off.
@pytest.mark.parametrize("size", [1, 20, 39, 41, 79])
def test_a_torn_record_is_passed_over(tmp_path: Path, clock: Clock, size: int) -> None:
    where = str(tmp_path)
    marks = Marks(where, 10_000, 1, 0)
    marks.add(0, OUT, begins=True)
    marks.add(5, ERR, begins=False)
    marks.close()
    (file,) = (tmp_path / DIRECTORY).iterdir()
    file.write_bytes(file.read_bytes()[:size])
    marks = Marks(where, 10_000, 1, 7)
    marks.add(7, ERR, begins=False)
    marks.add(9, OUT, begins=False)
    marks.close()
    wanted = [Mark(7, 1003.0, ERR, False), Mark(9, 1004.0, OUT, False)]
    assert between(where, 7, 20) == wanted
    assert offset_since(where, 1003.0) == 7


def test_marks_of_a_log_that_somebody_removed_are_not_taken_for_the_next(
    tmp_path: Path, clock: Clock
) -> None:
    where = str(tmp_path)
    marks = Marks(where, 10_000, 1, 0)
    marks.add(500, OUT, begins=True)
    marks.close()
    marks = Marks(where, 10_000, 1, 0)  # `rm NAME/*` left them
    marks.add(0, ERR, begins=True)
    marks.close()
    assert between(where, 0, 1000) == [Mark(0, 1002.0, ERR, True)]


def test_a_log_without_marks_has_none(tmp_path: Path) -> None:
    assert between(str(tmp_path), 0, 10) == []
    shutil.rmtree(tmp_path)
    assert between(str(tmp_path), 0, 10) == []
