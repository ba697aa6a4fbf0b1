"""Descriptors that end with a block, and directories opened without links."""

import os
from pathlib import Path

import pytest

from hostlib.linux.files import DIRECTORY, closing_fd, open_directory


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_descriptor_is_closed_when_its_block_ends(tmp_path: Path) -> None:
    with closing_fd(os.open(tmp_path, DIRECTORY)) as fd:
        assert _is_open(fd)
    assert not _is_open(fd)


def test_a_descriptor_is_closed_when_its_block_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), closing_fd(os.open(tmp_path, DIRECTORY)) as fd:
        raise KeyError
    assert not _is_open(fd)


def test_an_empty_path_names_the_directory_itself(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with closing_fd(os.open(tmp_path, DIRECTORY)) as top:
        with closing_fd(open_directory(b"", top)) as same:
            assert os.path.sameopenfile(top, same)
        with closing_fd(open_directory(b"in", top)) as inner:
            assert not os.get_inheritable(inner)
            assert os.listdir(inner) == []


def test_no_link_leads_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to("in")
    with closing_fd(os.open(tmp_path, DIRECTORY)) as top:
        with pytest.raises(OSError, match=r"(loop|[Ss]ymbolic|directory)"):
            open_directory(b"link", top)
