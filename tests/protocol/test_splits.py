"""However the bytes are cut, they mean the same; and no bytes do harm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import HostConnection, messages
from protocol.limits import MAX_ECHO_BYTES, MAX_LINE_BYTES
from tests.helpers.rounds import LONG
from tests.protocol import strategies
from tests.protocol.streams import (
    Reader,
    check_replies,
    check_requests,
    cut,
    expected,
    parse,
)

dialects = st.sampled_from([1, 2])

EXAMPLES = 400 if LONG else 100
"""For the tests that find most, also where others have fewer."""


@pytest.mark.slow
@pytest.mark.chaos
@settings(max_examples=EXAMPLES)
@given(strategies.streams, strategies.sizes, dialects)
def test_any_split_of_the_requests_gives_the_same_messages(
    stream: bytes, sizes: list[int], dialect: int
) -> None:
    check_requests(stream, sizes, dialect)


@pytest.mark.slow
@given(strategies.streams, dialects)
def test_requests_may_come_byte_by_byte(stream: bytes, dialect: int) -> None:
    check_requests(stream, [1] * len(stream), dialect)


@settings(max_examples=40)
@given(strategies.long_streams, strategies.long_sizes)
def test_lines_about_the_limit_may_be_split_anywhere(
    stream: bytes, sizes: list[int]
) -> None:
    check_requests(stream, sizes)  # spec F4


replies = st.lists(
    st.one_of(
        st.sampled_from([b"OK\n", b"OK 0\n", b"ERROR no\n", b"OK 5 of 9\nabcde"]),
        st.integers(0, 30).map(lambda n: b"OK %d\n" % n + b"\n" * n),
        st.binary(max_size=12),
    ),
    max_size=10,
).map(b"".join)


@pytest.mark.slow
@given(
    st.lists(strategies.requests(strategies.small), max_size=10),
    replies,
    strategies.sizes,
)
def test_any_split_of_the_replies_gives_the_same(
    requests: list[messages.Request], stream: bytes, sizes: list[int]
) -> None:
    check_replies(requests, stream, sizes)


def test_a_difference_is_told_in_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b"PING\nSTAT true " + b"x" * 60_000 + b"\n"
    # A limit that only one of the two ways of parsing keeps.
    monkeypatch.setattr("tests.protocol.streams.MAX_LINE_BYTES", 50_000)
    with pytest.raises(AssertionError, match=r"number 1 is .*Stat") as caught:
        check_requests(stream, [3])
    assert len(str(caught.value)) < 1000


def test_the_comparison_sees_a_difference() -> None:
    # A connection that forgot where it was would parse the pieces as these do.
    assert parse([b"PI", b"NG\n"]) == expected(b"PING\n")
    assert parse([b"PI\n", b"NG\n"]) != expected(b"PING\n")
    assert expected(b"WRITE 1 5\nPING\n") != expected(b"WRITE 1 4\nPING\n")


@pytest.mark.slow
@pytest.mark.chaos
@settings(max_examples=EXAMPLES)
@given(st.lists(st.one_of(strategies.garbage, strategies.word_lines())), dialects)
def test_every_line_outside_a_payload_gives_one_message(
    pieces: list[bytes], dialect: int
) -> None:
    reader = Reader(dialect)
    for piece in pieces:
        reader.feed(piece)
    # spec F3: the messages account for every LF that is not a payload's.
    stream = b"".join(pieces)
    at = 0
    for parsed in reader.parsed:
        at = stream.index(b"\n", at) + 1
        assert stream[at : at + len(parsed.body)] == parsed.body
        at += len(parsed.body)
    assert b"\n" not in stream[at:] or reader.connection.body_left


@pytest.mark.slow
@pytest.mark.chaos
@settings(max_examples=EXAMPLES)
@given(
    st.one_of(
        st.binary(max_size=400),
        strategies.word_lines(),
        st.builds(
            lambda head, tail: head + b" " + tail,
            st.sampled_from([b"OPEN f", b"READ", b"WRITE 1", b"STAT", b"CLOSE", b"X"]),
            st.binary(min_size=150, max_size=400),
        ),
    ),
    dialects,
)
def test_a_refusal_is_one_line_without_control_bytes(line: bytes, dialect: int) -> None:
    (parsed, *_) = parse([line.replace(b"\n", b"") + b"\n"], dialect)
    if not isinstance(parsed.message, messages.Refusal):
        return
    text = parsed.message.reply.removesuffix(b"\n")
    assert text.startswith(b"ERROR ")
    assert not [byte for byte in text if byte < 32 or byte == 127]  # spec F6
    echoed = text.partition(b": ")[2]
    assert len(echoed) <= MAX_ECHO_BYTES


@pytest.mark.slow
@given(strategies.streams, strategies.sizes, dialects)
def test_pending_is_false_only_if_nothing_is_there(
    stream: bytes, sizes: list[int], dialect: int
) -> None:
    connection = HostConnection(dialect)
    for piece in cut(stream, sizes):
        message = connection.receive_data(piece)
        while message is not None or connection.pending:
            if connection.body_left and not connection.take_body():
                break
            message = None if connection.body_left else connection.next_message()
        if not connection.body_left:
            assert connection.next_message() is None


@settings(max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=30_000), max_size=8))
def test_what_is_held_is_bounded_by_the_longest_line(pieces: list[bytes]) -> None:
    reader = Reader()
    for piece in pieces:
        reader.feed(piece.replace(b"\n", b"x") * 4)
        assert len(reader.connection.unread()[0]) <= MAX_LINE_BYTES  # spec F4, I9
