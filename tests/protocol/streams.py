"""Streams of requests in pieces of any size, and the messages they become.

``parse`` drives a ``HostConnection`` as a session does; ``expected`` cuts the whole
stream at once, without any buffering.  Both use the same parser of lines, so they are
compared only in where lines and payloads begin and end.  Standard library and
``protocol`` only, for the fuzzer drives these functions too.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol import ClientConnection, HostConnection, RemoteProtocolError, messages
from protocol.grammar import parse_request
from protocol.limits import MAX_LINE_BYTES

TOO_LONG = messages.Refusal(b"ERROR request line too long\n")


class Parsed(NamedTuple):
    """A message and the received part of its payload."""

    message: messages.Request
    body: bytes


def cut(stream: bytes, sizes: Iterable[int]) -> list[bytes]:
    """Cut a stream into pieces of these sizes; the last piece is the rest."""
    pieces = []
    at = 0
    for size in sizes:
        pieces.append(stream[at : at + size])
        at += size
    return [*pieces, stream[at:]]


class Reader:
    """A host's end and what came out of it.

    Args:
        dialect: 1 or 2.
        direct: payload bytes that the connection has not seen yet go past it, as they
            do where a session receives a payload into memory of its own.
    """

    def __init__(self, dialect: int = 2, *, direct: bool = False) -> None:
        self.connection = HostConnection(dialect)
        self.direct = direct
        self._parsed: list[tuple[messages.Request, bytearray]] = []

    @property
    def parsed(self) -> list[Parsed]:
        """The messages that have been parsed so far."""
        return [Parsed(message, bytes(body)) for message, body in self._parsed]

    def feed(self, piece: bytes) -> None:
        """Receive a piece and take all that it completes."""
        connection = self.connection
        if self.direct and connection.body_left:
            straight = piece[: connection.body_left]
            connection.body_received(len(straight))
            self._parsed[-1][1].extend(straight)
            piece = piece[len(straight) :]
        message = connection.receive_data(piece)
        while True:
            if message is not None:
                self._parsed.append((message, bytearray()))
            if connection.body_left:
                self._parsed[-1][1].extend(connection.take_body())
                if connection.body_left:
                    return
            elif message is None:
                return
            message = connection.next_message()


def parse(
    pieces: Iterable[bytes], dialect: int = 2, *, direct: bool = False
) -> list[Parsed]:
    """Return what the host's end makes of a stream that comes in these pieces."""
    reader = Reader(dialect, direct=direct)
    for piece in pieces:
        reader.feed(piece)
    return reader.parsed


def expected(stream: bytes, dialect: int = 2) -> list[Parsed]:
    """Return what the host's end should make of a whole stream."""
    parsed = []
    at = 0
    while at < len(stream):
        end = stream.find(b"\n", at)
        line = stream[at : end if end >= 0 else len(stream)]
        at += len(line) + 1
        if len(line) > MAX_LINE_BYTES:
            parsed.append(Parsed(TOO_LONG, b""))
        elif end >= 0:
            message = parse_request(line, dialect)
            parsed.append(Parsed(message, stream[at : at + message.body]))
            at += message.body
    return parsed


class Replied(NamedTuple):
    """A reply, as plain values, and the received part of its body."""

    ok: bool
    text: bytes
    number: int
    body: bytes


def parse_replies(
    requests: Sequence[messages.Request], pieces: Iterable[bytes], dialect: int = 2
) -> list[Replied | str]:
    """Return what the client's end makes of the replies to these requests.

    A reply that is none ends the list with the text of its error.
    """
    connection = ClientConnection(dialect)
    for request in requests:
        connection.send(request)
    taken: list[tuple[messages.Reply, bytearray]] = []
    failure = []
    try:
        for piece in pieces:
            connection.receive_data(piece)
            _take_replies(connection, taken, len(requests))
    except RemoteProtocolError as why:
        failure = [str(why)]
    replies = [
        Replied(reply.ok, reply.text, reply.number, bytes(body))
        for reply, body in taken
    ]
    return [*replies, *failure]


def _take_replies(
    connection: ClientConnection,
    taken: list[tuple[messages.Reply, bytearray]],
    count: int,
) -> None:
    while True:
        if taken:
            reply, body = taken[-1]
            body += connection.take_body()
            if len(body) < reply.body:
                return
        if len(taken) == count:
            return
        following = connection.next_reply()
        if following is None:
            return
        taken.append((following, bytearray()))


def check_requests(stream: bytes, sizes: Sequence[int], dialect: int = 2) -> None:
    """Assert that a stream of requests means the same in one piece and in many."""
    pieces = cut(stream, sizes)
    whole = expected(stream, dialect)
    for way, parsed in (
        ("in one piece", parse([stream], dialect)),
        ("in pieces", parse(pieces, dialect)),
        (
            "in pieces, payloads past the connection",
            parse(pieces, dialect, direct=True),
        ),
    ):
        if parsed != whole:
            raise AssertionError(f"{way} ({sizes}): {_difference(parsed, whole)}")


def check_replies(
    requests: Sequence[messages.Request],
    stream: bytes,
    sizes: Sequence[int],
    dialect: int = 2,
) -> None:
    """Assert that a stream of replies means the same in one piece and in many."""
    whole = parse_replies(requests, [stream], dialect)
    parsed = parse_replies(requests, cut(stream, sizes), dialect)
    if parsed != whole:
        raise AssertionError(f"in pieces ({sizes}): {_difference(parsed, whole)}")


def _difference(parsed: Sequence[object], whole: Sequence[object]) -> str:
    """Say where two lists begin to differ, in few words however long the lines are."""
    place = 0
    while [*parsed[place : place + 1]] == [*whole[place : place + 1]]:
        place += 1
    found, wanted = (
        f"{str(items[place])[:200]}" if place < len(items) else "nothing"
        for items in (parsed, whole)
    )
    return f"number {place} is {found}, not {wanted}"
