"""One HTTP/1.1 connection of a server, over a pair of sockets."""

import socket
from collections.abc import AsyncIterator

import h11
import pytest
import trio
import trio.testing

from hostlib.http1 import RECEIVE_BYTES, Connection, FramingError

GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n"
DEADLINE_S = 5.0


class Pair:
    """A connection, and the client's end of it."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        self.peer.setblocking(False)
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        self.connection = Connection(self.stream, DEADLINE_S, max_head_bytes=2048)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Make one; both ends are closed afterwards."""
    made = Pair()
    with made.peer, made.stream.socket:
        yield made


async def body_of(connection: Connection) -> bytes:
    """Receive a request's body to its end."""
    body = b""
    while piece := await connection.receive_piece():
        body += piece
    return body


async def test_requests_come_one_after_another(pair: Pair) -> None:
    http = pair.connection
    pair.peer.sendall(POST + b"hello" + GET)
    for method, body in ((b"POST", b"hello"), (b"GET", b"")):
        head = await http.receive_head()
        assert head is not None
        assert (head.method, await body_of(http)) == (method, body)
        assert http.idle_since is None
        http.begin()
        await http.reply(200, [("Content-Length", "2")], b"ok")
        assert pair.peer.recv(1000).endswith(b"\r\n\r\nok")
        assert http.next_cycle()
        assert http.idle_since is not None
    pair.peer.close()
    assert await http.receive_head() is None


# A hand-over reads again what has come of a request for which nothing was done.
async def test_what_has_come_of_a_request_is_known(pair: Pair) -> None:
    http = pair.connection
    pair.peer.sendall(POST + b"hello" + GET)
    await http.receive_head()
    assert bytes(http.received or b"") == POST + b"hello" + GET
    await body_of(http)
    http.begin()
    assert not http.received
    await http.reply(204, [], b"")
    assert http.next_cycle()
    assert http.received is not None
    assert bytes(http.received) == GET
    other = Connection(pair.stream, DEADLINE_S, ahead=bytes(http.received))
    head = await other.receive_head()
    assert head is not None
    assert head.target == b"/a"


# spec attack 33, RFC 9112 6.1
@pytest.mark.parametrize(
    ("sent", "status", "has_head"),
    [
        (POST[:-2] + b"Transfer-Encoding: chunked\r\n\r\n", 400, True),
        (POST[:-2] + b"Content-Length: 6\r\n\r\n", 400, False),
        (b"GET /a HTTP/1.1\r\n\r\n", 400, False),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, False),
        (b"GET /" + b"a" * 4000, 431, False),
        (POST.replace(b"5", b"5" * 5000), 400, False),
    ],
)
async def test_what_is_no_request_is_refused(
    pair: Pair, sent: bytes, status: int, has_head: bool
) -> None:
    pair.peer.sendall(sent)
    pair.peer.shutdown(socket.SHUT_WR)
    with pytest.raises(FramingError) as raised:
        await pair.connection.receive_head()
    assert (raised.value.status, raised.value.head is not None) == (status, has_head)
    assert pair.connection.can_reply
    await pair.connection.reply(status, [("Content-Length", "0")], b"")
    assert pair.peer.recv(100).startswith(b"HTTP/1.1 %d" % status)
    assert not pair.connection.next_cycle()


async def test_a_body_that_ends_early_is_refused(pair: Pair) -> None:
    pair.peer.sendall(POST + b"hel")
    pair.peer.shutdown(socket.SHUT_WR)
    await pair.connection.receive_head()
    with pytest.raises(FramingError):
        await body_of(pair.connection)


# spec MD7: who idles is not cut off, who has begun has a deadline, head and body.
@pytest.mark.parametrize("sent", [b"", GET[:9], POST, POST + b"hel"])
async def test_a_request_that_began_has_a_deadline(
    pair: Pair, sent: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    http = pair.connection
    pair.peer.sendall(sent)
    begun_s = trio.current_time()
    with trio.move_on_after(1000) as scope:
        with pytest.raises(trio.TooSlowError) if sent else trio.CancelScope():
            await http.receive_head()
            await body_of(http)
        assert trio.current_time() == begun_s + DEADLINE_S
    assert scope.cancelled_caught is (not sent)


async def test_a_reply_that_is_not_taken_has_a_deadline(
    pair: Pair, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    pair.peer.sendall(GET)
    await pair.connection.receive_head()
    with pytest.raises(trio.TooSlowError):
        await pair.connection.reply(200, [], b"x" * 10_000_000)
    assert pair.connection.is_sending


async def test_what_is_left_of_a_refused_request_is_thrown_away(pair: Pair) -> None:
    http = pair.connection
    pair.peer.sendall(POST)
    await http.receive_head()
    http.begin()
    await http.reply(401, [("Content-Length", "0")], b"")
    pair.peer.sendall(b"hello" + GET)
    await http.discard(100)
    assert http.next_cycle()
    head = await http.receive_head()
    assert head is not None
    assert head.method == b"GET"


async def test_a_head_is_answered_without_a_body(pair: Pair) -> None:
    pair.peer.sendall(GET.replace(b"GET", b"HEAD"))
    await pair.connection.receive_head()
    await pair.connection.reply(200, [("Content-Length", "2")], b"ok")
    assert pair.peer.recv(1000).endswith(b"\r\n\r\n")


async def test_a_client_that_goes_is_noticed(pair: Pair) -> None:
    http = pair.connection
    pair.peer.sendall(GET)
    await http.receive_head()
    await body_of(http)
    pair.peer.sendall(GET)
    pair.peer.shutdown(socket.SHUT_WR)
    await http.wait_gone()
    # The bytes that it sent before are its next request.
    await http.reply(200, [("Content-Length", "0")], b"")
    assert http.next_cycle()
    assert isinstance(await http.receive_head(), h11.Request)


# spec S5: of what a client sends meanwhile no more is kept than one piece.
async def test_a_client_that_sends_on_is_not_listened_to(
    pair: Pair, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    http = pair.connection
    pair.peer.sendall(GET)
    await http.receive_head()
    await body_of(http)
    pair.peer.sendall(b"x" * (RECEIVE_BYTES + 10))
    with trio.move_on_after(1):
        await http.wait_gone()
    assert len(http.http.trailing_data[0]) == RECEIVE_BYTES
