"""Opening a path without following links: one contract for two ways."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hostlib.linux import syscalls
from hostlib.linux.syscalls import NOT_THERE, open_exactly, open_step_by_step

WAYS = [open_exactly, open_step_by_step]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["", "file", "directory", "directory/file", "fifo"])
def test_what_is_there_is_opened(
    tmp_path: Path, way: Callable[[bytes], int], name: str, no_leaks: None
) -> None:
    del no_leaks
    (tmp_path / "directory").mkdir()
    for file in ("file", "directory/file"):
        (tmp_path / file).touch()
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / name if name else Path("/")
    fd = way(os.fsencode(path))
    try:
        assert os.path.samestat(os.fstat(fd), path.stat())
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["link", "directory/link", "way/file", "gone", "file/x"]
)
def test_what_a_link_leads_to_is_not_there(
    tmp_path: Path, way: Callable[[bytes], int], name: str, no_leaks: None
) -> None:
    # attack 3: a name that was a directory when it was looked at, and is a link now
    del no_leaks
    (tmp_path / "directory").mkdir()
    for file in ("file", "directory/file"):
        (tmp_path / file).touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "directory" / "link").symlink_to("/")
    (tmp_path / "way").symlink_to("directory")
    with pytest.raises(OSError) as refused:  # noqa: PT011 - the number is what counts
        way(os.fsencode(tmp_path / name))
    assert refused.value.errno in NOT_THERE


@pytest.mark.parametrize("flags", [os.O_DIRECTORY, os.O_DIRECTORY | os.O_NOFOLLOW])
def test_a_directory_is_opened_for_reading_without_openat2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, no_leaks: None
) -> None:
    del no_leaks

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(syscalls, "openat2", refuse)
    (tmp_path / "file").touch()
    fd = open_exactly(os.fsencode(tmp_path), flags=flags)
    try:
        assert os.listdir(fd) == ["file"]
    finally:
        os.close(fd)
