"""Requests of programs to the proxy: HTTP and SOCKS5, byte by byte, and refusals."""

import re
from ipaddress import IPv4Address, IPv6Address

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from supervisor.network.hosts import Address
from supervisor.network.proxy_dialogue import Dialogue, ProxyError, ProxyTarget
from supervisor.network.proxy_http import MAX_HEAD_BYTES
from supervisor.network.proxy_server import open_dialogue
from supervisor.network.reasons import NetworkRefusal, Reason

END = b"\r\n\r\n"


def asking(data: bytes, size: int = 1_000_000) -> tuple[Dialogue, ProxyTarget | None]:
    """Return the dialogue that bytes begin, and what they ask for, sent in pieces."""
    dialogue = open_dialogue(data[0])
    asked = None
    for at in range(0, len(data), size):
        if asked is None:
            asked = dialogue.receive(data[at : at + size])
    return dialogue, asked


def refused(data: bytes) -> bytes:
    """Return what is sent before the connection ends."""
    with pytest.raises(ProxyError) as caught:
        asking(data)
    return caught.value.reply


def status(reply: bytes) -> int:
    """Return the status of an HTTP reply that is whole."""
    head, body = reply.split(END, 1)
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    assert int(length[1]) == len(body)
    assert b"Connection: close" in head
    msgspec.json.decode(body)
    return int(head.split()[1])


# spec NET8: CONNECT
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("target", "host", "port"),
    [
        ("a.test:443", "a.test", 443),
        ("A.Test.:22", "a.test", 22),
        ("198.18.0.2:80", IPv4Address("198.18.0.2"), 80),
        ("[2001:db8::1]:443", IPv6Address("2001:db8::1"), 443),
    ],
)
def test_connect_asks_for_a_host(
    target: str, host: str | Address, port: int, size: int
) -> None:
    head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nUser-Agent: x\r\n\r\n"
    dialogue, asked = asking(head.encode(), size)
    assert asked == ProxyTarget(host, port)
    assert dialogue.accept() == b"HTTP/1.1 200 Connection established\r\n\r\n"
    assert dialogue.forward() == b""
    assert dialogue.forward(b"any\0bytes\n") == b"any\0bytes\n"


def test_what_comes_behind_connect_goes_through_the_tunnel() -> None:
    head = b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n"
    dialogue, asked = asking(head + b"\x16\x03\x01\n")
    assert asked == ProxyTarget("a.test", 443)
    assert dialogue.forward() == b"\x16\x03\x01\n"
    assert dialogue.forward(b"more") == b"more"


def forwarded(request: bytes, size: int = 1_000_000) -> tuple[ProxyTarget, bytes]:
    """Return what a request in absolute form asks for, and what the server gets."""
    dialogue, asked = asking(request, size)
    assert asked is not None
    assert dialogue.accept() == b""
    return asked, dialogue.forward()


# spec NET8: Host from the URL, no hop-by-hop fields, one request a connection.
def test_a_url_is_asked_for_as_its_server_expects() -> None:
    asked, sent = forwarded(
        b"GET http://A.test:8080/x?y=1 HTTP/1.1\r\n"
        b"Host: other.test\r\n"
        b"Accept: */*\r\n"
        b"Connection: keep-alive, X-Mine\r\n"
        b"Keep-Alive: timeout=5\r\n"
        b"Proxy-Connection: keep-alive\r\n"
        b"Proxy-Authorization: Basic eA==\r\n"
        b"Upgrade: h2c\r\n"
        b"TE: trailers\r\n"
        b"X-Mine: 1\r\n"
        b"X-Yours: 2\r\n\r\n"
    )
    assert asked == ProxyTarget("a.test", 8080)
    assert sent == (
        b"GET /x?y=1 HTTP/1.1\r\nHost: a.test:8080\r\nAccept: */*\r\nX-Yours: 2\r\n"
        b"Connection: close\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("url", "path", "host"),
    [
        (b"http://a.test", b"/", b"a.test"),
        (b"HTTP://a.test/", b"/", b"a.test"),
        (b"http://a.test?q", b"/?q", b"a.test"),
        (b"http://a.test:80/a@b:c/[]", b"/a@b:c/[]", b"a.test"),
        (b"http://[2001:db8::1]:81/", b"/", b"[2001:db8::1]:81"),
    ],
)
def test_the_forms_of_a_url(url: bytes, path: bytes, host: bytes) -> None:
    _, sent = forwarded(b"HEAD %s HTTP/1.1\r\nHost: x\r\n\r\n" % url)
    expected = b"HEAD %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n"
    assert sent == expected % (path, host)


