"""Plain HTTP in the child, TLS outside, and a secret that stays between them."""

from __future__ import annotations

import base64
import json
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hostlib.accounts import Account
from supervisor.network import credential_server
from supervisor.network.child_network import NetworkBounds
from supervisor.network.credential_file import open_credentials
from supervisor.network.rule import RuleError, parse_rule
from supervisor.network.section import CredentialSection, NetworkSection
from tests.helpers.certificates import certificate
from tests.supervisor.network.scene import Scene, is_reset, read_all, scene

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Tls = trio.SSLStream[trio.SocketStream]
    Answer = Callable[[Tls], Awaitable[None]]

SECRET = "sk-live-4f9Zq+x/71"  # noqa: S105 - of the test
SERVER, INNER = "api.test", "api.test.sandhost"
ADDRESS = "203.0.113.5"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LENGTHLESS = b"HTTP/1.1 200 OK\r\n\r\n"
MIB = 1024 * 1024


def request(*fields: str, target: str = "/a", method: str = "GET") -> bytes:
    """Return a request that is the last of its connection."""
    lines = (f"{method} {target} HTTP/1.1", f"Host: {INNER}", "Connection: close")
    return "\r\n".join((*lines, *fields, "", "")).encode()


def saying(*pieces: bytes) -> Answer:
    """Return what answers with some bytes, in pieces."""

    async def answer(stream: Tls) -> None:
        for piece in pieces:
            await stream.send_all(piece)

    return answer


class Told(NamedTuple):
    """An answer as a child has it."""

    status: int
    head: bytes
    body: bytes


class Stage(NamedTuple):
    """A child with a credential, and its server."""

    scene: Scene
    heads: list[bytes]

    async def ask(self, data: bytes, host: str = INNER) -> Told:
        """Send one request that is the last, and return what is answered."""
        async with await self.scene.connect(host, 80) as stream:
            await stream.send_all(data)
            answer = await read_all(stream)
        head, _, body = answer.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = joined(body)
        return Told(int(head.split()[1]), head, body)


def joined(body: bytes) -> bytes:
    """Return a chunked body in one."""
    found: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            assert body == b"\r\n"
            return b"".join(found)
        found.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]


@asynccontextmanager
async def stage(
    where: Path,
    answer: Answer,
    *,
    host: str = SERVER,
    header: str = "Authorization: Bearer {file}",
    secret: str = SECRET,
    bounds: NetworkBounds | None = None,
    section: NetworkSection | None = None,
    address: str = ADDRESS,
    certified: str = SERVER,
    is_cut: bool = False,
) -> AsyncIterator[Stage]:
    """Run a child with a credential, and a server that answers each request.

    Its connection ends as TLS wants it, or `is_cut` by a bare FIN.
    """
    key = where / "key"
    key.write_text(f"{secret}\n")
    key.chmod(0o600)
    both = certificate(where, certified)
    words = CredentialSection(host, header, str(key), str(where / "tls-made.pem"))
    credentials = open_credentials({"api": words})
    assert secret not in repr(credentials)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    heads: list[bytes] = []

    async def serve(raw: trio.SocketStream) -> None:
        stream = trio.SSLStream(raw, context, server_side=True, https_compatible=is_cut)
        with suppress(trio.BrokenResourceError):
            head = b""
            while b"\r\n\r\n" not in head:
                piece = await stream.receive_some()
                if not piece:
                    return
                head += piece
            heads.append(bytes(head))
            await answer(stream)
            await stream.aclose()

    wanted = section or NetworkSection(credentials=["api"])
    names = {SERVER: [address], "other.test": [ADDRESS]}
    async with scene(
        section=wanted, names=names, bounds=bounds, credentials=credentials
    ) as made:
        made.serve(address, 443, serve)
        yield Stage(made, heads)
        told = json.dumps([event.fields for event in made.events], default=str)
        assert secret not in told + repr(made.figures)


