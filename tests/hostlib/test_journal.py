"""The journal on a full disk: whole lines before and after, and lost events."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostlib.journal import Journal, SegmentJournal, open_journal
from hostlib.segments import Segments


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Let no file become longer: the write that reaches the bound is a short one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=["file", "segments"])
def kept(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Journal, Path, list[str]]]:
    """A journal, the file that it writes, and what it complains of."""
    said: list[str] = []
    path = tmp_path / "journal"
    if request.param == "segments":
        path /= f"{0:020}.log"
    journal = opened(path, said)
    yield journal, path, said
    journal.close()


def opened(path: Path, said: list[str]) -> Journal:
    """Open a journal, as a host does that begins or goes on."""
    if path.suffix:
        segments = Segments(os.fspath(path.parent), 1 << 20, 1)
        return SegmentJournal(segments, said.append)
    return open_journal(os.fspath(path), said.append)


# attack 49: a child that may write there puts a link in its place.
def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept\n")
    (tmp_path / "journal").symlink_to("victim")
    (tmp_path / "to-be-made").symlink_to("made")
    for name in ("journal", "to-be-made"):
        with pytest.raises(OSError, match="is a link, which a child may have put"):
            open_journal(os.fspath(tmp_path / name), pytest.fail)
    assert (tmp_path / "victim").read_text() == "kept\n"
    assert not (tmp_path / "made").exists()


# attack 49: likewise in place of a file of the daemon's journal, or of a child's log.
def test_a_link_in_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / f"{0:020}.log").symlink_to("../victim")
    segments = Segments(os.fspath(tmp_path / "kept"), 1 << 20, 1)
    assert not segments.append(b"text\n")
    assert (tmp_path / "victim").read_text() == ""


# The kernel's links lead to what the host has open already.
@pytest.mark.parametrize("beneath", ["/dev/fd", "/proc/self/fd"])
def test_a_descriptor_can_be_named(tmp_path: Path, beneath: str) -> None:
    with (tmp_path / "there").open("wb") as file:
        journal = open_journal(f"{beneath}/{file.fileno()}", pytest.fail)
        journal.write("said")
        journal.close()
    assert json.loads((tmp_path / "there").read_bytes())["event"] == "said"


# A full disk costs events, and no other line.
@pytest.mark.parametrize("room", [0, 1, 50])
def test_a_line_that_was_cut_off_is_a_line_of_its_own(
    kept: tuple[Journal, Path, list[str]], room: int
) -> None:
    journal, path, said = kept
    journal.write("before", number=1)
    whole = path.stat().st_size
    with full_at(whole + room):
        journal.write("cut", number=2)
        journal.write("cut", number=3)
    assert path.stat().st_size == whole + room
    assert journal.lost == 2
    assert len(said) == 1
    for number in (4, 5):
        journal.write("after", number=number)
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    found = [json.loads(line)["number"] for line in lines if line.endswith(b"}")]
    assert found == [1, 4, 5]
    assert len(lines) == 3 + bool(room)
    assert journal.lost == 2


def test_with_room_for_the_end_of_a_line_only_nothing_is_torn(
    kept: tuple[Journal, Path, list[str]],
) -> None:
    journal, path, _ = kept
    journal.write("before", number=1)
    whole = path.stat().st_size
    with full_at(whole + 10):
        journal.write("cut", number=2)
    with full_at(whole + 11):
        journal.write("cut", number=3)
    journal.write("after", number=4)
    lines = path.read_bytes().split(b"\n")
    assert [json.loads(line)["number"] for line in (lines[0], lines[2])] == [1, 4]
    assert (len(lines[1]), lines[3:], journal.lost) == (10, [b""], 2)


# The file is opened next by the next program of the host, or by a later host.
@pytest.mark.parametrize("room", [0, 1, 50])
def test_a_line_that_the_program_before_had_cut_off_is_one_of_its_own(
    kept: tuple[Journal, Path, list[str]], room: int
) -> None:
    before, path, said = kept
    before.write("before", number=1)
    whole = path.stat().st_size
    with full_at(whole + room):
        before.write("cut", number=2)
        opened(path, said).close()
        after = opened(path, said)
        after.write("cut", number=3)
    for number in (4, 5):
        after.write("after", number=number)
    after.close()
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    found = [json.loads(line)["number"] for line in lines if line.endswith(b"}")]
    assert found == [1, 4, 5]
    assert len(lines) == 3 + bool(room)


def test_a_journal_that_may_only_be_written_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"{}\n")
    path.chmod(0o200)
    journal = open_journal(os.fspath(path), pytest.fail)
    journal.write("after")
    journal.close()
    path.chmod(0o600)
    assert len(path.read_bytes().splitlines()) == 2
