"""A child's own library: fd_call and fd_put, blocking and in Trio."""

import os
from collections.abc import Iterator

import pytest

from hostlib.threads import in_thread
from supervisor.llmfd import Store
from supervisor.llmfd.service import FdService
from tests.helpers.sessions import Hall, Line, hall
from vfs.client import Client, FsProxyError
from vfs.client.aio import AsyncClient

__all__ = ["hall"]


@pytest.fixture
def line(hall: Hall) -> Iterator[Line]:
    """A client of a host with LLM fds and a small cap on what comes at once."""
    made = hall.connect(max_write_bytes=10_000)
    service = made.session.services.fds = FdService(hall.fs, Store())
    yield made
    service.close()


TEXT = "".join(f"line {n}\n" for n in range(5000))


async def test_the_trio_client(line: Line) -> None:
    async with AsyncClient((os.dup(line.reader),), shared=False) as client:
        token = await client.fd_put(TEXT.encode())
        assert await client.fd_put(b"end", token) == token
        answer = await client.fd_call("wrap_output", token=token, source="tool:x")
        assert answer.startswith('<fd_result fd="fd:1"')
        last = await client.fd_call("read_fd", fd="fd:1", start_line=5001)
        assert "\nend\n" in last
        with pytest.raises(FsProxyError, match="invalid token: t9"):
            await client.fd_put(b"x", "t9")
        with pytest.raises(FsProxyError, match="unknown name: close_fd"):
            await client.fd_call("close_fd", fd="fd:1")


async def test_the_blocking_client(line: Line) -> None:
    def work() -> str:
        os.set_blocking(line.reader, True)
        client = Client((os.dup(line.reader),), shared=False)
        with client:
            token = client.fd_put(TEXT.encode())
            assert client.fd_put(b"end", token) == token
            client.fd_call("wrap_output", token=token)
            return client.fd_call("read_fd", fd="fd:1", start_line=5001)

    assert "\nend\n" in await in_thread(work)
    os.set_blocking(line.reader, False)
