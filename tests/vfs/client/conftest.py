"""A client of a host of the tests, over a socketpair."""

import socket
from collections.abc import Iterator

import pytest

from tests.vfs.fakehost import FakeHost
from vfs.client import Client


@pytest.fixture
def host() -> Iterator[FakeHost]:
    with FakeHost() as host:
        yield host


@pytest.fixture
def line(host: FakeHost) -> Iterator[socket.socket]:
    with host.connect() as line:
        yield line


@pytest.fixture
def client(line: socket.socket) -> Client:
    return Client((line.fileno(),))
