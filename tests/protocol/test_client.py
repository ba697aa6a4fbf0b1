"""The child's end: what it sends, and what it makes of a host's replies."""

import pytest

from protocol import ClientConnection, LocalProtocolError, RemoteProtocolError, messages
from protocol.limits import MAX_REPLY_LINE_BYTES
from tests.protocol.streams import Replied, parse_replies

READ = messages.Read(b"1000", 5)
WRITE = messages.Write(b"1000", 5)
CLOSE = messages.Close(b"1000")
QUOTA = messages.Quota()
CHAT = messages.Chat(True, 0, 0, 2, 0)


def only(request: messages.Request, stream: bytes) -> Replied | str:
    """Return what the stream is as the reply to one request."""
    (reply,) = parse_replies([request], [stream])
    return reply


@pytest.mark.parametrize(
    ("request_", "line", "reply"),
    [
        (messages.Open(b"a", b"r", True), b"OK 1000\n", (b"1000", 1000, b"")),
        (READ, b"OK 5\nab\ncd", (b"5", 5, b"ab\ncd")),
        (READ, b"OK 0\n", (b"0", 0, b"")),
        (WRITE, b"OK 5\n", (b"5", 5, b"")),
        (CLOSE, b"OK\n", (b"", 0, b"")),
        (messages.Attach(), b"OK c-7\n", (b"c-7", 0, b"")),
        (QUOTA, b"OK 1.5/5 weighted tokens\n", (b"1.5/5 weighted tokens", 0, b"")),
        (messages.FdPut(3), b"OK t1\n", (b"t1", 0, b"")),
        (CHAT, b"OK 2 1/5 weighted\n{}", (b"2 1/5 weighted", 2, b"{}")),
        (messages.Config(), b"OK 2\n{}", (b"2", 2, b"{}")),
    ],
)
def test_a_reply_is_read_as_its_request_wants_it(
    request_: messages.Request, line: bytes, reply: tuple[bytes, int, bytes]
) -> None:
    assert only(request_, line) == Replied(True, *reply)


@pytest.mark.parametrize("request_", [READ, WRITE, CLOSE, CHAT, QUOTA])
def test_an_error_has_no_body(request_: messages.Request) -> None:
    found = only(request_, b"ERROR invalid fileno: 1000\n")
    assert found == Replied(False, b"invalid fileno: 1000", 0, b"")


def test_an_error_may_say_nothing() -> None:
    assert only(CLOSE, b"ERROR\n") == Replied(False, b"", 0, b"")


def test_the_replies_come_in_the_order_of_the_requests() -> None:
    stream = b"OK 3\nOK\nOK\nERROR no\nOK 1\n."
    # spec T3
    assert parse_replies([READ, CLOSE, CLOSE, READ], [stream]) == [
        Replied(True, b"3", 3, b"OK\n"),
        Replied(True, b"", 0, b""),
        Replied(False, b"no", 0, b""),
        Replied(True, b"1", 1, b"."),
    ]


def test_no_reply_is_given_before_its_line_is_whole() -> None:
    connection = ClientConnection()
    connection.send(CLOSE)
    assert connection.next_reply() is None
    connection.receive_data(b"O")
    assert connection.next_reply() is None
    connection.receive_data(b"K\n")
    reply = connection.next_reply()
    assert reply is not None
    assert reply.ok


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"FINE 5\n", "not a reply: b'FINE 5'"),
        (b"ok 5\n", "not a reply: b'ok 5'"),
        (b"\n", "not a reply: b''"),
        (b"OK\n", "the reply lacks a number: b'OK'"),
        (b"OK five\n", "the reply lacks a number: b'OK five'"),
        (b"OK -1\n", "the reply lacks a number: b'OK -1'"),
        (b"OK  5\n", "the reply lacks a number: b'OK  5'"),
        (b"X" * (MAX_REPLY_LINE_BYTES + 1), "the host's reply line is too long"),
    ],
)
def test_what_is_no_reply_is_the_fault_of_the_host(line: bytes, why: str) -> None:
    assert only(READ, line) == why


def test_a_wrong_reply_is_shown_in_part() -> None:
    connection = ClientConnection()
    connection.send(CLOSE)
    connection.receive_data(b"X" * 500 + b"\n")
    with pytest.raises(RemoteProtocolError) as caught:
        connection.next_reply()
    assert len(str(caught.value)) < 100


def test_a_reply_must_have_been_asked_for() -> None:
    connection = ClientConnection()
    connection.receive_data(b"OK\n")
    with pytest.raises(LocalProtocolError, match="no request waits for a reply"):
        connection.next_reply()


def test_a_body_must_be_taken_before_the_next_reply() -> None:
    connection = ClientConnection()
    connection.send(READ)
    connection.send(CLOSE)
    connection.receive_data(b"OK 5\nab")
    assert connection.next_reply() is not None
    with pytest.raises(LocalProtocolError, match="5 body bytes are not taken yet"):
        connection.next_reply()
    assert connection.take_body() == b"ab"
    connection.body_received(3)
    connection.receive_data(b"OK\n")
    assert connection.next_reply() is not None


def test_what_goes_past_the_connection_must_be_the_body() -> None:
    connection = ClientConnection()
    connection.send(READ)
    connection.receive_data(b"OK 5\nab")
    connection.next_reply()
    with pytest.raises(LocalProtocolError, match="3 bytes are not the body's next"):
        connection.body_received(3)
    assert connection.take_body() == b"ab"
    with pytest.raises(LocalProtocolError, match="4 bytes are not the body's next"):
        connection.body_received(4)


@pytest.mark.parametrize(
    "request_",
    [
        messages.Open(b"", b"r", True),
        messages.Open(b" a", b"r", True),
        messages.Open(b"a\nPING", b"r", True),
        messages.Open(b"a", b"rw", True),
        messages.Open(b"a", b"r", None),
        messages.Stat(True, b"a\r"),
        messages.Stat(True, b"a\t"),
        messages.Remove(True, b"a\nb"),
        messages.Close(b" 12"),
        messages.Close(b"12\n"),
        messages.Close(b"1" * 19),
        messages.Seek(b"1000", -1),
        messages.Read(b"1000", 10**18),
        messages.Write(b"abc", 5, messages.NO_FILENO),
        messages.Rename(True, -1, 1),
        messages.Narrow(-1),
        messages.FdPut(5, b"two tokens"),
        messages.FdPut(5, b"t\n"),
        messages.FdPut(5, b""),
        messages.Chat(True, 0, 10**18, 0, 0),
    ],
)
def test_what_would_not_parse_back_is_not_sent(request_: messages.Request) -> None:
    connection = ClientConnection()
    with pytest.raises(ValueError, match="cannot be sent as a request line"):
        connection.send(request_)
    with pytest.raises(LocalProtocolError, match="no request waits"):
        connection.next_reply()


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (messages.Open(b"a b", b"r+", True), b"OPEN a b r+ user\n"),
        (messages.Open(b"a b", b"r+", False), b"OPEN a b r+ internal\n"),
        (messages.Open(b"a b", b"r+", None), b"OPEN a b r+\n"),
        (messages.Stat(True, b"a b"), b"STAT true a b\n"),
    ],
)
def test_a_child_of_dialect_1_names_a_context(
    request_: messages.Request, line: bytes
) -> None:
    assert ClientConnection(1).send(request_) == line  # spec O5


def test_a_name_that_would_be_a_mode_and_a_context_is_not_sent() -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        ClientConnection(1).send(messages.Open(b"a r", b"w", None))  # spec O5