# spec NET15: the host adds the header and dials by TLS; what the child sends in its
# place is dropped, and the server reads its own name.
async def test_a_request_goes_out_with_the_secret(tmp_path: Path) -> None:
    async with stage(tmp_path, saying(OK)) as made:
        fields = (
            "authorization: Bearer of-the-child",
            "AUTHORIZATION: Basic eA==",
            "Accept-Encoding: gzip",
            "Range: bytes=0-2",
            "If-Range: x",
            "Upgrade: websocket",
            "X-Own: kept",
        )
        told = await made.ask(request(*fields, target="/a?b=c"))
        assert (told.status, told.body) == (200, b"ok")
        (head,) = made.heads
        lines = head.decode().split("\r\n")
        assert lines[0] == "GET /a?b=c HTTP/1.1"
        lowered = [line.lower() for line in lines]
        assert f"host: {SERVER}" in lowered
        assert [line for line in lines if "uthorization" in line.lower()] == [
            f"Authorization: Bearer {SECRET}"
        ]
        assert "accept-encoding: identity" in lowered
        assert "x-own: kept" in lowered
        for name in ("range", "if-range", "upgrade"):
            assert not any(line.startswith(f"{name}:") for line in lowered)
        (row,) = made.scene.figures.names
        assert (row.name, row.port, row.connections, row.open) == (INNER, 80, 1, 0)
        assert row.bytes_in == len(OK)
        assert row.bytes_out == len(head)
        assert SECRET.encode() not in told.head + told.body


# spec NET15: as CGI compares the names of headers.
async def test_a_header_of_another_spelling_is_dropped(tmp_path: Path) -> None:
    header = "X-Api-Key: {file}"
    async with stage(tmp_path, saying(OK), header=header) as made:
        await made.ask(request("X_Api_Key: of-the-child", "Authorization: own"))
        (head,) = made.heads
        assert b"of-the-child" not in head
        assert f"X-Api-Key: {SECRET}".encode() in head
        assert b"Authorization: own" in head


# spec NET15: each request is judged by itself, and a connection may have several.
async def test_a_connection_may_have_several_requests(tmp_path: Path) -> None:
    async with (
        stage(tmp_path, saying(OK)) as made,
        await made.scene.connect(INNER, 80) as stream,
    ):
        for count in (1, 2, 3):
            await stream.send_all(f"GET / HTTP/1.1\r\nHost: {INNER}\r\n\r\n".encode())
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += await stream.receive_some()
            assert b"ok" in answer
            assert len(made.heads) == count
        await made.scene.change(deny=[f"{INNER}:80"])
        await stream.send_all(f"GET / HTTP/1.1\r\nHost: {INNER}\r\n\r\n".encode())
        answer = await read_all(stream)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b'"reason":"refused-by-rule"' in answer
        assert len(made.heads) == 3