def test_a_request_of_http_1_0_is_answered_as_one() -> None:
    _, sent = forwarded(b"GET http://a.test/ HTTP/1.0\r\n\r\n")
    assert sent == b"GET / HTTP/1.0\r\nHost: a.test\r\nConnection: close\r\n\r\n"


NEXT = b"GET http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n"
POST = b"POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\n%s\r\n%s"
SENT = b"POST / HTTP/1.1\r\nHost: a.test\r\n%sConnection: close\r\n\r\n%s"


# spec NET8: nothing of a second request reaches the server.
@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("field", "body", "sent"),
    [
        (b"", b"", SENT % (b"", b"")),
        (
            b"Content-Length: 5\r\n",
            b"a\0\nbc",
            SENT % (b"Content-Length: 5\r\n", b"a\0\nbc"),
        ),
    ],
)
def test_only_the_first_request_is_sent(
    field: bytes, body: bytes, sent: bytes, size: int
) -> None:
    dialogue, asked = asking(POST % (field, b""))
    assert asked is not None
    got = dialogue.forward()
    stream = body + NEXT
    for at in range(0, len(stream), size):
        got += dialogue.forward(stream[at : at + size])
    assert got == sent


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_chunks_are_written_anew(size: int) -> None:
    dialogue, _ = asking(POST % (b"Transfer-Encoding: Chunked\r\n", b""))
    got = dialogue.forward()
    stream = b"5;ext=1\r\nhello\r\n0005\r\nworld\r\n0\r\nX-Trailer: 1\r\n\r\n" + NEXT
    for at in range(0, len(stream), size):
        got += dialogue.forward(stream[at : at + size])
    head, body = got.split(END, 1)
    assert head == (SENT % (b"Transfer-Encoding: chunked\r\n", b"")).removesuffix(END)
    assert unchunked(body) == b"helloworld"


def unchunked(body: bytes) -> bytes:
    """Return what chunks hold that are written in the strict form."""
    found = b""
    while not body.startswith(b"0\r\n"):
        size, body = body.split(b"\r\n", 1)
        length = int(size, 16)
        found += body[:length]
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]
    assert body == b"0\r\n\r\n"
    return found


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n",
        b"5 5\r\nhello",
        b"-1\r\n",
        b"5\r\nhelloX\r\n",
        b"5\nhello\r\n0\r\n\r\n",
    ],
)
def test_odd_chunks_end_the_connection(body: bytes) -> None:
    dialogue, _ = asking(POST % (b"Transfer-Encoding: chunked\r\n", b""))
    dialogue.forward()
    with pytest.raises(ProxyError):
        dialogue.forward(body)


GET = b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n"
CONNECT = b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n"


# spec NET8: what is refused; attack 33
# attack 59
@pytest.mark.parametrize(
    "head",
    [
        # lines
        CONNECT.replace(b"\r\n", b"\n") + b"\n",
        GET + b"X: 1\nY: 2" + END,
        GET + b"X: 1\rY: 2" + END,
        GET + b"X: 1\r\r\n\r\n",
        GET + b"X: a\0b" + END,
        b"\r\n" + GET + b"\r\n",
        b"\n" + GET + b"\r\n",
        GET + b"X: 1\r\n folded" + END,
        GET + b"\tX: 1" + END,
        GET + b"X : 1" + END,
        GET + b"X" + END,
        GET + b"X: " + b"a" * MAX_HEAD_BYTES,
        b"A" * (MAX_HEAD_BYTES + 1),
        b" " + GET + b"\r\n",
        b"\x16\3\1\2\0" + bytes(100),
        # request lines
        b"GET / HTTP/1.1\r\nHost: a.test" + END,
        b"OPTIONS * HTTP/1.1\r\nHost: a.test" + END,
        b"GET a.test HTTP/1.1\r\nHost: a.test" + END,
        b"GET https://a.test/ HTTP/1.1\r\nHost: a.test" + END,
        b"GET ftp://a.test/ HTTP/1.1\r\nHost: a.test" + END,
        b"GET http:/a.test/ HTTP/1.1\r\nHost: a.test" + END,
        b"GET http:///x HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://a.test/#x HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://a.test/ HTTP/2.0\r\nHost: a.test" + END,
        b"GET http://a.test/ HTTP/0.9\r\nHost: a.test" + END,
        b"GET  http://a.test/ HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://a.test/ HTTP/1.1\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nHost: b.test" + END,
        b"CONNECT http://a.test:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT a.test HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT a.test: HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT a.test:0 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT a.test:65536 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT a.test:0443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT a.test:443/ HTTP/1.1\r\nHost: a.test" + END,
        # hosts
        b"CONNECT jo@a.test:443 HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://jo:pw@a.test/ HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://a.test@b.test/ HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT 2130706433:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT 0177.0.0.1:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT 0x7f.1:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT 127.1:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT [::ffff:127.0.0.1]:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT [fe80::1%lo]:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT ::1:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT [::1:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT x[::1]:443 HTTP/1.1\r\nHost: a.test" + END,
        b"CONNECT [::1]x:443 HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://a.test\\@b.test/ HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://a%2etest/ HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://a.test:/ HTTP/1.1\r\nHost: a.test" + END,
        b"GET http://*/ HTTP/1.1\r\nHost: a.test" + END,
        # bodies
        GET + b"Content-Length: 1\r\nTransfer-Encoding: chunked" + END,
        GET + b"Content-Length: 1\r\nContent-Length: 2" + END,
        GET + b"Content-Length: +1" + END,
        GET + b"Transfer-Encoding: gzip, chunked" + END,
        GET + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked" + END,
        GET + b"Connection: close, Content-Length\r\nContent-Length: 1" + END,
        GET + b"Connection: host" + END,
        b"GET http://a.test/ HTTP/1.0\r\nTransfer-Encoding: chunked" + END,
    ],
)
def test_a_request_that_could_be_read_in_two_ways_is_refused(head: bytes) -> None:
    assert status(refused(head)) == 400
    with pytest.raises(ProxyError):
        asking(head, 1)


