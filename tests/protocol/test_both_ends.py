"""The two ends joined without a socket: what one says, the other hears."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import COMMANDS, ClientConnection, HostConnection, messages
from protocol.grammar import format_request, parse_request
from protocol.messages import NO_FILENO, Open, Refusal
from tests.protocol import strategies
from tests.protocol.streams import Replied, parse, parse_replies


@given(strategies.requests(), st.sampled_from([1, 2]))
def test_a_request_that_was_sent_is_the_one_that_arrives(
    request: messages.Request, dialect: int
) -> None:
    try:
        line = format_request(request, dialect)
    except ValueError:
        # Only dialect 1 has names that it cannot say: `a r` opened for `w`.
        assert dialect == 1
        assert isinstance(request, Open)
        return
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parse_request(line[:-1], dialect) == request


@given(st.one_of(strategies.word_lines(), strategies.garbage), st.sampled_from([1, 2]))
def test_a_line_that_parses_is_formatted_to_one_that_means_the_same(
    line: bytes, dialect: int
) -> None:
    request = parse_request(line.partition(b"\n")[0], dialect)
    if isinstance(request, Refusal):
        return
    if isinstance(request, messages.Write) and request.fileno == NO_FILENO:
        return  # refused too, by the host (spec W6)
    if isinstance(request, messages.NameRequest) and request.name.endswith(b"\r"):
        return  # blanks stood behind it: without them CR is the line's end (spec F1)
    line = format_request(request, dialect)
    assert parse_request(line[:-1], dialect) == request


@given(
    st.one_of(
        strategies.word_lines(),
        strategies.requests().map(format_request),
        strategies.requests().map(lambda request: format_request(request) + b" x"),
    ),
    st.sampled_from([1, 2]),
)
def test_a_blank_before_a_line_changes_nothing(line: bytes, dialect: int) -> None:
    # spec F1: and so a shape that is parsed by a short cut means what any shape means.
    line = line.replace(b"\n", b"")
    assert parse_request(b" " + line, dialect) == parse_request(line, dialect)
    assert parse_request(line, dialect) == parse_request(line + b"\r", dialect) or (
        line.endswith(b"\r")
    )


@pytest.mark.slow
@given(
    st.lists(strategies.requests(strategies.small), max_size=8),
)
def test_a_dialogue_stays_in_step(
    requests: Sequence[messages.Request],
) -> None:
    child, host = ClientConnection(), HostConnection()
    for request in requests:
        payload = bytes(range(request.body))
        line = child.send(request)
        arrived = host.receive_data(line + payload)
        assert arrived == request
        assert arrived is not None
        assert host.take_body() == payload
        assert not host.is_mid_message
        child.receive_data(_answer(request))
        reply = child.next_reply()
        assert reply is not None
        assert reply.ok
        assert child.take_body() == b"#" * reply.body


def _answer(request: messages.Request) -> bytes:
    kind = next(row.reply for row in COMMANDS.values() if row.message is type(request))
    return {
        "empty": b"OK\n",
        "number": b"OK 7\n",
        "body": b"OK 3\n###",
        "text": b"OK some text\n",
        "chat": b"OK 3 some status\n###",
    }[kind]


def test_pipelined_requests_are_answered_in_order() -> None:
    # spec T3, T4: a body that looks like a reply stands where it was declared.
    child = ClientConnection()
    requests = [
        Open(b"a b", b"w", False),
        messages.Write(b"1000", 3),
        messages.Seek(b"1000", 0),
        messages.Read(b"1000", 3),
        messages.Close(b"1000"),
    ]
    bodies = [b"", b"\nx\n", b"", b"", b""]
    stream = b"".join(
        child.send(request) + body
        for request, body in zip(requests, bodies, strict=True)
    )
    assert parse([stream]) == list(zip(requests, bodies, strict=True))
    replies = b"OK 1000\nOK 3\nOK 0\nOK 3\nOK\nOK\n"
    assert parse_replies(requests, [replies]) == [
        Replied(True, b"1000", 1000, b""),
        Replied(True, b"3", 3, b""),
        Replied(True, b"0", 0, b""),
        Replied(True, b"3", 3, b"OK\n"),
        Replied(True, b"", 0, b""),
    ]


@pytest.mark.parametrize("word", sorted(COMMANDS))
def test_every_command_has_its_own_message(word: bytes) -> None:
    row = COMMANDS[word]
    assert row.word == word
    assert [r for r in COMMANDS.values() if r.message is row.message] == [row]
    assert len(row.message.fields) == len(row.params)