# spec NET15: bodies are passed on as they come, of both framings.
@pytest.mark.slow
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_long_body_arrives_whole(tmp_path: Path, *, is_chunked: bool) -> None:
    body = bytes(range(256)) * 8192
    sent = b"".join(
        b"%x\r\n%b\r\n" % (len(body[at : at + 9000]), body[at : at + 9000])
        for at in range(0, len(body), 9000)
    )
    field = (
        "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    )
    got = bytearray()

    def is_whole() -> bool:
        whole = made.heads[0].partition(b"\r\n\r\n")[2] + got
        return whole.endswith(b"0\r\n\r\n") if is_chunked else len(whole) == len(body)

    async def answer(stream: Tls) -> None:
        while not is_whole():
            got.extend(await stream.receive_some())
        await stream.send_all(LENGTHLESS + body)

    async with stage(tmp_path, answer) as made:
        data = sent + b"0\r\n\r\n" if is_chunked else body
        told = await made.ask(request(field, method="POST") + data)
        assert told.body == body
        whole = made.heads[0].partition(b"\r\n\r\n")[2] + got
        assert (joined(whole) if is_chunked else whole) == body


# spec NET15: an answer without end takes no memory, and goes on as the child reads.
# attack 61
@pytest.mark.slow
async def test_what_the_child_does_not_read_is_not_read(tmp_path: Path) -> None:
    sent = 0
    size = 48 * MIB

    async def answer(stream: Tls) -> None:
        nonlocal sent
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            await stream.send_all(bytes(MIB))
            sent += MIB

    async with (
        stage(tmp_path, answer) as made,
        await made.scene.connect(INNER, 80) as stream,
    ):
        await stream.send_all(request())
        await wait_all_tasks_blocked(0.5)
        assert sent < size
        answered = await read_all(stream)
        assert sent == size
        assert answered.count(0) == size


# spec NET15, attack 24, I10: redacted in the head, the reason and the body, across pieces.
@pytest.mark.parametrize("size", [1, 2, 5, 17, 1000])
async def test_a_secret_that_is_echoed_is_blotted_out(
    tmp_path: Path, size: int
) -> None:
    coded = base64.b64encode(f"x{SECRET}y".encode()).decode()
    escaped = SECRET.replace("+", "%2B").replace("/", "\\/")
    body = f"a {SECRET} b {coded} c {escaped} d \xff".encode("latin-1")
    text = (
        b"HTTP/1.1 200 said %b\r\nX-Echo: Bearer %b\r\nX-%b: 1\r\nX-Own: kept\r\n"
        b"Content-Length: %d\r\n\r\n%b"
    ) % (
        SECRET.encode(),
        SECRET.encode(),
        SECRET.replace("/", "").encode(),
        len(body),
        body,
    )
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    async with stage(tmp_path, saying(*pieces)) as made:
        told = await made.ask(request())
        for part in (told.head, told.body):
            assert b"4f9Zq" not in part.replace(SECRET.replace("/", "").encode(), b"")
            assert SECRET.encode() not in part
            assert coded[4:-4].encode() not in part
        assert b"X-Own: kept" in told.head
        assert told.body.startswith(b"a [redacted] b ")
        assert told.body.endswith(b" c [redacted] d \xff")


# spec NET15: what is decoded of a secret for Basic authentication is one as well.
async def test_a_password_is_blotted_out(tmp_path: Path) -> None:
    secret = base64.b64encode(b"user:pass-word-9").decode()
    answer = saying(LENGTHLESS + b"user:pass-word-9, pass-word-9")
    header = "Authorization: Basic {file}"
    async with stage(tmp_path, answer, header=header, secret=secret) as made:
        told = await made.ask(request())
        assert b"pass-word-9" not in told.body
        assert f"Basic {secret}".encode() in made.heads[0]


# spec NET15: a redirect is the child's to follow, which has no secret for other hosts.
@pytest.mark.parametrize(
    ("location", "seen"),
    [
        ("https://other.test/x", "https://other.test/x"),
        ("https://api.test/x?y", "http://api.test.sandhost/x?y"),
        ("HTTPS://API.test:443", "http://api.test.sandhost"),
        ("https://api.test.other.test/", "https://api.test.other.test/"),
        ("https://api.test:8443/", "https://api.test:8443/"),
        ("https://api.test@other.test/", "https://api.test@other.test/"),
        ("/x", "/x"),
    ],
)
async def test_a_redirect_is_passed_on(
    tmp_path: Path, location: str, seen: str
) -> None:
    head = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
    async with stage(tmp_path, saying(head.encode())) as made:
        told = await made.ask(request())
        assert told.status == 302
        assert f"Location: {seen}".encode() in told.head.split(b"\r\n")
        assert len(made.heads) == 1
        assert made.scene.names.asked == [SERVER]


# spec NET15: what two servers could read in two ways, or is no request, is not sent on.
# attack 59
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(f"Host: {INNER}"), 400),
        (request("Host: other.test"), 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (request("Content-Length: 1", "Transfer-Encoding: chunked"), 400),
        (request("Content-Length: 1", "Content-Length: 2"), 400),
        (request("Transfer-Encoding: gzip, chunked"), 501),
        (request("Connection: host"), 400),
        (request("Connection: content-length", "Content-Length: 0"), 400),
        (request("X: a\x00b"), 400),
        (request("X : a"), 400),
        (request(target="http://other.test/"), 400),
        (request(target="other.test:443", method="CONNECT"), 405),
        (request(method="TRACE"), 405),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (request("X: " + "a" * 100_000), 431),
    ],
)
async def test_what_is_no_request_is_refused(
    tmp_path: Path, data: bytes, status: int
) -> None:
    async with stage(tmp_path, saying(OK)) as made:
        told = await made.ask(data)
        assert told.status == status
        assert set(json.loads(told.body)) == {"error", "detail"}
        assert not made.heads
        assert not made.scene.names.asked