# attack 59
@pytest.mark.parametrize(
    ("head", "detail"),
    [
        (b"CONNECT jo@a.test:443 HTTP/1.1\r\nHost: a.test" + END, "a user's name"),
        (b"CONNECT 0x7f.1:443 HTTP/1.1\r\nHost: a.test" + END, "dotted decimal"),
        (b"CONNECT a.test HTTP/1.1\r\nHost: a.test" + END, "a port is missing"),
        (b"GET / HTTP/1.1\r\nHost: a.test" + END, "CONNECT and http:// URLs"),
        (GET + b"X: 1\nY: 2" + END, "CR LF"),
        (GET + b"X: " + b"a" * MAX_HEAD_BYTES, "longer than 16384"),
    ],
)
def test_what_is_wrong_with_a_request_is_told(head: bytes, detail: str) -> None:
    body = msgspec.json.decode(refused(head).split(END)[1])
    assert body["error"] == "bad_request"
    assert detail in body["detail"]


NO_RULE = NetworkRefusal(Reason.NO_RULE, "a.test:443")


# spec NET11: the 403 says which rule would allow it.
def test_a_refusal_tells_the_rule_that_would_allow_it() -> None:
    dialogue, _ = asking(CONNECT + b"\r\n")
    reply = dialogue.refuse(NO_RULE)
    assert status(reply) == 403
    assert msgspec.json.decode(reply.split(END)[1]) == {
        "error": "policy_denied",
        "name": "a.test",
        "port": 443,
        "reason": "no-rule",
        "rule": "a.test:443",
        "detail": "cannot connect to a.test:443: no rule allows it;"
        " the rule 'a.test:443' would allow it",
    }


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_can_be_told(reason: Reason) -> None:
    dialogue, _ = asking(b"GET http://[2001:db8::1]/ HTTP/1.1\r\nHost: x" + END)
    body = msgspec.json.decode(dialogue.refuse(NetworkRefusal(reason)).split(END)[1])
    assert body["reason"] == reason.value
    assert body["rule"] is None
    assert body["name"] == "2001:db8::1"
    assert body["detail"].startswith("cannot connect to [2001:db8::1]:80: ")


def test_a_refusal_by_a_rule_tells_that_rule() -> None:
    dialogue, _ = asking(GET + b"\r\n")
    by_rule = NetworkRefusal(Reason.REFUSED_BY_RULE, "!*.test")
    body = msgspec.json.decode(dialogue.refuse(by_rule).split(END)[1])
    assert body["detail"].endswith("a rule refuses it; the rule '!*.test' refuses it")


def test_a_host_that_cannot_be_reached_is_told_so() -> None:
    dialogue, _ = asking(CONNECT + b"\r\n")
    reply = dialogue.fail()
    assert status(reply) == 502
    body = {"error": "unreachable", "name": "a.test", "port": 443}
    assert msgspec.json.decode(reply.split(END)[1]) == body


GREETING = b"\5\1\0"
BY_NAME = b"\5\1\0\3\6A.test\1\xbb"
EMPTY_ADDRESS = b"\0\1" + bytes(6)


