"""Connections to port 443: the name in the ClientHello, before dialling."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.supervisor.network.hellos import (
    body,
    client_hello,
    extension,
    message,
    record,
    server_name,
    vector,
)
from tests.supervisor.network.scene import Scene, echo, is_reset, scene

NAMES = {name: ["203.0.113.5"] for name in ("web.test", "a.web.test", "b.web.test")}


@pytest.fixture
def mock_clock() -> MockClock:
    """Return a clock that runs as usual, and can be put forward."""
    return MockClock(rate=1.0)


async def _is_echoed(stream: trio.SocketStream, data: bytes, size: int = 65536) -> bool:
    """Send bytes in pieces; tell whether the same ones come back."""
    for at in range(0, len(data), size):
        await stream.send_all(data[at : at + size])
        await wait_all_tasks_blocked()
    got = b""
    while len(got) < len(data):
        got += await stream.receive_some()
    return got == data


# spec NET7: the ClientHello is read over any segments and records, and then sent on.
# attack 59
@pytest.mark.parametrize("size", [1, 7, 100, 65536])
@pytest.mark.parametrize("legacy", [True, False])
async def test_a_hello_for_the_name_is_sent_on(size: int, *, legacy: bool) -> None:
    hello = client_hello("web.test", legacy=legacy)
    async with scene("web.test", names=NAMES) as stage:
        stage.serve("203.0.113.5", 443, echo)
        async with await stage.connect("web.test", 443) as stream:
            assert await _is_echoed(stream, hello, size)
            assert await _is_echoed(stream, b"and then more")
        assert stage.figures.bytes_out == len(hello) + 13
        assert not stage.events


async def _refused(stage: Scene, host: str, data: bytes) -> list[tuple[object, ...]]:
    """Return what is told of a connection that begins with some bytes."""
    accepted = stage.serve("203.0.113.5", 443, echo)
    async with await stage.connect(host, 443) as stream:
        await stream.send_all(data)
        assert await is_reset(stream)
    assert not accepted
    assert not stage.names.asked
    return stage.told()


# spec NET7: none, another, two, or what is no ClientHello is refused.
# attack 59
@pytest.mark.parametrize(
    ("data", "reason", "rule"),
    [
        (client_hello("evil.test"), "tls-other-name", "evil.test:443"),
        (client_hello("a.web.test"), "tls-other-name", "a.web.test:443"),
        (client_hello(None), "tls-no-sni", None),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "tls-no-hello", None),
        (b"GET / HTTP/1.1\r\nHost: web.test\r\n\r\n", "tls-no-hello", None),
        (record(b"\1\xff\xff\xff" + bytes(16_000)) * 5, "tls-no-hello", None),
    ],
    ids=["other", "below", "none", "ssh", "http", "long"],
)
async def test_what_is_no_hello_for_the_name_is_refused(
    data: bytes, reason: str, rule: str | None
) -> None:
    async with scene("web.test", names=NAMES) as stage:
        assert await _refused(stage, "web.test", data) == [
            ("web.test", 443, reason, rule)
        ]


# spec NET7: of an encrypted ClientHello the outer name is judged; the inner one is read by
# none but the granted name's server.
# attack 59
@pytest.mark.parametrize(
    ("outer", "reason"), [("web.test", None), ("evil.test", "tls-other-name")]
)
async def test_an_encrypted_hello_is_judged_by_its_outer_name(
    outer: str, reason: str | None
) -> None:
    sealed = b"\0" + b"\0\1\0\1" + b"\7" + vector(2, bytes(32)) + vector(2, bytes(200))
    ech = extension(0xFE0D, sealed)
    hello = record(message(body(server_name(outer.encode()), ech)))
    async with scene("web.test", names=NAMES) as stage:
        if reason is not None:
            told = await _refused(stage, "web.test", hello)
            assert [row[2] for row in told] == [reason]
            return
        stage.serve("203.0.113.5", 443, echo)
        async with await stage.connect("web.test", 443) as stream:
            assert await _is_echoed(stream, hello)


# spec NET7: a name that the same rule covers will do, unless another rule refuses it.
async def test_a_name_of_the_same_rule_will_do() -> None:
    async with scene("*.web.test", "!b.web.test", names=NAMES) as stage:
        stage.serve("203.0.113.5", 443, echo)
        async with await stage.connect("a.web.test", 443) as stream:
            assert await _is_echoed(stream, client_hello("c.web.test"))
        async with await stage.connect("a.web.test", 443) as stream:
            await stream.send_all(client_hello("b.web.test"))
            assert await is_reset(stream)
        assert stage.told() == [("a.web.test", 443, "refused-by-rule", "!b.web.test")]


# spec NET7: a ClientHello takes 10 s at most, a byte now and then or not.
async def test_a_hello_that_does_not_come_is_refused(mock_clock: MockClock) -> None:
    async with scene("web.test", names=NAMES) as stage:
        async with await stage.connect("web.test", 443) as stream:
            for byte in client_hello("web.test")[:4]:
                await stream.send_all(bytes([byte]))
                await wait_all_tasks_blocked()
                mock_clock.jump(2.6)
            assert await is_reset(stream)
        assert stage.told() == [("web.test", 443, "tls-no-hello", None)]


# spec NET7: a child that leaves early is no news.
async def test_a_child_that_resets_within_its_hello_is_not_told() -> None:
    async with scene("web.test", names=NAMES) as stage:
        stream = await stage.connect("web.test", 443)
        await stream.send_all(client_hello("web.test")[:20])
        stream.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER
        await stream.aclose()
        await wait_all_tasks_blocked(0.01)
        assert not stage.events
        words = [word for _, word in stage.network.descriptors()]
        assert "connection of a child" not in words


# spec NET7: ssh on 443 needs `tls=any`; `tls=sni` holds on other ports.
async def test_options_say_where_a_hello_is_read() -> None:
    rules = ("web.test:443@tls=any", "a.web.test:8443@tls=sni")
    async with scene(*rules, names=NAMES) as stage:
        stage.serve("203.0.113.5", 443, echo)
        stage.serve("203.0.113.5", 8443, echo)
        async with await stage.connect("web.test", 443) as stream:
            assert await _is_echoed(stream, b"SSH-2.0-x\r\n")
        async with await stage.connect("a.web.test", 8443) as stream:
            assert await _is_echoed(stream, client_hello("a.web.test"))
        async with await stage.connect("a.web.test", 8443) as stream:
            await stream.send_all(b"SSH-2.0-x\r\n")
            assert await is_reset(stream)
        assert [row[2] for row in stage.told()] == ["tls-no-hello"]
