"""The proxy on 127.0.0.1:3128 of a child: HTTP and SOCKS5 over real sockets."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from supervisor.network.section import NetworkSection
from tests.supervisor.network.hellos import client_hello
from tests.supervisor.network.scene import Scene, echo, is_reset, read_all, scene

NAMES = {"web.test": ["203.0.113.5"], "priv.test": ["10.1.0.5"]}
OK = b"HTTP/1.1 200 Connection established\r\n\r\n"


@pytest.fixture
def mock_clock() -> MockClock:
    """Return a clock that runs as usual, and can be put forward."""
    return MockClock(rate=1.0)


async def _open(stage: Scene) -> trio.SocketStream:
    return await stage.connect("127.0.0.1", 3128)


def _connect(target: str) -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()


def _socks(host: str, port: int, command: int = 1) -> bytes:
    name = host.encode()
    request = bytes([5, command, 0, 3, len(name)]) + name + struct.pack("!H", port)
    return b"\5\1\0" + request


async def _read(stream: trio.SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := await stream.receive_some(size - len(data))):
        data += part
    return data


def _denial(reply: bytes) -> tuple[int, dict[str, object]]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# spec NET8: CONNECT, with what follows in the same segment.
@pytest.mark.parametrize("first", [b"", b"hello"])
async def test_connect_opens_a_tunnel(first: bytes) -> None:
    async with scene("web.test:22", names=NAMES) as stage:
        stage.serve("203.0.113.5", 22, echo)
        async with await _open(stage) as stream:
            await stream.send_all(_connect("web.test:22") + first)
            assert await _read(stream, len(OK)) == OK
            await stream.send_all(b" there")
            assert await _read(stream, len(first) + 6) == first + b" there"
            await stream.send_eof()
            assert await read_all(stream) == b""
        (row,) = stage.figures.names
        assert (row.name, row.port, row.bytes_out) == ("web.test", 22, len(first) + 6)


# spec NET8: SOCKS5, its names resolved by the host.
async def test_socks_opens_a_tunnel() -> None:
    async with scene("web.test:22", names=NAMES) as stage:
        stage.serve("203.0.113.5", 22, echo)
        async with await _open(stage) as stream:
            await stream.send_all(_socks("web.test", 22) + b"hello")
            assert await _read(stream, 12) == b"\5\0" + b"\5\0\0\1" + bytes(6)
            assert await _read(stream, 5) == b"hello"


# spec NET8: an address of the pool stands for its name.
async def test_an_address_of_the_pool_stands_for_its_name() -> None:
    async with scene("web.test:22", names=NAMES) as stage:
        stage.serve("203.0.113.5", 22, echo)
        (address,) = (await stage.ask("web.test")).texts
        async with await _open(stage) as stream:
            await stream.send_all(_connect(f"{address}:22"))
            assert await _read(stream, len(OK)) == OK
        async with await _open(stage) as stream:
            await stream.send_all(_connect("198.18.9.9:22"))
            status, body = _denial(await read_all(stream))
        assert (status, body["reason"]) == (403, "no-name")


# spec NET7: after CONNECT to 443 as well.
@pytest.mark.parametrize("is_late", [True, False])
async def test_a_hello_is_read_behind_connect(*, is_late: bool) -> None:
    hello = client_hello("web.test")
    async with scene("web.test", names=NAMES) as stage:
        accepted = stage.serve("203.0.113.5", 443, echo)
        async with await _open(stage) as stream:
            await stream.send_all(_connect("web.test:443") + hello[: 9 - 9 * is_late])
            assert await _read(stream, len(OK)) == OK
            assert not accepted
            await stream.send_all(hello[9 - 9 * is_late :])
            assert await _read(stream, len(hello)) == hello
        for command in (_connect("web.test:443"), _socks("web.test", 443)):
            async with await _open(stage) as stream:
                await stream.send_all(command + client_hello("evil.test"))
                assert await is_reset(stream)
        assert len(accepted) == 1
        assert [row[2] for row in stage.told()] == ["tls-other-name"]


# spec NET8: what is refused is told in the reply: by which rule it would be allowed.
@pytest.mark.parametrize(
    ("target", "reason", "rule"),
    [
        ("evil.test:443", "no-rule", "evil.test:443"),
        ("web.test:23", "no-rule", "web.test:23"),
        ("priv.test:22", "private-address", "priv.test:22@private"),
        ("gone.test:22", "no-such-name", None),
        ("10.1.0.5:22", "no-rule", "10.1.0.5:22"),
        ("127.0.0.1:22", "no-name", None),
        ("[::1]:22", "no-name", None),
    ],
)
async def test_a_refusal_says_which_rule_would_allow_it(
    target: str, reason: str, rule: str | None
) -> None:
    rules = ("web.test:22", "priv.test:22", "gone.test:22")
    async with scene(*rules, names=NAMES) as stage:
        async with await _open(stage) as stream:
            await stream.send_all(_connect(target))
            status, body = _denial(await read_all(stream))
        assert status == 403
        host, _, port = target.rpartition(":")
        assert body == {
            "error": "policy_denied",
            "name": host.strip("[]"),
            "port": int(port),
            "reason": reason,
            "rule": rule,
            "detail": body["detail"],
        }
        assert stage.told() == [(host.strip("[]"), int(port), reason, rule)]
        async with await _open(stage) as stream:
            await stream.send_all(_socks(host.strip("[]"), int(port)))
            reply = await read_all(stream)
        assert reply in {b"\5\0\5\2\0\1" + bytes(6), b"\5\0"}


# spec NET8: what is allowed and not reached is a 502, and 5 in SOCKS.
async def test_what_is_not_reached_is_told() -> None:
    async with scene("web.test:22", names=NAMES) as stage:
        async with await _open(stage) as stream:
            await stream.send_all(_connect("web.test:22"))
            status, body = _denial(await read_all(stream))
        assert (status, body) == (
            502,
            {"error": "unreachable", "name": "web.test", "port": 22},
        )
        async with await _open(stage) as stream:
            await stream.send_all(_socks("web.test", 22))
            assert await read_all(stream) == b"\5\0\5\5\0\1" + bytes(6)
        assert [row[2] for row in stage.told("network.failed")] == ["ECONNREFUSED"]


# spec NET6: 30 s in all for look-up and connection, by the proxy as well.
@pytest.mark.parametrize("port", [22, 443])
async def test_a_slow_look_up_leaves_less_time_to_connect(
    mock_clock: MockClock, port: int
) -> None:
    async with scene(f"web.test:{port}", names=NAMES) as stage:
        with _full_listener(port):
            stage.names.may_answer.clear()
            async with await _open(stage) as stream:
                await stream.send_all(_connect(f"web.test:{port}"))
                while not stage.names.asked:
                    await wait_all_tasks_blocked(0.01)
                mock_clock.jump(20)
                stage.names.may_answer.set()
                if port == 443:
                    assert await _read(stream, len(OK)) == OK
                    await stream.send_all(client_hello("web.test"))
                while _connections_held(stage) < 2:
                    await wait_all_tasks_blocked(0.01)
                mock_clock.jump(11)
                with trio.fail_after(15):  # less than what another 30 s would leave
                    fields = await stage.event("network.failed")
                    assert fields["reason"] == "ETIMEDOUT"


@contextmanager
def _full_listener(port: int) -> Iterator[None]:
    """Listen at web.test's address, so that no connection to it gets an answer."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("203.0.113.5", port))
        listener.listen(0)
        for _ in range(2):  # one waits to be accepted, one gets no place
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("203.0.113.5", port))
        yield