# spec NET8: SOCKS5, CONNECT only; names go to the host.
@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("request_", "host"),
    [
        (BY_NAME, "a.test"),
        (b"\5\1\0\1\xc6\x12\0\2\1\xbb", IPv4Address("198.18.0.2")),
        (b"\5\1\0\3\x0a198.18.0.2\1\xbb", IPv4Address("198.18.0.2")),
        (
            b"\5\1\0\4" + IPv6Address("2001:db8::1").packed + b"\1\xbb",
            IPv6Address("2001:db8::1"),
        ),
    ],
)
@pytest.mark.parametrize("greeting", [GREETING, b"\5\3\2\1\0"])
def test_socks_asks_for_a_host(
    greeting: bytes, request_: bytes, host: str | Address, size: int
) -> None:
    dialogue, asked = asking(greeting + request_, size)
    assert asked == ProxyTarget(host, 443)
    assert dialogue.take_reply() == b"\5\0"
    assert dialogue.take_reply() == b""
    assert dialogue.accept() == b"\5\0" + EMPTY_ADDRESS
    assert dialogue.refuse(NO_RULE) == b"\5\2" + EMPTY_ADDRESS
    assert dialogue.fail() == b"\5\5" + EMPTY_ADDRESS
    assert dialogue.forward(b"data") == b"data"


def test_what_comes_behind_the_socks_request_goes_through_the_tunnel() -> None:
    dialogue, asked = asking(GREETING + BY_NAME + b"early")
    assert asked == ProxyTarget("a.test", 443)
    assert dialogue.forward() + dialogue.forward(b" bytes") == b"early bytes"


def test_the_method_is_told_before_the_request_comes() -> None:
    dialogue, asked = asking(GREETING)
    assert asked is None
    assert dialogue.take_reply() == b"\5\0"
    assert dialogue.receive(BY_NAME) == ProxyTarget("a.test", 443)
    assert dialogue.take_reply() == b""


# spec NET8: SOCKS4, BIND, UDP ASSOCIATE and other number forms are refused.
# attack 59
@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"\4\1\1\xbb\1\2\3\4\0", b"\0\x5b" + bytes(6)),
        (b"\5\0", b"\5\xff"),
        (b"\5\2\1\2", b"\5\xff"),
        (GREETING + b"\5\2" + BY_NAME[2:], b"\5\7" + EMPTY_ADDRESS),
        (GREETING + b"\5\3" + BY_NAME[2:], b"\5\7" + EMPTY_ADDRESS),
        (GREETING + b"\5\1\0\2\6a.test\1\xbb", b"\5\x08" + EMPTY_ADDRESS),
        (GREETING + b"\5\1\0\3\6a.test\0\0", b"\5\2" + EMPTY_ADDRESS),
        (GREETING + b"\5\1\0\3\0\1\xbb", b"\5\2" + EMPTY_ADDRESS),
        (GREETING + b"\5\1\0\3\3a\0b\1\xbb", b"\5\2" + EMPTY_ADDRESS),
        (GREETING + b"\5\1\0\3\3\xc3\xa4b\1\xbb", b"\5\2" + EMPTY_ADDRESS),
        (GREETING + b"\5\1\0\3\x0a2130706433\1\xbb", b"\5\2" + EMPTY_ADDRESS),
        (GREETING + b"\5\1\0\3\x060x7f.1\1\xbb", b"\5\2" + EMPTY_ADDRESS),
        (GREETING + b"\5\1\0\3\3::1\1\xbb", b"\5\2" + EMPTY_ADDRESS),
        (
            GREETING + b"\5\1\0\4" + bytes(10) + b"\xff\xff\x7f\0\0\1\1\xbb",
            b"\5\2" + EMPTY_ADDRESS,
        ),
        (GREETING + b"\4" + BY_NAME[1:], b""),
        (GREETING + b"\5\1\1" + BY_NAME[3:], b""),
    ],
)
def test_what_socks_is_not_done(data: bytes, reply: bytes) -> None:
    assert refused(data) == reply


# attack 59
@given(st.binary(min_size=1, max_size=300), st.integers(1, 40))
@example(GREETING + BY_NAME, 7)
@example(GET + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 5)
def test_any_bytes_ask_for_a_host_or_end_the_connection(data: bytes, size: int) -> None:
    try:
        dialogue, asked = asking(data, size)
        if asked is not None:
            assert 0 < asked.port < 65_536
            dialogue.forward()
    except ProxyError as why:
        assert len(why.reply) < 600  # noqa: PT017 - most bytes are none
