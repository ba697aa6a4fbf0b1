"""Output of children is kept, also by a host without threads or watches."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from hostlib.log import Log
from hostlib.segments import Segments, read_at
from supervisor.kept_children.log_marks import Marks
from supervisor.kept_children.logs import Capture, ChildLog
from tests.helpers.command import small_disk

PATIENCE_S = 60.0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ChildLog]:
    """The log of a child."""
    segments = Segments(str(tmp_path / "log"), 1_000_000, 1)
    marks = Marks(segments.directory, 1_000_000, 1, 0)
    made = ChildLog("one", segments, marks, Log("WARNING"), lambda _size: None)
    yield made
    made.close()


def kept(log: ChildLog) -> bytes:
    """Return what is in a log."""
    return read_at(log.segments.directory, 0, 1_000_000).data


async def until_kept(log: ChildLog, size: int) -> None:
    """Wait until so many bytes are in a log."""
    with trio.fail_after(PATIENCE_S):
        while log.segments.end < size:
            await log.changed.wait()


# attack 18, spec S5
async def test_a_pipe_without_an_epoll_watch_is_looked_at_again(
    log: ChildLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    async def no_watch(_fd: object) -> None:
        nonlocal tries
        tries += 1
        await trio.lowlevel.checkpoint()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ours, theirs = os.pipe()
    async with trio.open_nursery() as nursery:
        with monkeypatch.context() as patched:
            patched.setattr("trio.lowlevel.wait_readable", no_watch)
            nursery.start_soon(Capture(log, ours).run)
            await trio.testing.wait_all_tasks_blocked()
            os.write(theirs, b"a")
            await until_kept(log, 1)
        os.write(theirs, b"b")
        await until_kept(log, 2)
        os.close(theirs)
    assert tries >= 1
    assert kept(log) == b"ab"


# spec S4: it is over when its child is.
async def test_a_pipe_without_an_epoll_watch_is_done_with_at_the_end(
    log: ChildLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_watch(_fd: object) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trio.lowlevel.wait_readable", no_watch)
    ours, theirs = os.pipe()
    capture = Capture(log, ours)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(capture.run)
            await trio.testing.wait_all_tasks_blocked()
            os.write(theirs, b"last words")
            capture.finish()
    assert kept(log) == b"last words"
    assert capture.descriptors() == ()
    os.close(theirs)


# attack 29
async def test_a_piece_for_which_there_is_no_thread_is_kept(
    log: ChildLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("trio.to_thread.run_sync", no_thread)
    await log.take(b"a")
    assert kept(log) == b"a"


async def test_a_log_keeps_its_file_open_and_tells_of_one_that_was_removed(
    log: ChildLog, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await log.take(b"a")
    before = log.segments.descriptors()
    await log.take(b"b")
    assert log.segments.descriptors() == before
    assert len(before) == 1
    for file in (tmp_path / "log").glob("*.log"):
        file.unlink()
    await log.take(b"c")
    assert "The files of the log of one vanished" in capfd.readouterr().err
    assert read_at(log.segments.directory, 0, 10) == (2, b"c", 2)


# Its readers see a gap, and one that has nothing behind it as well.
@pytest.mark.slow
async def test_offsets_count_what_a_full_disk_loses(tmp_path: Path) -> None:
    with small_disk(tmp_path, "64k") as point:
        segments = Segments(f"{point}/log", 1_000_000, 1)
        marks = Marks(segments.directory, 1_000_000, 1, 0)
        log = ChildLog("one", segments, marks, Log("ERROR"), lambda _size: None)
        for _ in range(20):
            await log.take(b"x" * 10_000)
        assert segments.end == 200_000
        first = read_at(segments.directory, 0, 1_000_000)
        assert first.offset == first.missed == 0
        lost = len(first.data)
        assert read_at(segments.directory, lost, 10).data == b""
        for file in (point / "log").glob("*.log"):
            os.truncate(file, min(file.stat().st_size, 4096))
        await log.take(b"again")
        piece = read_at(segments.directory, lost, 10)
        assert piece == (200_000, b"again", 200_000 - lost)
        log.close()