# spec NET15: a body that is none ends the connection, and nothing more is sent on.
async def test_a_broken_body_is_not_sent_on(tmp_path: Path) -> None:
    async def answer(stream: Tls) -> None:
        got.append(await read_all_of(stream))

    got: list[bytes] = []
    async with stage(tmp_path, answer) as made:
        field = "Transfer-Encoding: chunked"
        told = await made.ask(request(field, method="POST") + b"2\r\nabXX5\r\n")
        assert told.status == 400
        await wait_all_tasks_blocked()
        assert b"XX" not in b"".join(got)


async def read_all_of(stream: Tls) -> bytes:
    """Return what comes until the end, or the reset."""
    data = b""
    with suppress(trio.BrokenResourceError):
        while piece := await stream.receive_some():
            data += piece
    return data


# spec NET15: what comes compressed is not searched for the secret, and not passed on.
async def test_a_compressed_answer_is_refused(tmp_path: Path) -> None:
    text = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok"
    async with stage(tmp_path, saying(text)) as made:
        told = await made.ask(request())
        assert told.status == 502
        assert b"compresses" in told.body
        fields = await made.scene.event("network.failed")
        assert fields["reason"] == "EPROTO"


# spec NET15: a server that is not the one of the configuration is sent nothing.
@pytest.mark.parametrize("certified", ["other.test", "api.test.other.test"])
async def test_a_certificate_for_another_name_is_refused(
    tmp_path: Path, certified: str
) -> None:
    async with stage(tmp_path, saying(OK), certified=certified) as made:
        told = await made.ask(request())
        assert told.status == 502
        assert b"certificate is refused" in told.body
        assert not made.heads


# spec NET15: nor is one whose certificate nobody signed that is trusted.
async def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with stage(tmp_path, saying(OK), host=f"{SERVER}:444") as made:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate(other, SERVER))

        async def serve(raw: trio.SocketStream) -> None:
            stream = trio.SSLStream(raw, context, server_side=True)
            with suppress(trio.BrokenResourceError):
                made.heads.append(bytes(await stream.receive_some()))

        made.scene.serve(ADDRESS, 444, serve)
        told = await made.ask(request())
        assert told.status == 502
        assert b"certificate is refused" in told.body
        assert not made.heads


# spec NET15: what a child is told of a server that does not serve.
async def test_a_server_that_is_none_is_told(tmp_path: Path) -> None:
    async def speak(raw: trio.SocketStream) -> None:
        await raw.send_all(b"SSH-2.0-x\r\n")
        with suppress(trio.BrokenResourceError):
            await read_all(raw)

    async with stage(tmp_path, saying(OK), host=f"{SERVER}:444") as made:
        told = await made.ask(request())
        assert told.status == 502
        assert (await made.scene.event("network.failed"))["reason"] == "ECONNREFUSED"
        made.scene.serve(ADDRESS, 444, speak)
        told = await made.ask(request())
        assert told.status == 502
        assert b"speaks no TLS" in told.body


# spec NET15: a server that is silent does not hold a request for ever.
@pytest.mark.slow
async def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credential_server, "ANSWER_TIMEOUT_S", 0.3)

    async def answer(stream: Tls) -> None:
        await read_all_of(stream)

    async with stage(tmp_path, answer) as made:
        told = await made.ask(request())
        assert told.status == 504
        assert len(made.heads) == 1


# spec NET6, NET15: a cut answer does not look complete.
# attack 61
@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_a_reset(
    tmp_path: Path, text: bytes
) -> None:
    async with (
        stage(tmp_path, saying(text)) as made,
        await made.scene.connect(INNER, 80) as stream,
    ):
        await stream.send_all(request())
        assert await is_reset(stream)


# spec NET6, NET15: nor does one without a length that a bare FIN cuts.
# attack 61
async def test_an_answer_without_a_length_that_is_cut_is_a_reset(
    tmp_path: Path,
) -> None:
    async with (
        stage(tmp_path, saying(LENGTHLESS + b"ok"), is_cut=True) as made,
        await made.scene.connect(INNER, 80) as stream,
    ):
        await stream.send_all(request())
        assert await is_reset(stream)


