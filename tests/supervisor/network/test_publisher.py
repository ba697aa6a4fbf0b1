"""Ports of a child that are reached from the host's 127.0.0.1."""

import hashlib
import random
import socket

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from supervisor.network.child_network import ChildIdentity, ChildNetwork
from supervisor.network.section import NetworkSection
from supervisor.network.settings import settings_from
from tests.supervisor.network.netns import CHILD, Namespace, inner_sockets
from tests.supervisor.network.scene import Scene, echo, is_reset, read_all, reset, scene

SECTION = NetworkSection([], publish=["8000"])


@pytest.fixture
def mock_clock() -> MockClock:
    """Return a clock that runs as usual, and can be put forward."""
    return MockClock(rate=1.0)


async def _open(stage: Scene) -> trio.SocketStream:
    (row,) = stage.figures.published
    assert row.port == 8000
    host, port = row.address.split(":")
    assert host == "127.0.0.1"
    return await trio.open_tcp_stream(host, int(port))


# spec NET10: a published port is the child's 127.0.0.1, then its ::1.
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_a_published_port_is_the_childs(address: str) -> None:
    data = random.Random(3).randbytes(2_000_000)

    async def answer(stream: trio.SocketStream) -> None:
        await stream.send_all(hashlib.sha256(await read_all(stream)).digest())

    async with scene(section=SECTION) as stage:
        stage.serve_in(stage.child.listener(address, 8000), answer)
        async with await _open(stage) as stream:
            await stream.send_all(data)
            await stream.send_eof()
            assert await read_all(stream) == hashlib.sha256(data).digest()
        figures = stage.figures
        assert (figures.bytes_in, figures.bytes_out) == (len(data), 32)
        assert (figures.connections, figures.names) == (1, ())


# spec NET10: where nothing listens the connection is reset.
async def test_a_port_that_nothing_listens_on_is_reset() -> None:
    async with scene(section=SECTION) as stage:
        for _ in range(20):  # the stock is used again
            async with await _open(stage) as stream:
                assert await is_reset(stream)
        assert not stage.events


# spec NET10: a socket of the stock serves one connection after another.
@pytest.mark.parametrize("ends", ["child", "host", "reset"])
async def test_the_stock_is_used_again(ends: str) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(b"hello")
        if ends != "child":
            await is_reset(stream)

    async with scene(section=SECTION) as stage:
        stage.serve_in(stage.child.listener("127.0.0.1", 8000), serve)
        for _ in range(30):
            stream = await _open(stage)
            assert await stream.receive_some(5) == b"hello"
            if ends == "reset":
                await reset(stream)
            elif ends == "child":
                assert await stream.receive_some() == b""
            await stream.aclose()


# spec NET10: connections beyond the stock wait for one to end.
async def test_connections_beyond_the_stock_wait() -> None:
    async with scene(section=SECTION, stock=2) as stage:
        stage.serve_in(stage.child.listener("127.0.0.1", 8000), echo)
        streams = [await _open(stage) for _ in range(4)]
        for stream in streams:
            await stream.send_all(b"x")
        await wait_all_tasks_blocked(0.05)
        assert stage.figures.open == 2
        for stream in streams:
            assert await stream.receive_some() == b"x"
            await stream.aclose()


# spec NET10: what a child has not read is not cut when the other side has ended.
async def test_a_slow_child_gets_all_of_it(mock_clock: MockClock) -> None:
    data = random.Random(4).randbytes(300_000)
    go_on = trio.Event()
    digest = b""

    async def read_late(stream: trio.SocketStream) -> None:
        nonlocal digest
        await stream.send_eof()
        await go_on.wait()
        digest = hashlib.sha256(await read_all(stream)).digest()
        done.set()

    done = trio.Event()
    async with scene(section=SECTION) as stage:
        stage.serve_in(stage.child.listener("127.0.0.1", 8000), read_late)
        async with await _open(stage) as stream:
            await stream.send_all(data)
        await wait_all_tasks_blocked(0.05)
        mock_clock.jump(30)
        await wait_all_tasks_blocked(0.05)
        go_on.set()
        await done.wait()
    assert digest == hashlib.sha256(data).digest()


# spec NET10: a port of the host that is taken is told, and nothing is left of the try.
async def test_a_port_of_the_host_that_is_taken_is_told() -> None:
    async with scene(section=SECTION) as stage:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            keys = NetworkSection([], publish=["8001", f"{port}:8002"])
            other = Namespace(CHILD)
            sockets = inner_sockets(other, ())
            other.close()
            with pytest.raises(OSError, match="already in use") as caught:
                ChildNetwork(
                    ChildIdentity("c2"), settings_from(keys), sockets, stage.outside
                )
            assert caught.value.filename == str(port)
            sockets.close()


# spec NET12: a cut ends what the child has made, and nothing that others have.
async def test_a_cut_leaves_published_connections() -> None:
    async with scene(section=SECTION) as stage:
        stage.serve_in(stage.child.listener("127.0.0.1", 8000), echo)
        async with await _open(stage) as stream:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
            await stage.change(deny=["a.test"], cut=True)
            await stream.send_all(b"y")
            assert await stream.receive_some() == b"y"
