"""A short tool's reply whose client takes a part of it.

The rest comes, and comes once.

Replies of tools that have ended already, by sockets that have room for a few thousand
bytes.
"""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from supervisor.toolexec import connection
from supervisor.toolexec.connection import Connection
from supervisor.toolexec.output.log import OutputLog
from supervisor.toolexec.reply_task import Moment
from supervisor.toolexec.server import Server
from supervisor.toolexec.service import ToolExecState
from supervisor.toolexec.wire import Wire
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Scene, parse, receive, receive_all, send

pytestmark = pytest.mark.slow

LINES = 12_000
OUTPUT = b"".join(b"%d\n" % number for number in range(1, LINES + 1))
SCRIPT = f"seq {LINES}; exit 3"
ROOM_BYTES = 8192


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have little room in sockets, and each tool answered when it has ended already."""
    made = Wire.__init__

    def make(self: Wire, sock: socket.socket, *more: Any) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        made(self, sock, *more)

    async def wait_for_all(self: OutputLog, _: int) -> None:
        while not self.is_finished:
            await self._grown.park()

    monkeypatch.setattr(Wire, "__init__", make)
    monkeypatch.setattr(OutputLog, "wait_beyond", wait_for_all)
    monkeypatch.setattr(connection, "HEAD_WAITS_S", 10.0)


@asynccontextmanager
async def begun(
    scene: Scene,
) -> AsyncIterator[tuple[socket.socket, Server, Connection]]:
    """Run a short tool for a client that has taken nothing yet of what it was sent."""
    coded = SCRIPT.replace(" ", "+").replace(";", "%3b")
    with await scene.connect() as sock:
        request = scene.request(f"tool=sh&arg=-c&arg={coded}".encode())
        await send(sock, request[:9])  # so that it may be cancelled: it has waited
        await trio.testing.wait_all_tasks_blocked()
        await send(sock, request[9:])
        (server,) = (one for one in scene.tool.servers if not one.is_shared)
        await eventually(
            lambda: any(c.moment is Moment.LAST for c in server.connections.values())
        )
        (connection,) = server.connections.values()
        assert 0 < len(connection.wire.unsent) < len(OUTPUT)
        assert len(connection.wire.unsent) > len(OUTPUT) - ROOM_BYTES
        # Nothing else waits for its client (rule 1 of `execution`).
        assert not scene.tool.slots.used
        yield sock, server, connection


def check(data: bytes) -> None:
    """Check that a reply came whole, and once."""
    reply = parse(data)
    assert (reply.status, reply.code, reply.body) == (200, 3, OUTPUT)
    assert data.count(b"HTTP/1.1 ") == data.count(b"X-Exit-Code: ") == 1
    assert data.endswith(b"\r\n0\r\nX-Exit-Code: 3\r\n\r\n")


@pytest.mark.usefixtures("short")
# spec toolexec 5: no byte is ever dropped, whoever reads slowly.
async def test_a_slow_reader_has_the_rest_and_its_trailer(scene: Scene) -> None:
    async with begun(scene) as (sock, server, _):
        assert (await scene.run("tool=true")).status == 200  # others do not wait for it
        data = bytearray()
        while piece := await receive(sock, 777):
            data += piece
            await trio.lowlevel.checkpoint()
        check(bytes(data))
        await eventually(lambda: not server.connections)


@pytest.mark.usefixtures("short")
# Only the socket still has work: its tool has ended, and nothing is to be
# ended with its client.
async def test_a_client_that_goes_before_the_rest_is_forgotten(scene: Scene) -> None:
    async with begun(scene) as (sock, server, _):
        await receive(sock, 100)
        sock.close()
        await eventually(lambda: not server.connections)
    assert [row["code"] for row in scene.stage.events("exec.ended")] == [3]
    assert (await scene.run("tool=true")).status == 200


@pytest.mark.usefixtures("short")
# The next program sends the rest, which has no execution to answer with.
async def test_the_rest_is_sent_by_the_next_program(scene: Scene) -> None:
    async with begun(scene) as (sock, server, connection):
        first = await receive(sock, 1000)
        assert scene.tool.busy() is None
        plain, fds = scene.tool.snapshot(ExitStack())
        (state,) = msgspec.convert(plain, ToolExecState).connections
        assert (state.task, state.received, state.is_refused) == (None, b"", False)
        assert state.unsent == bytes(connection.wire.unsent)
        assert state.fd in fds
        state.fd = os.dup(state.fd)  # as by exec: the program before does nothing more
        connection.scope.cancel()
        await eventually(lambda: not server.connections)
        scene.tool.left = ToolExecState([], [], [state])
        await scene.tool.restore_rest()
        check(first + await receive_all(sock))
        await eventually(lambda: not server.connections)
