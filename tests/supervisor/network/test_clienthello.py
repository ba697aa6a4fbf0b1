"""The name in a ClientHello, however it comes, and what is none."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.network.clienthello import MAX_HELLO_BYTES, HelloError, HelloReader
from supervisor.network.reasons import Reason
from tests.supervisor.network.hellos import (
    body,
    client_hello,
    extension,
    message,
    record,
    records,
    server_name,
)

NAME = "a.example.com"
PADDING = 21


def read(*pieces: bytes) -> str | None:
    """Return the name that is found in pieces of a stream."""
    reader = HelloReader()
    found = None
    for number, piece in enumerate(pieces):
        found = reader.receive(piece)
        assert bytes(reader.held) == b"".join(pieces[: number + 1])
        if found is not None:
            assert number == len(pieces) - 1, "found before the last piece"
    return found


def reason_of(*pieces: bytes) -> Reason:
    """Return why pieces of a stream, and its end, have no name."""
    with pytest.raises(HelloError) as caught:
        read(*pieces, b"")
    return caught.value.reason


# spec NET7: real ones, cut at every byte.
@pytest.mark.parametrize("legacy", [False, True])
def test_the_name_is_found_wherever_the_stream_is_cut(*, legacy: bool) -> None:
    hello = client_hello(NAME, legacy=legacy)
    assert read(hello) == NAME
    for at in range(1, len(hello)):
        assert read(hello[:at], hello[at:]) == NAME
    assert read(*(hello[at : at + 1] for at in range(len(hello)))) == NAME


# spec NET7: over any number of records and segments.
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100, 16_384])
@pytest.mark.parametrize("segment", [1, 7, 100_000])
def test_the_name_is_found_over_many_records(size: int, segment: int) -> None:
    stream = records(client_hello(NAME)[5:], size)
    pieces = [stream[at : at + segment] for at in range(0, len(stream), segment)]
    assert read(*pieces) == NAME


def pieces_of(data: bytes, cuts: set[int]) -> list[bytes]:
    """Return bytes cut at some places; those beyond the end count from the start."""
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


CUTS = st.sets(st.integers(0, 1_000), max_size=20)


# spec NET7
@given(CUTS, CUTS)
def test_the_name_is_found_in_any_records_and_segments(
    of_records: set[int], of_segments: set[int]
) -> None:
    hello = message(body(extension(PADDING, bytes(300)), server_name(b"A.example.com")))
    stream = b"".join(map(record, pieces_of(hello, of_records)))
    assert read(*pieces_of(stream, of_segments)) == NAME


# spec NET7: what came behind it is sent on as well.
def test_bytes_behind_the_hello_are_held() -> None:
    reader = HelloReader()
    early = record(b"early data", kind=23)
    assert reader.receive(client_hello(NAME) + early) == NAME
    assert bytes(reader.held) == client_hello_of(reader) + early


def client_hello_of(reader: HelloReader) -> bytes:
    """Return the first record that a reader holds."""
    return bytes(reader.held[: 5 + int.from_bytes(reader.held[3:5], "big")])


# spec NET7: none.
@pytest.mark.parametrize(
    "stream",
    [
        client_hello(None),
        client_hello(None, legacy=True),
        record(message(body())),
        record(message(body()[:-2])),  # without extensions
        record(message(body(extension(PADDING, b"")))),
    ],
)
def test_without_a_name_it_is_told_so(stream: bytes) -> None:
    assert reason_of(stream) is Reason.TLS_NO_SNI


# spec NET7: two.
# attack 59
@pytest.mark.parametrize(
    "extensions",
    [
        [server_name(b"a.test", b"b.test")],
        [server_name(b"a.test", b"a.test")],
        [server_name(b"a.test"), server_name(b"b.test")],
        [server_name(b"a.test"), extension(PADDING, b"x"), server_name(b"a.test")],
        [server_name(b"a.test", kind=1)],
        [server_name(b"")],
        [server_name(b"10.0.0.1")],
        [server_name(b"::1")],
        [server_name(b"a.test\0.b.test")],
        [server_name(b"a.test/")],
        [server_name(b"*.test")],
        [server_name("ä.test".encode())],
    ],
)
def test_what_is_not_one_name_is_another_name(extensions: list[bytes]) -> None:
    stream = record(message(body(*extensions)))
    assert reason_of(stream) is Reason.TLS_OTHER_NAME


HELLO = message(body(server_name(b"a.test")))
TOO_LONG = message(
    body(extension(PADDING, bytes(60_000)), ciphers=b"\x13\x01" * 30_000)
)


# spec NET7: what is no ClientHello.
# attack 59
@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x2e\x01\3\1" + bytes(40),  # of SSLv2
        b"\x16",
        record(HELLO)[:-1],
        record(HELLO, version=b"\2\1"),
        record(HELLO, version=b"\4\1"),
        record(HELLO, kind=23),
        record(b""),
        record(b"") + record(HELLO),
        record(HELLO[:10]) + record(b"\1", kind=20) + record(HELLO[10:]),
        record(HELLO[:10]) + record(b"\2\x28", kind=21),
        record(message(body(server_name(b"a.test")), kind=2)),
        record(HELLO + b"\x0b\0\0\0"),
        record(HELLO + HELLO),
        record(message(body(server_name(b"a.test")) + b"\0")),
        record(message(body(server_name(b"a.test"))[:-1])),
        record(message(body(server_name(b"a.test"), session=bytes(33)))),
        record(message(body(server_name(b"a.test"), ciphers=b""))),
        record(message(body(server_name(b"a.test"), ciphers=b"\1\2\3"))),
        record(message(body(server_name(b"a.test"), compressions=b""))),
        record(message(body(extension(0, b"")))),
        record(message(body(extension(0, b"\0\0")))),
        record(message(body(extension(0, b"\0\4\0\0\1a\0")))),
        record(message(body(extension(0, b"\0\5\0\0\1a")))),
        record(message(body(b"\0\0\0"))),
        record(message(b"")),
        records(HELLO[:6], 1),
        b"\x16\3\1\x40\1" + bytes(20_000),
        records(TOO_LONG, 16_384),
        records(TOO_LONG, 1),
    ],
)
def test_what_is_no_client_hello_is_told_so(stream: bytes) -> None:
    assert reason_of(stream) is Reason.TLS_NO_HELLO


# spec NET7: refused by the first byte, and not after ten seconds.
@pytest.mark.parametrize("first", [b"S", b"G", b"\x80", b"\0", b"\x17"])
def test_another_protocol_is_refused_at_its_first_byte(first: bytes) -> None:
    with pytest.raises(HelloError):
        HelloReader().receive(first)


# spec NET7: a second message behind it could be read in another way.
def test_a_second_message_is_refused_without_waiting_for_more() -> None:
    with pytest.raises(HelloError):
        HelloReader().receive(record(HELLO + HELLO))


# spec NET7: 64 KiB at most.
def test_a_hello_of_64_kib_is_read_and_a_longer_one_is_not() -> None:
    def stream(size: int) -> bytes:
        empty = message(body(server_name(b"a.test"), extension(PADDING, b"")))
        padding = extension(PADDING, bytes(size - len(empty) - 4 * 5))
        found = records(message(body(server_name(b"a.test"), padding)), 16_384)
        assert len(found) == size
        return found

    assert read(stream(MAX_HELLO_BYTES)) == "a.test"
    assert reason_of(stream(MAX_HELLO_BYTES + 1)) is Reason.TLS_NO_HELLO


# spec NET7: no more is held than that, and the segment that goes beyond it.
def test_a_hello_that_never_ends_is_refused_at_the_bound() -> None:
    reader = HelloReader()
    endless = record(b"\1\xff\xff\xff") + record(bytes(9_000)) * 7
    assert reader.receive(endless) is None
    with pytest.raises(HelloError):
        reader.receive(record(bytes(9_000)))
    assert len(reader.held) == 9 + 8 * 9_005


@given(st.integers(0), st.lists(st.integers(0, 255), min_size=1, max_size=3))
def test_a_damaged_hello_has_a_name_or_a_reason(seed: int, odd: list[int]) -> None:
    random_ = random.Random(seed)
    stream = bytearray(record(message(body(server_name(b"a.test"), session=b"x" * 32))))
    for byte in odd:
        stream[random_.randrange(len(stream))] = byte
    reader = HelloReader()
    try:
        name = reader.receive(bytes(stream)) or reader.receive(b"")
    except HelloError as why:
        assert why.reason in {  # noqa: PT017 - most are damaged
            Reason.TLS_NO_HELLO,
            Reason.TLS_NO_SNI,
            Reason.TLS_OTHER_NAME,
        }
    else:
        assert name is not None
        assert name.encode() in bytes(stream).lower()
