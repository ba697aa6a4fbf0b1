"""Input of strangers: refused in one line or dropped, and never run."""

import socket
from typing import Any

import pytest

from protocol.toolexec.body import MAX_BODY_BYTES, MAX_HEAD_BYTES, BodyReader
from supervisor.toolexec import connection, wire
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Scene, parse, receive_all, receive_until, send

pytestmark = pytest.mark.slow

FORM = b"tool=sh&arg=-c&arg=touch ran"
CHUNKED = b"1c\r\n" + FORM + b"\r\n0\r\n\r\n"


def assert_nothing_ran(scene: Scene) -> None:
    """Check that no tool was started."""
    assert not list(scene.workspace.iterdir())
    assert not scene.stage.events("exec.started")


# attack 33: requests that two readers could understand in two ways, one of whom would run
# the tool.
@pytest.mark.parametrize(
    ("extra", "body"),
    [
        (("Content-Length: 5", "Transfer-Encoding: chunked"), CHUNKED),
        (("Content-Length: 39", "Transfer-Encoding: chunked"), CHUNKED),
        (("Transfer-Encoding: gzip",), CHUNKED),
        (("Transfer-Encoding: chunked, chunked",), CHUNKED),
        (("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), CHUNKED),
        (("Content-Length: 28", "Content-Length: 6"), FORM),
        (("Content-Length: x",), FORM),
        (("Content-Length: -1",), FORM),
        (("Transfer-Encoding: chunked",), b"1c\n" + FORM + b"\n0\n\n"),
        (("Transfer-Encoding: chunked",), b"1c\r\n" + FORM + b"\n0\r\n\r\n"),
        (("Transfer-Encoding: chunked",), b"5\r\n" + FORM),
        (("Transfer-Encoding: chunked",), b"zz\r\n" + FORM),
        (("Transfer-Encoding: chunked",), b"fffffffffffffffff\r\n" + FORM),
        (("Content-Length: 28",), FORM + b"GET / HTTP/1.1\r\n\r\n"),
        (("Content-Length: 28",), FORM + b"\r\n"),
        (("Bad Header: x",), b""),
        ((" folded: x",), b""),
        (("X: a\x00b",), b""),
    ],
)
# spec E9
async def test_an_ambiguous_request_is_400(
    scene: Scene, extra: tuple[str, ...], body: bytes
) -> None:
    assert len(FORM) == 28
    reply = await scene.say(scene.head(None, *extra) + body)
    assert (reply.status, reply.code) == (400, 86)
    assert reply.body.startswith(b"bad request: ")
    assert reply.body.count(b"\n") == 1
    assert_nothing_ran(scene)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\n\n",
        b"POST /exec HTTP/1.1 \x00\r\nHost: a\r\n\r\n",
        b"G\xc3\x89T / HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_400(scene: Scene, data: bytes) -> None:
    reply = await scene.say(data)
    assert (reply.status, reply.code) == (400, 86)


# attack 24: a line that may hold a token is not said again, to whoever reads replies.
async def test_a_line_that_is_refused_is_not_said_again(scene: Scene) -> None:
    token = scene.child.token.encode()
    line = b"Authorization: Bearer " + token + b"\x0b\r\n"
    reply = await scene.say(b"POST /exec HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n")
    assert (reply.status, reply.body) == (400, b"bad request: illegal header line\n")


# spec E9
async def test_a_head_may_end_its_lines_in_lf_only(scene: Scene) -> None:
    head = scene.head(len(b"tool=true")).replace(b"\r\n", b"\n")
    assert (await scene.say(head + b"tool=true")).status == 200


# RFC 9112, 2.2: one empty line before the request is passed over.
@pytest.mark.parametrize("line", [b"\r\n", b"\n"])
async def test_an_empty_line_before_a_request_is_passed_over(
    scene: Scene, line: bytes
) -> None:
    reply = await scene.say(line + scene.request(b"tool=true"))
    assert (reply.status, reply.code) == (200, 0)
    with await scene.connect() as sock:
        await send(sock, line + scene.head(line="HEAD /healthz HTTP/1.1"))
        head = await receive_all(sock)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert head.endswith(b"\r\n\r\n")
    with await scene.connect() as sock:
        for part in line:
            await send(sock, bytes((part,)))
        await send(sock, scene.request(b"tool=true"))
        assert parse(await receive_all(sock)).status == 200
    reply = await scene.say(2 * line + scene.request(b"tool=true"))
    assert (reply.status, reply.code) == (400, 86)


# A length that no body has, of as many digits as anybody likes.
# attack 15, attack 14
@pytest.mark.parametrize(
    ("digits", "status"),
    [
        ("9" * 8, 413),
        ("9" * 19, 413),
        ("18446744073709551616", 413),
        ("9" * 20, 413),
        ("9" * 21, 400),
        ("9" * 5000, 400),
        ("\u0665", 400),
        ("5_0", 400),
    ],
)
async def test_a_length_beyond_all_bounds_is_refused(
    scene: Scene, digits: str, status: int
) -> None:
    reply = await scene.say(scene.head(None, f"Content-Length: {digits}") + FORM)
    assert (reply.status, reply.code) == (status, 86)
    assert_nothing_ran(scene)
    assert (await scene.run("tool=true")).status == 200


# attack 15: lengths that lie.
# spec E10
async def test_a_body_that_ends_early_is_never_run(scene: Scene) -> None:
    for data in (
        scene.head(29) + FORM,
        scene.head(None, "Transfer-Encoding: chunked") + b"1c\r\n" + FORM + b"\r\n",
        scene.head(28)[:-4],
    ):
        reply = await scene.say(data, half_close=True)
        assert reply.status == 400
    with await scene.connect() as sock:
        await send(sock, scene.head(29) + FORM)
    assert (await scene.run("tool=rm")).status == 403  # it is still there
    assert_nothing_ran(scene)


async def test_a_client_may_go_at_any_byte_of_its_request(scene: Scene) -> None:
    data = scene.request(FORM)
    for size in range(0, len(data), 3):
        with await scene.connect() as sock:
            await send(sock, data[:size])
    assert (await scene.run("tool=rm")).status == 403
    assert_nothing_ran(scene)


@pytest.mark.parametrize("size", [1024 * 1024 + 1, 3 * 1024 * 1024, 10**18])
# spec E7
async def test_a_body_beyond_its_bound_is_413(scene: Scene, size: int) -> None:
    body = b"x" * min(size, 3 * 1024 * 1024)
    reply = await scene.say(scene.head(size) + body, half_close=True)
    assert (reply.status, reply.body) == (413, b"payload too large\n")


async def test_a_chunked_body_beyond_its_bound_is_413(scene: Scene) -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    head = scene.head(None, "Transfer-Encoding: chunked")
    reply = await scene.say(head + chunk * 20 + b"0\r\n\r\n", half_close=True)
    assert reply.status == 413


@pytest.mark.parametrize(
    "extra",
    [
        ("X: " + "x" * 65_536,),
        tuple(f"X-{n}: y" for n in range(1100)),
        ("X: y" * 99_999,),
    ],
)
# spec E7
async def test_a_head_beyond_its_bounds_is_431(
    scene: Scene, extra: tuple[str, ...]
) -> None:
    reply = await scene.say(scene.head(0, *extra), half_close=True)
    assert (reply.status, reply.body) == (431, b"request headers too large\n")
    assert reply.code == 86


async def test_a_large_head_within_its_bounds_passes(scene: Scene) -> None:
    extra = (*(f"X-{n}: {'y' * 30}" for n in range(1000)), "X: " + "x" * 20_000)
    reply = await scene.say(scene.request(b"tool=true", *extra))
    assert reply.status == 200


# spec E8
async def test_a_refused_body_need_not_be_sent(scene: Scene) -> None:
    # Expect: 100-continue is answered with the refusal, or with 100.
    head = scene.head(28, "Expect: 100-continue", token="x" * 32)
    assert (await scene.say(head)).status == 401
    with await scene.connect() as sock:
        await send(sock, scene.head(9, "Expect: 100-continue"))
        assert (await _line(sock)).startswith(b"HTTP/1.1 100 ")
        await send(sock, b"tool=true")
        assert parse(await receive_all(sock)).status == 200


# Its input fits into no buffer: it is taken, or the client never comes to read why.
@pytest.mark.parametrize(("size", "status"), [(1_000_000, 401), (4_000_000, 413)])
# spec E8
async def test_who_is_refused_early_may_send_all_it_has(
    scene: Scene, size: int, status: int
) -> None:
    with await scene.connect() as sock:
        await send(sock, scene.head(size, token="x" * 32) + b"a" * size)
        reply = parse(await receive_all(sock))
    assert (reply.status, reply.code) == (status, 86)


async def _line(sock: socket.socket) -> bytes:
    return await receive_until(sock, b"\r\n\r\n")


# attack 16: slow heads and bodies.
# spec E7
async def test_what_does_not_come_in_time_is_dropped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(wire, "BODY_TIMEOUT_S", 0.3)
    for data in (b"", b"POST /exec", scene.head(28), scene.head(28) + FORM[:9]):
        with await scene.connect() as sock:
            await send(sock, data)
            assert await receive_all(sock) == b""
    assert_nothing_ran(scene)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("tool=sh" + "&arg=x" * 129, b"more than 128 arguments"),
        ("tool=sh&arg=" + "x" * 4097, b"an argument longer"),
        ("tool=sh&arg=a%00b", b"a NUL byte"),
        ("tool=" + "x" * 65, b"tool longer"),
        ("tool=sh&cwd=../..", b"cwd is neither"),
        ("arg=x", b"no tool"),
    ],
)
# spec E17
async def test_a_bad_form_is_400(scene: Scene, form: str, why: bytes) -> None:
    reply = await scene.run(form)
    assert reply.status == 400
    assert reply.body.startswith(b"bad request: " + why)


