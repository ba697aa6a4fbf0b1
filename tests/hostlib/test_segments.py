"""A stream in files: appended to, rotated, read by offset, on disks with faults."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.segments import Segments, extent, last_lines, read_at
from tests.helpers.command import small_disk


def read_all(directory: Path, offset: int = 0, size: int = 7) -> tuple[bytes, int]:
    """Read piece by piece to the end; return the bytes and how many were missed."""
    data, missed = b"", 0
    while True:
        piece = read_at(str(directory), offset, size)
        if not piece.data:
            return data, missed
        data += piece.data
        missed += piece.missed
        offset = piece.offset + len(piece.data)


@pytest.mark.slow
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=20),
    most=st.integers(1, 50),
    keep=st.integers(0, 3),
)
def test_what_is_kept_is_the_end_of_what_was_appended(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[bytes],
    most: int,
    keep: int,
) -> None:
    where = tmp_path_factory.mktemp("stream") / "log"
    segments = Segments(str(where), most, keep)
    for piece in pieces:
        assert segments.append(piece)
    segments.close()
    said = b"".join(pieces)
    kept, missed = read_all(where)
    assert said.endswith(kept)
    assert missed + len(kept) == len(said) == segments.end
    files = list(where.glob("*")) if where.exists() else []
    assert len(files) <= keep + 1
    assert all(file.stat().st_size <= most for file in files)


def test_an_offset_means_the_same_after_rotation_and_a_new_start(
    tmp_path: Path,
) -> None:
    for number in range(10):
        segments = Segments(str(tmp_path / "log"), 8, 2)
        assert segments.end == number * 6
        assert segments.append(b"line %d" % number)
        segments.close()
    assert read_all(tmp_path / "log", 54) == (b"line 9", 0)


def test_what_rotation_removed_is_told_by_number(tmp_path: Path) -> None:
    segments = Segments(str(tmp_path / "log"), 4, 1)
    segments.append(b"aaaabbbbcccc")
    segments.close()
    assert read_at(str(tmp_path / "log"), 1, 10) == (4, b"bbbb", 3)


@pytest.mark.parametrize(
    ("count", "found"),
    [(0, b""), (1, b"cc"), (2, b"bbb\ncc"), (9, b"a\nbbb\ncc")],
)
def test_the_last_lines_are_found_across_files(
    tmp_path: Path, count: int, found: bytes
) -> None:
    segments = Segments(str(tmp_path / "log"), 3, 9)
    segments.append(b"a\nbbb\ncc")
    segments.close()
    begin = last_lines(str(tmp_path / "log"), count, 1000)
    assert read_all(tmp_path / "log", begin)[0] == found


def test_a_directory_that_vanished_is_made_anew(tmp_path: Path) -> None:
    where = tmp_path / "deep" / "log"
    segments = Segments(str(where), 1000, 1)
    assert segments.append(b"before")
    shutil.rmtree(tmp_path / "deep")
    assert segments.append(b"after")
    segments.close()
    assert read_at(str(where), 6, 100).data == b"after"


def test_a_directory_that_cannot_be_made_costs_bytes_and_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "log").write_text("in the way")
    segments = Segments(str(tmp_path / "log"), 1000, 1)
    assert not segments.append(b"lost")
    assert segments.dropped_bytes == 4
    assert segments.failure is not None
    segments.skip(4)
    (tmp_path / "log").unlink()
    assert segments.append(b"kept")
    segments.close()
    assert not segments.has_vanished
    assert read_at(str(tmp_path / "log"), 0, 10) == (4, b"kept", 4)


@pytest.mark.slow
def test_a_full_disk_costs_bytes_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path, "64k") as point:
        segments = Segments(str(point / "log"), 1 << 20, 0)
        assert not segments.append(b"x" * 100_000)
        assert segments.end + segments.dropped_bytes == 100_000
        for file in (point / "log").iterdir():
            os.truncate(file, 0)
        assert segments.append(b"again")
        segments.close()


def test_skipped_bytes_are_a_gap_and_cost_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where = str(tmp_path / "log")
    segments = Segments(where, 10, 1)
    segments.append(b"aaaa\nb\n")
    with monkeypatch.context() as full:
        full.setattr("os.write", fail)
        for size in (100, 20, 2):
            assert not segments.append(b"x" * size)
            segments.skip(size)
            assert extent(where) == (0, segments.end)
    assert len(os.listdir(where)) == 2
    segments.append(b"cc\ndd")
    segments.close()
    assert read_all(tmp_path / "log") == (b"aaaa\nb\ncc\ndd", 122)
    assert extent(where) == (0, 134)
    assert Segments(where, 10, 1).end == 134
    for count, begin in ((1, 132), (2, 129), (3, 5), (4, 0)):
        assert last_lines(where, count, 1000) == begin
    for until, begin in ((130, 129), (100, 5), (6, 5)):
        assert last_lines(where, 1, 1000, until) == begin


def test_short_files_remove_no_long_ones(tmp_path: Path) -> None:
    segments = Segments(str(tmp_path / "log"), 10, 2)
    segments.append(b"a" * 10)
    for _ in range(5):
        segments.append(b"b")
        segments.skip(1)
    segments.append(b"c" * 10)
    segments.close()
    assert read_all(tmp_path / "log") == (b"a" * 10 + b"b" * 5 + b"c" * 10, 5)


def test_files_that_rotation_removes_meanwhile_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(tmp_path / "log")
    segments, opens = Segments(where, 4, 0), os.open
    segments.append(b"aaaa")

    def open_later(*words: Any, **more: Any) -> int:
        monkeypatch.undo()
        segments.append(b"bbbbcccc")
        return opens(*words, **more)

    monkeypatch.setattr("os.open", open_later)
    assert read_at(where, 1, 10) == (8, b"cccc", 7)
    segments.close()
