"""Proxies of the host's own that do not do what they are there for (spec NET8)."""

import errno
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from supervisor.network.dialer import MAX_HEAD_BYTES
from supervisor.network.outbound import CONNECT_TIMEOUT_S
from supervisor.network.section import NetworkSection
from tests.supervisor.network.scene import Scene, is_reset, read_all, reset, scene

PROXY = ("10.1.0.9", 8080)
CONNECT = b"CONNECT web.test:22 HTTP/1.1\r\nHost: web.test\r\n\r\n"
Answer = Callable[[trio.SocketStream], Awaitable[None]]


@pytest.fixture
def mock_clock() -> MockClock:
    """Return a clock that runs as usual, and can be put forward."""
    return MockClock(rate=1.0)


def section() -> NetworkSection:
    """Return the network of a child whose host has a proxy."""
    return NetworkSection(["web.test:22"], upstream="http://proxy.corp:8080")


async def end(stream: trio.SocketStream) -> None:
    """End the connection."""
    await stream.send_eof()


async def say_other(stream: trio.SocketStream) -> None:
    """Speak another protocol."""
    await stream.send_all(b"SSH-2.0-x\r\n\r\n")


async def say_much(stream: trio.SocketStream) -> None:
    """Begin a head that is longer than any."""
    await stream.send_all(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * MAX_HEAD_BYTES)


# spec NET8: an answer that is none ends the connection, with the reason.
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, errno.ECONNREFUSED),
        (end, errno.ECONNRESET),
        (reset, errno.ECONNRESET),
        (say_other, errno.EHOSTUNREACH),
        (say_much, errno.EMSGSIZE),
    ],
)
async def test_an_answer_that_is_none_is_told(
    answer: Answer | None, reason: int
) -> None:
    names = {"proxy.corp": [PROXY[0]]}
    async with scene(section=section(), names=names) as stage:
        if answer is not None:
            stage.serve(*PROXY, heard(answer))
        async with await stage.connect("web.test", 22) as stream:
            assert await is_reset(stream)
        assert (await failure(stage)) == errno.errorcode[reason]


# spec NET8: one that says nothing has 30 s; others' connections are made meanwhile.
@pytest.mark.parametrize("is_told", [False, True])
async def test_a_silent_proxy_holds_up_nobody(
    mock_clock: MockClock, *, is_told: bool
) -> None:
    names = {"proxy.corp": [PROXY[0]]}
    async with scene(section=section(), names=names) as stage:
        asked = trio.Event()

        async def say_nothing(stream: trio.SocketStream) -> None:
            asked.set()
            with pytest.raises(trio.BrokenResourceError):
                await read_all(stream)

        stage.serve(*PROXY, heard(say_nothing))
        host, port = ("127.0.0.1", 3128) if is_told else ("web.test", 22)
        async with await stage.connect(host, port) as stream:
            if is_told:
                await stream.send_all(CONNECT)
            await asked.wait()
            await wait_all_tasks_blocked()
            assert not stage.events
            mock_clock.jump(CONNECT_TIMEOUT_S)
            if is_told:
                head, _, body = (await read_all(stream)).partition(b"\r\n\r\n")
                assert head.split()[1] == b"502"
                assert b'"unreachable"' in body
            else:
                assert await is_reset(stream)
        assert (await failure(stage)) == "ETIMEDOUT"


def heard(answer: Answer) -> Answer:
    """Return a handler that reads a request, and answers."""

    async def handle(stream: trio.SocketStream) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await stream.receive_some()
        await answer(stream)

    return handle


async def failure(stage: Scene) -> object:
    """Return why the one name could not be reached."""
    fields = await stage.event("network.failed")
    assert (fields["name"], fields["port"]) == ("web.test", 22)
    return fields["reason"]
