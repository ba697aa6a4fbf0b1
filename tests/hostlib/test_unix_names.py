"""Sockets by their names: which of them nothing listens at."""

import errno
import socket
from pathlib import Path

import pytest

from hostlib.unix_names import is_deaf
from tests.helpers.leaks import no_descriptor_left


def test_a_socket_without_a_listener_is_deaf(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    assert not is_deaf(path)
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(path)
        line.listen()
        assert not is_deaf(path)
    assert is_deaf(path)


def test_without_a_descriptor_no_socket_is_taken_for_a_living_one(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(path)
    with no_descriptor_left(), pytest.raises(OSError, match="Too many") as why:
        is_deaf(path)
    assert why.value.errno == errno.EMFILE