# attack 32: names of tools that are paths, or hold blanks.
@pytest.mark.parametrize("tool", ["/bin/sh", "../sh", "sh ", "sh%0A", "sh;id", "%FF"])
async def test_a_tool_is_a_name_of_the_allowlist(scene: Scene, tool: str) -> None:
    reply = await scene.run(f"tool={tool.replace(' ', '+')}")
    assert (reply.status, reply.body.count(b"\n")) == (403, 1)


@pytest.mark.parametrize("exec_id", ["../x", "$(id)", "a/b", "x" * 65, ""])
# spec E18
async def test_a_bad_exec_id_is_400(scene: Scene, exec_id: str) -> None:
    data = scene.request(b"tool=true", f"X-Aifo-Exec-Id: {exec_id}")
    assert (await scene.say(data)).status == 400


# spec E6
async def test_bytes_after_a_request_that_runs_are_not_a_request(scene: Scene) -> None:
    with await scene.connect() as sock:
        await send(sock, scene.request(b"tool=sh&arg=-c&arg=echo a; sleep 0.2; echo b"))
        data = await _line(sock)
        await send(sock, scene.request(FORM) * 3)
        reply = parse(data + await receive_all(sock))
    assert reply.body == b"a\nb\n"
    assert len(scene.stage.events("exec.started")) == 1