# spec NET15: an answer with a length is whole without an end of TLS.
@pytest.mark.parametrize(
    "text",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    ],
    ids=["length", "chunked"],
)
async def test_an_answer_with_a_length_needs_no_end_of_tls(
    tmp_path: Path, text: bytes
) -> None:
    async with stage(tmp_path, saying(text), is_cut=True) as made:
        told = await made.ask(request())
        assert (told.status, told.body) == (200, b"ok")


# spec NET15: what a server refuses by an alert of TLS is told.
@pytest.mark.parametrize(
    ("alert", "why"),
    [
        (70, "refuses TLS by an alert: tlsv1 alert protocol version"),
        (40, "handshake failure"),
    ],
)
async def test_an_alert_of_a_server_is_told(
    tmp_path: Path, alert: int, why: str
) -> None:
    async def speak(raw: trio.SocketStream) -> None:
        await raw.send_all(bytes((21, 3, 3, 0, 2, 2, alert)))
        with suppress(trio.BrokenResourceError):
            await read_all(raw)

    async with stage(tmp_path, saying(OK), host=f"{SERVER}:444") as made:
        made.scene.serve(ADDRESS, 444, speak)
        told = await made.ask(request())
        assert told.status == 502
        assert why in json.loads(told.body)["detail"]


# spec NET15: so is a server that ends the connection within the handshake.
async def test_an_end_within_the_handshake_is_told(tmp_path: Path) -> None:
    async def speak(raw: trio.SocketStream) -> None:
        await raw.receive_some()
        await raw.aclose()

    async with stage(tmp_path, saying(OK), host=f"{SERVER}:444") as made:
        made.scene.serve(ADDRESS, 444, speak)
        told = await made.ask(request())
        assert json.loads(told.body)["detail"] == "the server has ended the connection"