def _connections_held(stage: Scene) -> int:
    words = [word for _, word in stage.network.descriptors()]
    return words.count("connection of a child")


# spec NET8: absolute form: the head is written anew, and one request is a connection.
async def test_a_url_is_one_request_of_its_connection() -> None:
    seen = b""
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal seen
        while not seen.endswith(b"body"):
            seen += await stream.receive_some()
        await stream.send_all(reply)
        seen += await read_all(stream)

    request = (
        b"POST http://Web.Test/path?q HTTP/1.1\r\nHost: evil.test\r\n"
        b"Proxy-Connection: keep-alive\r\nContent-Length: 4\r\n\r\nbo"
    )
    async with scene("web.test:80", names=NAMES) as stage:
        stage.serve("203.0.113.5", 80, serve)
        async with await _open(stage) as stream:
            await stream.send_all(request)
            await wait_all_tasks_blocked()
            await stream.send_all(b"dyGET http://evil.test/ HTTP/1.1\r\n\r\n")
            assert await _read(stream, len(reply)) == reply
            await stream.send_all(b"GET http://evil.test/ HTTP/1.1\r\n\r\n")
            await stream.send_eof()
            assert await read_all(stream) == b""
    assert seen == (
        b"POST /path?q HTTP/1.1\r\nHost: web.test\r\nContent-Length: 4\r\n"
        b"Connection: close\r\n\r\nbody"
    )


