"""Output moved within the kernel.

Taken from the tool, kept, framed for its reader.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib.linux.pipes import bytes_waiting
from supervisor.toolexec.output.splice import PIPE_BYTES, SPLICED_BYTES, Tap

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """Return a tool's pipe."""
    fds = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.fixture
def tap(ends: tuple[int, int]) -> Iterator[Tap]:
    """Return a tap of it."""
    tap = Tap(ends[0])
    yield tap
    tap.close()
    assert tap.descriptors() == ()


def filled(end: int) -> bytes:
    """Fill a pipe; return with what."""
    data = b""
    try:
        while True:
            piece = os.urandom(PAGE)
            data += piece[: os.write(end, piece)]
    except BlockingIOError:
        return data


def test_a_piece_is_kept_and_sent_framed(
    tap: Tap, ends: tuple[int, int], tmp_path: Path
) -> None:
    read_end, write_end = ends
    data = filled(write_end)
    assert len(data) == PIPE_BYTES
    ours, theirs = socket.socketpair()
    with (tmp_path / "log").open("wb") as log, ours, theirs:
        got = b""
        offset = 0
        while bytes_waiting(read_end):
            size = tap.take(PIPE_BYTES)
            assert tap.set_aside(size, b"<", b">")
            while size:
                kept = tap.keep(log.fileno(), size, offset)
                size, offset = size - kept, offset + kept
            while part := _sent(tap, ours, theirs):
                got += part
        with pytest.raises(BlockingIOError):
            tap.take(1)
    assert (tmp_path / "log").read_bytes() == data
    pieces = [
        data[at : at + SPLICED_BYTES] for at in range(0, len(data), SPLICED_BYTES)
    ]
    assert got == b"".join(b"<" + piece + b">" for piece in pieces)


def _sent(tap: Tap, ours: socket.socket, theirs: socket.socket) -> bytes:
    ours.setblocking(False)
    try:
        size = tap.send(ours, 4096)
    except BlockingIOError:
        return b""
    return theirs.recv(size)


# Rule 1: whoever keeps a piece has not the tool's pipe, so the tool prints meanwhile.
def test_what_is_taken_leaves_its_room_to_the_tool(
    tap: Tap, ends: tuple[int, int]
) -> None:
    read_end, write_end = ends
    data = filled(write_end)
    size = tap.take(PIPE_BYTES)
    assert bytes_waiting(read_end) == len(data) - size
    assert len(filled(write_end)) == size
    assert tap.rest() == data[:size]
    assert tap.rest() == b""


# Rule 2: what a file refuses is not lost.
def test_what_cannot_be_kept_is_still_there(tap: Tap, ends: tuple[int, int]) -> None:
    os.write(ends[1], b"printed")
    assert tap.take(100) == 7
    with Path("/dev/full").open("wb") as full:
        with pytest.raises(OSError, match=r"No space|Invalid") as caught:
            tap.keep(full.fileno(), 7, 0)
    assert caught.value.errno in {errno.ENOSPC, errno.EINVAL}
    assert tap.rest() == b"printed"


def test_the_end_is_told(tap: Tap) -> None:
    with pytest.raises(BlockingIOError):
        tap.take(1)
    fds = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    other = Tap(fds[0])
    os.close(fds[1])
    assert other.take(1) == 0
    other.close()
    os.close(fds[0])


# A user whose share of pipes is used up has small ones: a piece and its frame fit in.
def test_in_small_pipes_a_piece_is_smaller(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETPIPE_SZ:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    tap = Tap(ends[0])
    data = filled(ends[1])
    size = tap.take(SPLICED_BYTES)
    assert 0 < size < len(data)
    assert tap.set_aside(size, b"<", b">")
    tap.empty_aside()
    assert tap.rest() == data[:size]
    tap.close()


# Beyond the share a pipe has two pages (pipe(7)): its frame alone would fill it.
def test_in_pipes_that_hold_nothing_it_is_none(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def smallest(fd: int, command: int, argument: int = 0) -> int:
        least = 2 * PAGE if command == fcntl.F_SETPIPE_SZ else argument
        return real(fd, command, least)

    # Other descriptors of this process are opened and closed meanwhile.
    made: list[tuple[int, int]] = []
    make = os.pipe2

    def noted(flags: int) -> tuple[int, int]:
        pair = make(flags)
        made.extend((fd, os.fstat(fd).st_ino) for fd in pair)
        return pair

    monkeypatch.setattr(fcntl, "fcntl", smallest)
    monkeypatch.setattr(os, "pipe2", noted)
    with pytest.raises(OSError, match="No buffer space"):
        Tap(ends[0])
    assert made
    assert not [fd for fd, inode in made if inode == _inode_of(fd)]


def _inode_of(fd: int) -> int | None:
    """Return what a descriptor is of; None if it is closed."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


def test_without_descriptors_it_holds_none(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pipe2
    made: list[tuple[int, int]] = []

    def lacking(flags: int) -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(real(flags))
        return made[0]

    monkeypatch.setattr(os, "pipe2", lacking)
    with pytest.raises(OSError, match="Too many open files"):
        Tap(ends[0])
    for fd in made[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