# attack 15: what frames a body, without end.
# spec E7
@pytest.mark.parametrize(
    "endless",
    [
        b"0\r\n" + (b"X-A: " + b"a" * 6000 + b"\r\n") * 20,
        (b"1;" + b"e" * 250 + b"\r\na\r\n") * 400,
    ],
)
async def test_framing_beyond_its_bound_is_431(scene: Scene, endless: bytes) -> None:
    head = scene.head(None, "Transfer-Encoding: chunked")
    reply = await scene.say(head + endless, half_close=True)
    assert (reply.status, reply.body) == (431, b"request headers too large\n")
    assert_nothing_ran(scene)


# attack 15: what is kept of a request for another program of this host is bounded.
async def test_of_framing_nothing_is_kept(scene: Scene) -> None:
    head = scene.head(None, "Transfer-Encoding: chunked")
    with await scene.connect() as sock:
        await send(sock, head + b"1\r\nx\r\n" * (MAX_BODY_BYTES - 1))
        await send(sock, b"1\r")
        (server,) = (one for one in scene.tool.servers if one.connections)
        (connection,) = server.connections.values()
        bound = MAX_HEAD_BYTES + MAX_BODY_BYTES

        def kept() -> int:
            return sum(map(len, connection.wire.received))

        await eventually(lambda: kept() > MAX_BODY_BYTES)
        assert kept() < bound
        await send(sock, b"\ny\r\n0\r\n\r\n")
        assert parse(await receive_all(sock)).status == 400  # it is no form of a tool