# spec NET7: a URL with port 443 is no ClientHello.
async def test_a_url_of_port_443_is_refused() -> None:
    async with scene("web.test", names=NAMES) as stage:
        async with await _open(stage) as stream:
            await stream.send_all(
                b"GET http://web.test:443/ HTTP/1.1\r\nHost: web.test\r\n\r\n"
            )
            status, body = _denial(await read_all(stream))
        assert (status, body["reason"]) == (403, "tls-no-hello")


# spec NET8: SOCKS4, BIND, UDP ASSOCIATE and what is no request are refused.
# attack 59
@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"\4\1\0\x16\xcb\0\x71\5\0", b"\0\x5b" + bytes(6)),
        (_socks("web.test", 22, 2), b"\5\0\5\7\0\1" + bytes(6)),
        (_socks("web.test", 22, 3), b"\5\0\5\7\0\1" + bytes(6)),
        (b"GET / HTTP/1.1\r\nHost: web.test\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"CONNECT u@web.test:22 HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"CONNECT 0x7f.1:22 HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"CONNECT web.test:22 HTTP/1.1\n\n", b"HTTP/1.1 400 Bad Request"),
        (b"\0", b"HTTP/1.1 400 Bad Request"),
    ],
)
async def test_what_is_not_understood_is_refused(data: bytes, reply: bytes) -> None:
    async with scene("web.test:22", names=NAMES) as stage:
        async with await _open(stage) as stream:
            await stream.send_all(data)
            got = await read_all(stream)
            assert got.split(b"\r\n")[0].startswith(reply)
        assert not stage.names.asked


# spec NET8: a program that does not say what it wants has no connection for long.
async def test_a_silent_program_is_ended(mock_clock: MockClock) -> None:
    async with scene("web.test:22", names=NAMES) as stage:
        async with await _open(stage) as stream:
            await stream.send_all(b"CONNECT ")
            await wait_all_tasks_blocked(0.01)
            mock_clock.jump(11)
            assert await is_reset(stream)
        assert not stage.events


# spec NET8: `upstream` chains to another proxy, which resolves names.
async def test_an_upstream_proxy_connects_and_resolves() -> None:
    asked = []

    async def serve(stream: trio.SocketStream) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await stream.receive_some()
        asked.append(head.split(b"\r\n")[0])
        if b"gone" in head:
            await stream.send_all(b"HTTP/1.1 504 Gateway Timeout\r\n\r\n")
            return
        if b"forbidden" in head:
            await stream.send_all(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        # The server's first words come in the same segment as the head.
        await stream.send_all(b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\nSSH-2.0-server\r\n")
        await echo(stream)

    section = NetworkSection(
        ["web.test:22", "gone.test:22", "forbidden.test:22", "0.0.0.0/0:22"],
        upstream="http://proxy.corp:8080",
    )
    names = {"proxy.corp": ["10.1.0.9"]}
    routes = ["169.254.169.254/32"]
    async with scene(section=section, names=names, routes=routes) as stage:
        stage.serve("10.1.0.9", 8080, serve)
        async with await stage.connect("web.test", 22) as stream:
            assert await _read(stream, 16) == b"SSH-2.0-server\r\n"
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
        for name in ("gone.test", "forbidden.test"):
            async with await stage.connect(name, 22) as stream:
                assert await is_reset(stream)
        async with await stage.connect("169.254.169.254", 22) as stream:
            assert await is_reset(stream)
        assert stage.names.asked == ["proxy.corp"]
        assert asked == [
            b"CONNECT web.test:22 HTTP/1.1",
            b"CONNECT gone.test:22 HTTP/1.1",
            b"CONNECT forbidden.test:22 HTTP/1.1",
        ]
        failed = [row[2] for row in stage.told("network.failed")]
        assert failed == ["EHOSTUNREACH", "EACCES"]
        assert [row[2] for row in stage.told()] == ["private-address"]
