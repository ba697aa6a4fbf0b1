"""The cost of buffering: bytes searched and copied, and bytes held.

Counted, not timed: pieces of a class that counts, and a partial line of one too.
"""

import sys
import tracemalloc
from typing import Self, SupportsIndex

import pytest

from protocol import ClientConnection, HostConnection, messages
from protocol import connection as ends
from protocol.connection import ReceiveBuffer
from protocol.limits import MAX_LINE_BYTES, MEMO_LINES


class Count:
    """How many bytes were looked at, and how many copied."""

    def __init__(self) -> None:
        self.looked = 0
        self.copied = 0


class Piece(bytes):
    """Received bytes that count what is done with them."""

    tally: Count

    @classmethod
    def of(cls, data: bytes, count: Count) -> Self:
        """Return these bytes with their counter."""
        piece = cls(data)
        piece.tally = count
        return piece

    def find(self, *args: object) -> int:
        """Count what is searched: up to the hit, or all."""
        begin = args[1] if len(args) > 1 else 0
        assert isinstance(begin, int)
        at = super().find(*args)  # type: ignore[arg-type]
        self.tally.looked += (len(self) if at < 0 else at + 1) - begin
        return at

    def __getitem__(self, key: SupportsIndex | slice) -> "int | Piece":  # type: ignore[override]
        """Count a slice as copied."""
        found = super().__getitem__(key)
        if isinstance(found, int):
            return found
        self.tally.copied += len(found)
        return Piece.of(found, self.tally)

    def __add__(self, other: object) -> "Piece":
        """Count both sides as copied."""
        assert isinstance(other, bytes)
        self.tally.copied += len(self) + len(other)
        return Piece.of(bytes(self) + other, self.tally)


class Partial(bytearray):
    """The partial line of a buffer, which counts what goes in and out."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.tally = count

    def __iadd__(self, other: object) -> Self:
        """Count what is appended."""
        assert isinstance(other, bytes | memoryview)
        self.tally.copied += len(other)
        return super().__iadd__(other)

    def find(self, *args: object) -> int:
        """Count what is searched once more."""
        self.tally.looked += len(self)
        return super().find(*args)  # type: ignore[arg-type]

    def __bytes__(self) -> bytes:
        """Count the way out."""
        self.tally.copied += len(self)
        return bytes(memoryview(self))


def test_the_counters_count() -> None:
    count = Count()
    piece = Piece.of(b"abc\ndef", count)
    assert piece.find(b"\n", 1) == 3
    assert piece.find(b"\n", 4) == -1
    assert (count.looked, count.copied) == (3 + 3, 0)
    end = piece[2:]
    assert isinstance(end, Piece)
    assert end + b"x" == b"c\ndefx"
    assert count.copied == 5 + 6
    partial = Partial(count)
    partial += memoryview(piece)[1:]
    assert bytes(partial) == b"bc\ndef"
    assert count.copied == 11 + 6 + 6


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Return a counter of what buffers do that are made from now on."""
    counted = Count()
    monkeypatch.setattr(ends, "bytearray", lambda: Partial(counted), raising=False)
    return counted


LINES = b"".join(b"OPEN %d r true\n" % number for number in range(2000))
LONG = b"STAT true " + b"x" * 60_000 + b"\n"
FLOOD = b"x" * 300_000


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 7, 64, 4096, 1 << 20])
@pytest.mark.parametrize("stream", [LINES, LONG, FLOOD], ids=["lines", "long", "flood"])
def test_lines_cost_what_they_are_long(stream: bytes, size: int, count: Count) -> None:
    buffer = ReceiveBuffer()
    lines = 0
    skipping = False
    for at in range(0, len(stream), size):
        buffer.append(Piece.of(stream[at : at + size], count))
        while True:
            if skipping:
                skipping = not buffer.skip_line()
                if skipping:
                    break
            try:
                line = buffer.take_line(MAX_LINE_BYTES)
            except OverflowError:
                skipping = True
                continue
            if line is None:
                break
            lines += 1
    assert lines == stream.count(b"\n")
    assert count.looked <= len(stream) + 1
    assert count.copied <= 2 * len(stream)


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_payloads_are_copied_once(size: int, count: Count) -> None:
    buffer = ReceiveBuffer()
    stream = b"\n" * 100_000
    taken = 0
    for at in range(0, len(stream), size):
        buffer.append(Piece.of(stream[at : at + size], count))
        taken += len(buffer.take(len(stream)))
    assert taken == len(stream)
    assert (count.looked, count.copied) == (0, len(stream))


@pytest.mark.parametrize("size", [1, 3, 100, 4096])
def test_a_connection_costs_what_its_stream_is_long(size: int, count: Count) -> None:
    connection = HostConnection()
    one = b"OPEN a b c r true\nWRITE 1000 50\n" + b"\n" * 50 + b"READ 1000 5\n"
    stream = one * 400
    messages_seen = 0
    for at in range(0, len(stream), size):
        message = connection.receive_data(Piece.of(stream[at : at + size], count))
        while message is not None or connection.pending:
            messages_seen += message is not None
            if connection.body_left and not connection.take_body():
                break
            message = None if connection.body_left else connection.next_message()
    assert messages_seen == 3 * 400
    # Twice for buffering, twice for parsing: the same for pieces of any size.
    assert count.looked <= 2 * len(stream)
    assert count.copied <= 4 * len(stream)


def test_a_flood_without_lf_is_not_kept() -> None:
    connection = HostConnection()
    piece = b"x" * 8192
    tracemalloc.start()
    try:
        for _ in range(2000):  # 16 MB; spec F4: discarded with bounded memory
            connection.receive_data(piece)
            assert len(connection.unread()[0]) <= MAX_LINE_BYTES
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MAX_LINE_BYTES  # I9


def remembered(connection: HostConnection) -> list[bytes]:
    """Return the lines that a connection remembers, in every table it has."""
    slots = (getattr(connection, name) for name in connection.__slots__)
    return [line for table in slots if isinstance(table, dict) for line in table]


def test_what_is_remembered_is_bounded() -> None:
    connection = HostConnection()
    for number in range(10 * MEMO_LINES):
        message = connection.receive_data(b"READ 1000 %d\n" % number)
        assert message == messages.Read(b"1000", number)
        lines = remembered(connection)
        assert 0 < len(lines) <= 2 * MEMO_LINES
        assert sum(map(sys.getsizeof, lines)) < 65_536  # I9


def test_a_long_line_is_not_remembered() -> None:
    connection = HostConnection()
    connection.receive_data(b"READ 1000 5" + b" " * 60_000 + b"\n")
    assert not remembered(connection)  # I9


def test_replies_that_were_not_taken_wait_in_order() -> None:
    connection = ClientConnection()
    for _ in range(3):
        connection.send(messages.Sync(b"1000"))
    for piece in (b"O", b"K\nERROR", b" no\nO", b"K\n"):
        connection.receive_data(piece)
    replies = [connection.next_reply() for _ in range(3)]
    assert [reply and reply.ok for reply in replies] == [True, False, True]  # spec T3
