"""Payloads on the host's end: where they end, and how they are taken."""

import pytest

from protocol import HostConnection, LocalProtocolError, ProtocolError, messages
from tests.protocol.streams import parse

PING = messages.Ping()


def in_body(size: int, begin: bytes = b"") -> HostConnection:
    """Return a connection that has just parsed a WRITE of this size."""
    connection = HostConnection()
    message = connection.receive_data(b"WRITE 1000 %d\n" % size + begin)
    assert message == messages.Write(b"1000", size)
    return connection


def test_a_payload_is_data_whatever_it_holds() -> None:
    payload = b"PING\n\n\x00\xffWRITE 1 9\n"
    parsed = parse([b"WRITE 1000 %d\n%bPING\n" % (len(payload), payload)])
    assert parsed == [(messages.Write(b"1000", len(payload)), payload), (PING, b"")]


def test_a_payload_that_looks_like_a_remembered_line_is_data() -> None:
    line = b"WRITE 1000 13\n"
    parsed = parse([line, b"READ 1000 12\n", line, line[:13], b"READ 1000 12\n"])
    write = messages.Write(b"1000", 13)
    read = messages.Read(b"1000", 12)
    # spec W1: the 13 bytes behind a WRITE are its payload, however often it was seen.
    assert parsed == [(write, b"READ 1000 12\n"), (write, line[:13]), (read, b"")]


def test_no_message_is_given_out_before_the_body_is_taken() -> None:
    connection = in_body(3, b"abcPING\n")
    with pytest.raises(LocalProtocolError, match="3 body bytes are not taken yet"):
        connection.next_message()
    assert connection.take_body() == b"abc"
    assert connection.next_message() == PING


def test_bytes_that_come_within_a_body_are_no_message() -> None:
    connection = in_body(5)
    assert connection.receive_data(b"PING\nPING\n") is None  # spec W4
    assert connection.take_body() == b"PING\n"
    assert connection.next_message() == PING


def test_an_empty_body_is_no_body() -> None:
    connection = in_body(0, b"PING\n")
    assert connection.body_left == 0
    assert connection.take_body() == b""
    assert connection.next_message() == PING  # spec W1: size 0


def test_a_body_is_taken_as_it_comes() -> None:
    connection = in_body(6, b"ab")
    assert connection.take_body() == b"ab"
    assert connection.take_body() == b""
    assert connection.body_left == 4
    connection.receive_data(b"cd")
    assert connection.take_body() == b"cd"
    connection.receive_data(b"efPI")
    assert connection.take_body() == b"ef"
    assert connection.body_left == 0
    assert connection.next_message() is None
    assert connection.receive_data(b"NG\n") == PING


def test_a_body_may_go_past_the_connection() -> None:
    connection = in_body(6, b"ab")
    assert connection.take_body() == b"ab"
    connection.body_received(3)
    connection.body_received(1)
    assert connection.body_left == 0
    assert connection.receive_data(b"PING\n") == PING


def test_a_repeated_request_may_have_its_body_go_past_the_connection() -> None:
    connection = HostConnection()
    for _ in range(3):
        assert connection.receive_data(b"WRITE 1000 6\n") == messages.Write(b"1000", 6)
        connection.body_received(6)
        assert not connection.is_mid_message


def test_no_more_may_go_past_than_is_left() -> None:
    connection = in_body(6)
    with pytest.raises(LocalProtocolError, match="7 bytes are not the body's next"):
        connection.body_received(7)


def test_nothing_may_go_past_what_waits_in_the_connection() -> None:
    connection = in_body(6, b"ab")
    with pytest.raises(ProtocolError, match="1 bytes are not the body's next"):
        connection.body_received(1)


def test_a_body_can_be_made_longer_than_its_line_said() -> None:
    # spec L1: the three LFs that the seed's example does not count.
    connection = HostConnection()
    chat = connection.receive_data(b"LLM_CHAT false 0 0 0 7\n\n\n\ngeneralPING\n")
    assert isinstance(chat, messages.Chat)
    body = connection.take_body()
    assert body == b"\n\n\ngene"
    connection.extend_body(3)
    assert connection.body_left == 3
    assert connection.take_body() == b"ral"
    assert connection.next_message() == PING


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_pending_tells_whether_another_message_may_be_there(size: int) -> None:
    payload = b"x" * size
    connection = in_body(size, payload + b"PING\nPI")
    assert connection.take_body() == payload
    seen = [connection.pending]
    assert connection.next_message() == PING
    seen.append(connection.pending)
    assert connection.next_message() is None
    seen.append(connection.pending)
    assert connection.receive_data(b"NG\n") == PING
    seen.append(connection.pending)
    assert seen == [True, True, False, False]