# spec NET15: a child that leaves is noticed after the server took no more of its body.
@pytest.mark.slow
async def test_a_child_that_leaves_a_refused_body_ends_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The send begins with the short time, and the wait for the answer with the long one.
    monkeypatch.setattr(credential_server, "ANSWER_TIMEOUT_S", 1.0)
    over = trio.Event()

    async def answer(stream: Tls) -> None:
        await trio.sleep(0.5)  # the send is stuck by then
        monkeypatch.setattr(credential_server, "ANSWER_TIMEOUT_S", 600.0)
        await stream.send_all(b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n")
        await over.wait()

    async def send_body(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await stream.send_all(bytes(64 * MIB))

    async with stage(tmp_path, answer) as made, trio.open_nursery() as nursery:
        stream = await made.scene.connect(INNER, 80)
        head = request(f"Content-Length: {128 * MIB}", method="POST")
        await stream.send_all(head)
        nursery.start_soon(send_body, stream)
        await trio.sleep(2.0)  # longer than the send may take
        assert made.scene.figures.open == 1
        await stream.aclose()
        with trio.fail_after(10.0):
            while made.scene.figures.open:
                await wait_all_tasks_blocked(0.01)
        over.set()


# spec NET15: a server may refuse a body before it has come.
@pytest.mark.slow
async def test_an_early_answer_arrives(tmp_path: Path) -> None:
    text = b"HTTP/1.1 413 no\r\nContent-Length: 2\r\n\r\nno"
    async with stage(tmp_path, saying(text)) as made:
        head = request("Content-Length: 9000000", method="POST")
        told = await made.ask(head + bytes(100_000))
        assert (told.status, told.body) == (413, b"no")


# spec NET15: a client that waits to be told so may go on.
async def test_a_client_that_expects_to_go_on_is_told_so(tmp_path: Path) -> None:
    async def answer(stream: Tls) -> None:
        assert await stream.receive_some() == b"abc"
        await stream.send_all(b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK)

    async with (
        stage(tmp_path, answer) as made,
        await made.scene.connect(INNER, 80) as stream,
    ):
        fields = ("Expect: 100-continue", "Content-Length: 3")
        await stream.send_all(request(*fields, method="PUT"))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100 ")
        await stream.send_all(b"abc")
        answered = await read_all(stream)
        assert answered.startswith(b"HTTP/1.1 200 ")
        assert b"xpect" not in made.heads[0]


# spec NET3, NET15: the server is judged as every name is.
async def test_a_private_address_of_a_server_is_refused(tmp_path: Path) -> None:
    async with stage(tmp_path, saying(OK), address="10.1.0.5") as made:
        told = await made.ask(request())
        assert told.status == 403
        assert json.loads(told.body)["reason"] == "private-address"
        fields = await made.scene.event("network.refused")
        assert fields["reason"] == "private-address"
        assert fields["rule"] == f"{SERVER}:443@private"
    host = f"{SERVER}@private"
    async with stage(tmp_path, saying(OK), address="10.1.0.5", host=host) as made:
        assert (await made.ask(request())).status == 200


# spec NET14, NET15: its bytes count as others do.
async def test_the_bytes_of_an_answer_count(tmp_path: Path) -> None:
    bounds = NetworkBounds(net_bytes=Account(limit=100_000))
    async with (
        stage(tmp_path, saying(LENGTHLESS, bytes(200_000)), bounds=bounds) as made,
        await made.scene.connect(INNER, 80) as stream,
    ):
        await stream.send_all(request())
        assert await is_reset(stream)
        fields = await made.scene.event("network.refused")
        assert (fields["name"], fields["reason"]) == (INNER, "limit-net_bytes")


# spec NET12, NET15: a credential can be taken away and given back, and no other one added.
async def test_a_credential_is_denied_while_the_child_runs(tmp_path: Path) -> None:
    async with stage(tmp_path, saying(OK)) as made:
        assert (await made.ask(request())).status == 200
        with pytest.raises(RuleError, match="is for a credential"):
            await made.scene.change(allow=["other.test.sandhost:80"])
        with pytest.raises(RuleError, match="is for a credential"):
            await made.scene.change(allow=[f"{INNER}:443"])
        await made.scene.change(deny=[f"{INNER}:80"])
        assert (await made.scene.ask(INNER)).code == 3
        await made.scene.change(allow=[f"{INNER}:80"])
        assert (await made.ask(request())).status == 200


# spec NET12, NET15: what is open and denied is cut.
async def test_an_answer_under_way_is_cut(tmp_path: Path) -> None:
    async def answer(stream: Tls) -> None:
        await stream.send_all(LENGTHLESS + b"ok")
        await read_all_of(stream)

    async with (
        stage(tmp_path, answer) as made,
        await made.scene.connect(INNER, 80) as stream,
    ):
        await stream.send_all(request())
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        await made.scene.change(deny=[f"{INNER}:80"], cut=True)
        assert await is_reset(stream)


# spec NET15: a child without the credential has no such name, whatever else it may reach.
async def test_a_child_without_the_credential_has_no_such_name(tmp_path: Path) -> None:
    section = NetworkSection(["*:80,443"])
    async with stage(tmp_path, saying(OK), section=section) as made:
        assert (await made.scene.ask(INNER)).code == 3
        fields = await made.scene.event("network.refused")
        assert (fields["name"], fields["rule"]) == (INNER, None)


# spec NET8, NET15: the proxy cannot read what goes through it, and says so.
async def test_the_proxy_says_how_a_credential_is_reached(tmp_path: Path) -> None:
    async with stage(tmp_path, saying(OK)) as made:
        for line in (f"GET http://{INNER}/ HTTP/1.1", f"CONNECT {INNER}:80 HTTP/1.1"):
            sock = trio.socket.from_stdlib_socket(made.scene.child.make_socket())
            await sock.connect(("127.0.0.1", 3128))
            async with trio.SocketStream(sock) as stream:
                await stream.send_all(f"{line}\r\nHost: x\r\n\r\n".encode())
                answered = await read_all(stream)
            assert answered.startswith(b"HTTP/1.1 400 ")
            assert b"without the proxy" in answered
        assert not made.heads


# spec NET15: a child that leaves takes its request with it.
async def test_a_child_that_leaves_ends_its_request(tmp_path: Path) -> None:
    ended = trio.Event()

    async def answer(stream: Tls) -> None:
        await read_all_of(stream)
        ended.set()

    async with stage(tmp_path, answer) as made:
        stream = await made.scene.connect(INNER, 80)
        await stream.send_all(request())
        while not made.heads:
            await wait_all_tasks_blocked()
        await stream.aclose()
        await ended.wait()


# spec NET15: of an answer without a body the length is told; of another one it is not.
async def test_the_length_of_an_answer_without_a_body_is_told(tmp_path: Path) -> None:
    text = b"HTTP/1.1 200 OK\r\nContent-Length: 700\r\nETag: x\r\n\r\n"
    async with stage(tmp_path, saying(text)) as made:
        told = await made.ask(request(method="HEAD"))
        assert (told.status, told.body) == (200, b"")
        assert b"content-length: 700" in told.head.lower()
    text = b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"
    async with stage(tmp_path, saying(text)) as made:
        told = await made.ask(request("If-None-Match: x"))
        assert (told.status, told.body) == (304, b"")
        assert b"If-None-Match: x" in made.heads[0]


# spec NET15: a client of HTTP/1.0 reads to the end of the connection.
async def test_a_client_of_http_1_0_is_answered_as_one(tmp_path: Path) -> None:
    async with (
        stage(tmp_path, saying(OK)) as made,
        await made.scene.connect(INNER, 80) as stream,
    ):
        await stream.send_all(b"GET /a HTTP/1.0\r\n\r\n")
        head, _, body = (await read_all(stream)).partition(b"\r\n\r\n")
        assert body == b"ok"
        assert b"chunked" not in head
        assert f"Host: {SERVER}".encode() in made.heads[0]


# spec NET15: requests that come together are answered in order.
async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with stage(tmp_path, saying(OK)) as made:
        first = f"GET /1 HTTP/1.1\r\nHost: {INNER}\r\n\r\n".encode()
        async with await made.scene.connect(INNER, 80) as stream:
            await stream.send_all(first + request(target="/2"))
            answers = await read_all(stream)
        assert answers.count(b"HTTP/1.1 200 ") == 2
        assert [head.split()[1] for head in made.heads] == [b"/1", b"/2"]


# spec NET15: an answer that is no HTTP, asks for another protocol, or has a head without
# end is not passed on.
@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"",
    ],
    ids=["ssh", "upgrade", "long", "lengths", "coding", "nothing"],
)
async def test_an_answer_that_is_none_is_told(tmp_path: Path, text: bytes) -> None:
    async with stage(tmp_path, saying(text)) as made:
        told = await made.ask(request())
        assert told.status == 502
        assert json.loads(told.body)["error"] == "unreachable"