# attack 16: of whom its head is enough to refuse, no body is received.
# spec E8
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"token": None}, 401),
        ({"token": "x" * 32}, 401),
        ({"proto": "3"}, 426),
        ({"line": "POST /nowhere HTTP/1.1"}, 404),
        ({"line": "PUT /exec HTTP/1.1"}, 405),
        ({"line": "GET /healthz HTTP/1.1", "token": None}, 200),
    ],
)
@pytest.mark.parametrize(
    "how", ["Content-Length: 1000000", "Transfer-Encoding: chunked"]
)
async def test_a_body_is_received_only_of_whom_it_is_wanted(
    scene: Scene, changes: dict[str, Any], status: int, how: str
) -> None:
    with await scene.connect() as sock:
        await send(sock, scene.head(None, how, **changes))
        assert parse(await receive_all(sock)).status == status


# The received part of a small body is read first: it comes first in the order of checks.
# spec E13
async def test_bad_framing_that_comes_with_a_head_is_told_before_a_token(
    scene: Scene,
) -> None:
    head = scene.head(None, "Transfer-Encoding: chunked", token=None)
    assert (await scene.say(head + b"zz\r\n")).status == 400
    head = scene.head(28, token=None)
    assert (await scene.say(head + FORM + b"more")).status == 400


# attack 16: a whole body has a time, however steadily it comes.
# spec E7
async def test_a_body_has_a_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "BODY_DEADLINE_S", 0.2)
    with await scene.connect() as sock:
        await send(sock, scene.head(28) + FORM[:9])
        reply = parse(await receive_all(sock))
    assert (reply.status, reply.body) == (408, b"the body took too long\n")
    assert reply.code == 86
    assert_nothing_ran(scene)


# spec S7: bodies that one child sends at once are bounded, and so is what they hold.
# spec E32
async def test_a_child_sends_so_many_bodies_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_RECEIVING", 2)
    (owner,) = scene.tool.children.values()
    with await scene.connect() as one, await scene.connect() as two:
        for sock in (one, two):
            await send(sock, scene.head(28) + FORM[:9])
        await eventually(lambda: owner.receiving == 2)
        with await scene.connect() as third:
            await send(third, scene.head(28))
            reply = parse(await receive_all(third))
        assert (reply.status, reply.body) == (503, b"busy\n")
        assert (await scene.run("tool=true")).status == 200  # it came with its head
    await eventually(lambda: not owner.receiving)


# attack 15: what is sent is taken apart in pieces, and others go on between them.
async def test_a_body_is_taken_apart_in_pieces(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    real = BodyReader.feed

    def noted(self: BodyReader, data: bytes) -> None:
        fed.append(len(data))
        real(self, data)

    monkeypatch.setattr(BodyReader, "feed", noted)
    body = b"1\r\n&\r\n" * 30_000 + b"0\r\n\r\n"
    head = scene.head(None, "Transfer-Encoding: chunked")
    reply = await scene.say(head + body)
    assert (reply.status, reply.body) == (
        400,
        b"bad request: more than 1024 fields\n",
    )
    assert sum(fed) == len(body)
    assert max(fed) <= wire.RECEIVE_BYTES


# RFC 9110, 9.3.2
async def test_a_reply_to_head_has_no_body(scene: Scene) -> None:
    for line, status in (
        ("HEAD /exec HTTP/1.1", b"405"),
        ("HEAD /nowhere HTTP/1.1", b"404"),
        ("HEAD /exec HTTP/3.0", b"400"),
    ):
        with await scene.connect() as sock:
            await send(sock, scene.head(None, line=line))
            reply = await receive_all(sock)
        assert reply.split()[1] == status
        assert reply.endswith(b"\r\n\r\n")
        assert reply.count(b"\r\n\r\n") == 1
