"""A stage's control socket, and both ways to ask: the client, and byte for byte.

Used by `tests/supervisor/control/`; import the fixture `path` together with
`stage` of `tests.helpers.stage`.
"""

import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from supervisor.control.client import call
from supervisor.control.server import serve_control
from tests.helpers.stage import Stage


@contextlib.asynccontextmanager
async def controlled(stage: Stage, path: str | None = None) -> AsyncIterator[str]:
    """Serve a stage's control socket; gives its path."""
    where = path or str(stage.where / "control")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, stage.host, where)
        yield where
        nursery.cancel_scope.cancel()


@pytest.fixture
async def path(stage: Stage) -> AsyncIterator[str]:
    async with controlled(stage) as path:
        yield path


async def ask(path: str, do: str) -> Any:
    """Ask with the blocking client, in a thread beside the host."""
    return await trio.to_thread.run_sync(call, path, do)


class Line:
    """A connection on which a test says what it wants."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._heard = b""

    async def say(self, data: bytes) -> None:
        """Send bytes."""
        await self.stream.send_all(data)

    async def hear(self) -> Any:
        """Receive one line; None at the end of the stream."""
        while b"\n" not in self._heard:
            try:
                more = await self.stream.receive_some(65_536)
            except trio.BrokenResourceError:  # closed with something of ours unread
                more = b""
            if not more:
                assert not self._heard
                return None
            self._heard += more
        text, _, self._heard = self._heard.partition(b"\n")
        return json.loads(text)

    async def ask(self, data: bytes) -> Any:
        """Send bytes, receive one line."""
        await self.say(data)
        return await self.hear()


@contextlib.asynccontextmanager
async def connected(path: str) -> AsyncIterator[Line]:
    """Connect to a control socket."""
    sock = trio.socket.socket(socket.AF_UNIX)
    await sock.connect(path)
    async with trio.SocketStream(sock) as stream:
        yield Line(stream)