# spec NET8, NET15: behind a proxy of the host's own the proxy is asked for the server.
async def test_a_server_is_reached_through_the_hosts_own_proxy(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def pump(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                await sink.send_all(data)
            await sink.send_eof()

    async def proxy(stream: trio.SocketStream) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await stream.receive_some(1)
        asked.append(head.partition(b"\r\n")[0])
        async with await trio.open_tcp_stream(ADDRESS, 443) as server:
            await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pump, stream, server)
                nursery.start_soon(pump, server, stream)

    section = NetworkSection(credentials=["api"], upstream="http://203.0.113.9:3128")
    async with stage(tmp_path, saying(OK), section=section) as made:
        made.scene.serve("203.0.113.9", 3128, proxy)
        assert (await made.ask(request())).body == b"ok"
        assert asked == [b"CONNECT api.test:443 HTTP/1.1"]
        assert not made.scene.names.asked
        assert f"Bearer {SECRET}".encode() in made.heads[0]


# spec NET2, NET15: a child that narrows its rules has the credential if it names it.
async def test_a_child_narrows_a_credential_away(tmp_path: Path) -> None:
    section = NetworkSection(["*:80"], credentials=["api"])
    async with stage(tmp_path, saying(OK), section=section) as made:
        made.scene.network.narrow([parse_rule(f"{INNER}:80"), parse_rule("*:80")])
        assert (await made.ask(request())).status == 200
        made.scene.network.narrow([parse_rule("*:80")])
        assert (await made.scene.ask(INNER)).code == 3
        with pytest.raises(RuleError, match="the parent has no rule"):
            made.scene.network.narrow([parse_rule(f"{INNER}:80")])
