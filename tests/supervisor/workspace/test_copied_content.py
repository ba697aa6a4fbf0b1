"""Content of a commit: by reference if possible, else data, with holes (WS12)."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.workspace import linux
from supervisor.workspace.linux import copy_content

BLOCK = 64 * 1024
HOLE = 4 * 1024 * 1024


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Return a file with data, a hole and data, and an empty one."""
    source = os.open(tmp_path / "source", os.O_RDWR | os.O_CREAT)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    os.pwrite(source, b"a" * BLOCK, 0)
    os.pwrite(source, b"b" * BLOCK, HOLE)
    yield source, target
    os.close(source)
    os.close(target)


def content(fd: int) -> bytes:
    """Return all of a file."""
    return os.pread(fd, os.fstat(fd).st_size, 0)


# spec WS12
def test_a_reference_is_asked_for_first_and_no_data_is_copied(
    files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = files
    asked: list[tuple[int, int, int]] = []

    def clone(to: int, request: int, of: int) -> int:
        asked.append((to, request, of))
        return 0

    monkeypatch.setattr("supervisor.workspace.linux.fcntl.ioctl", clone)
    copy_content(source, target)
    assert asked == [(target, 0x40049409, source)]  # FICLONE: ioctl_ficlone(2)
    assert os.fstat(target).st_size == 0  # this one made none, and nothing was copied


# spec WS12
@pytest.mark.parametrize("number", sorted(linux.NO_REFLINK))
def test_without_references_data_is_copied_and_a_hole_stays_one(
    files: tuple[int, int], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source, target = files

    def refuse(*_: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("supervisor.workspace.linux.fcntl.ioctl", refuse)
    copy_content(source, target)
    assert content(target) == content(source)
    assert os.fstat(target).st_blocks * 512 < HOLE


# spec WS12
def test_another_error_than_that_is_told(
    files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("supervisor.workspace.linux.fcntl.ioctl", fail)
    with pytest.raises(OSError, match="Input/output error"):
        copy_content(*files)


# spec WS12: a real file system that can, where the tests lie on one.
def test_a_file_system_with_references_shares_the_data(files: tuple[int, int]) -> None:
    source, target = files
    try:
        fcntl.ioctl(target, linux.FICLONE, source)
    except OSError as why:
        pytest.skip(f"{why.strerror}: TMPDIR is on no btrfs, XFS or bcachefs")
    os.ftruncate(target, 0)
    before = os.statvfs(f"/proc/self/fd/{target}").f_bfree
    copy_content(source, target)
    os.fsync(target)
    after = os.statvfs(f"/proc/self/fd/{target}").f_bfree
    assert content(target) == content(source)
    assert before - after < BLOCK // os.statvfs(f"/proc/self/fd/{target}").f_frsize
