"""Where requests end: heads within bounds, bodies that cannot be read in two ways."""

import re

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.toolexec.body import (
    MAX_BODY_BYTES,
    MAX_EXTRA_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEAD_LINES,
    BodyReader,
    BodyTooLargeError,
    FramingError,
    HeadReader,
    HeadTooLargeError,
)

CHUNKED = [(b"transfer-encoding", b"chunked")]


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Cut a stream at sizes; the rest is the last piece."""
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]


def head_of(data: bytes, sizes: list[int]) -> tuple[bytes, bytes] | None:
    """Return the head of a stream that comes in pieces."""
    reader = HeadReader()
    parts = cut(data, sizes)
    for index, part in enumerate(parts):
        found = reader.feed(part)
        if found is not None:
            head, rest = found
            return head, rest + b"".join(parts[index + 1 :])
    return None


@given(st.lists(st.integers(0, 9), max_size=30), st.sampled_from([b"\n", b"\r\n"]))
def test_a_head_ends_at_its_blank_line_however_it_comes(
    sizes: list[int], end: bytes
) -> None:
    head = b"GET / HTTP/1.1" + end + b"A: b" + end + end
    assert head_of(head + b"\r\n\nrest", sizes) == (head, b"\r\n\nrest")


def test_a_head_without_its_end_is_waited_for() -> None:
    assert head_of(b"GET / HTTP/1.1\r\nA: b\r\n\r", []) is None


def test_a_head_has_so_many_bytes_and_no_more() -> None:
    start, end = b"GET / HTTP/1.1\r\nA: ", b"\r\n\r\n"
    fill = b"x" * (MAX_HEAD_BYTES - len(start) - len(end))
    assert head_of(start + fill + end, [9000]) is not None
    with pytest.raises(HeadTooLargeError):
        head_of(start + fill + b"x" + end, [9000])
    with pytest.raises(HeadTooLargeError):
        head_of(b"x" * (MAX_HEAD_BYTES + 1), [1000] * 60)


def test_a_head_has_so_many_lines_and_no_more() -> None:
    lines = b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (MAX_HEAD_LINES - 1)
    assert head_of(lines + b"\r\n", [77, 5000]) is not None
    with pytest.raises(HeadTooLargeError):
        head_of(lines + b"A: b\r\n\r\n", [77, 5000])
    with pytest.raises(HeadTooLargeError):
        head_of(lines + b"A: b\r\n", [77, 5000])


def read(
    data: bytes,
    headers: list[tuple[bytes, bytes]],
    sizes: list[int] | None = None,
    version: bytes = b"1.1",
) -> BodyReader:
    """Read a body that comes in pieces."""
    reader = BodyReader(headers, version)
    for part in cut(data, sizes or []):
        reader.feed(part)
    return reader


def length(size: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of a body of a length."""
    return [(b"content-length", size)]


@given(st.lists(st.integers(0, 4), max_size=20))
def test_a_body_of_a_length_ends_there(sizes: list[int]) -> None:
    reader = read(b"hello more", length(b"5"), sizes)
    assert reader.is_complete
    assert (bytes(reader.body), reader.rest) == (b"hello", b" more")


def test_no_length_is_no_body() -> None:
    reader = read(b"more", [])
    assert (reader.is_complete, bytes(reader.body), reader.rest) == (True, b"", b"more")
    assert not read(b"hell", length(b"5")).is_complete


@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=6),
    st.lists(st.integers(0, 9), max_size=40),
    st.sampled_from([b"", b";a=b", b" ;x"]),
    st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC:\r\n"]),
)
def test_a_chunked_body_means_the_same_however_it_comes(
    parts: list[bytes], sizes: list[int], extension: bytes, trailers: bytes
) -> None:
    data = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in parts)
    data += b"0\r\n" + trailers + b"\r\n"
    reader = read(data + b"after", CHUNKED, sizes)
    assert reader.is_complete
    assert (bytes(reader.body), reader.rest) == (b"".join(parts), b"after")


# attack 33: what two readers could understand in two ways is refused.
@pytest.mark.parametrize(
    "data",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"\n",
        b"\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\r\nhello\rX",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"-1\r\n",
        b"+5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"5 5\r\nhello\r\n",
        b"g\r\n",
        b"5;\x00\r\nhello\r\n",
        b"5;\n\r\nhello\r\n",
        b"11111111111111111\r\n",
        b"5" + b" " * 300,
        b"5;" + b"x" * 300 + b"\r\n",
        b"0\r\nA: b\n\r\n",
        b"0\r\n A: b\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n\n",
    ],
)
def test_bad_chunks_are_refused(data: bytes) -> None:
    for sizes in ([], [1] * len(data)):
        with pytest.raises(FramingError):
            read(data, CHUNKED, sizes)


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ([*CHUNKED, *length(b"5")], b"1.1"),
        ([*CHUNKED, *length(b"0")], b"1.1"),
        (CHUNKED, b"1.0"),
        ([(b"transfer-encoding", b"gzip, chunked")], b"1.1"),
        ([(b"transfer-encoding", b"identity")], b"1.1"),
        ([*CHUNKED, *CHUNKED], b"1.1"),
        ([*length(b"5"), *length(b"6")], b"1.1"),
        (length(b"5x"), b"1.1"),
        (length(b""), b"1.1"),
        (length(b"-1"), b"1.1"),
        (length(b"0" * 30 + b"5"), b"1.1"),
    ],
)
def test_a_length_that_is_said_twice_or_badly_is_refused(
    headers: list[tuple[bytes, bytes]], version: bytes
) -> None:
    with pytest.raises(FramingError):
        BodyReader(headers, version)


def test_a_body_has_so_many_bytes_and_no_more() -> None:
    assert BodyReader(length(b"%d" % MAX_BODY_BYTES), b"1.1").body == b""
    with pytest.raises(BodyTooLargeError):
        BodyReader(length(b"%d" % (MAX_BODY_BYTES + 1)), b"1.1")
    half = b"%x\r\n" % (MAX_BODY_BYTES // 2) + b"x" * (MAX_BODY_BYTES // 2) + b"\r\n"
    assert len(read(half + half + b"0\r\n\r\n", CHUNKED).body) == MAX_BODY_BYTES
    with pytest.raises(BodyTooLargeError):
        read(half + half + b"1\r\nx\r\n", CHUNKED)
    with pytest.raises(BodyTooLargeError):
        read(b"ffffffffffffffff\r\n", CHUNKED)


def test_trailers_have_so_many_bytes_and_no_more() -> None:
    line = b"A: " + b"x" * 1019 + b"\r\n"
    assert len(line) * 64 == MAX_EXTRA_BYTES
    assert read(b"0\r\n" + line * 64 + b"\r\n", CHUNKED, [99]).is_complete
    for more in (line * 64 + b"A:", line * 65, b"A: " + b"x" * MAX_EXTRA_BYTES):
        for sizes in ([], [5000] * 12):
            with pytest.raises(HeadTooLargeError):
                read(b"0\r\n" + more + b"\r\n", CHUNKED, sizes)


def test_extensions_have_so_many_bytes_and_no_more() -> None:
    for extra in (b";" + b"x" * 249, b" " * 250):
        chunk = b"1" + extra + b"\r\na\r\n"
        assert not read(chunk * (MAX_EXTRA_BYTES // 250), CHUNKED).is_complete
        with pytest.raises(HeadTooLargeError):
            read(chunk * (MAX_EXTRA_BYTES // 250 + 1), CHUNKED)
    with pytest.raises(HeadTooLargeError):  # zeros before a size
        read(b"0000000001\r\na\r\n" * (MAX_EXTRA_BYTES // 9 + 1), CHUNKED)
    with pytest.raises(HeadTooLargeError):  # together with trailers
        read(
            (b"1;" + b"x" * 249 + b"\r\na\r\n") * 262
            + b"0\r\nA: bcdefghijklmnop\r\nB: "
            + b"x" * 60
            + b"\r\n",
            CHUNKED,
        )


@pytest.mark.slow
def test_a_body_may_come_in_chunks_of_a_byte() -> None:
    reader = read(b"1\r\nx\r\n" * MAX_BODY_BYTES, CHUNKED)
    # Only the body is kept: the sizes of its chunks are not.
    assert sum(map(len, reader.replay())) < MAX_BODY_BYTES + 32
    reader.feed(b"0\r\n\r\n")
    assert (reader.is_complete, len(reader.body)) == (True, MAX_BODY_BYTES)


# A chunk that has been received completely is taken without a step for each part of it.
@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"1;\r\nx\r\n", b"01 \r\nx\r\n"])
def test_small_chunks_take_no_steps(
    monkeypatch: pytest.MonkeyPatch, chunk: bytes
) -> None:
    lines = []
    real = BodyReader.take_line

    def counted(self: BodyReader, longest: int, too_long: Exception) -> bytes | None:
        lines.append(longest)
        return real(self, longest, too_long)

    monkeypatch.setattr(BodyReader, "take_line", counted)
    reader = read(chunk * 10_000 + b"0\r\n\r\n", CHUNKED, [997] * 20)
    assert (reader.is_complete, bytes(reader.body)) == (True, b"x" * 10_000)
    assert len(lines) < 100


@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=4),
    st.sampled_from([b"", b"A: b\r\n"]),
    st.sampled_from([b"", b"5"]),
)
def test_another_reader_goes_on_from_what_one_holds(
    parts: list[bytes], trailers: bytes, after: bytes
) -> None:
    body = b"".join(parts)
    data = b"".join(b"%x;a\r\n%b\r\n" % (len(p), p) for p in parts)
    data += b"0\r\n" + trailers + b"\r\n" + after
    for headers, stream in (
        (CHUNKED, data),
        (length(b"%d" % len(body)), body + after),
    ):
        for at in range(len(stream) + 1):
            held = b"".join(read(stream[:at], headers).replay())
            other = read(held + stream[at:], headers)
            assert (other.is_complete, bytes(other.body), other.rest) == (
                True,
                body,
                after,
            )


@given(
    st.lists(st.sampled_from([b"5", b"\r", b"\n", b"0", b";", b"hello", b"A:", b" "]))
)
def test_what_is_accepted_means_the_same_to_h11(words: list[bytes]) -> None:
    data = b"".join(words)
    try:
        reader = read(data, CHUNKED)
    except (FramingError, BodyTooLargeError):
        return
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    if data:  # nothing would mean the end
        peer.receive_data(data)
    assert isinstance(peer.next_event(), h11.Request)
    body = b""
    try:
        while isinstance(event := peer.next_event(), h11.Data):
            body += event.data
    except h11.RemoteProtocolError:
        # It knows no blank before an extension, which RFC 9112, 7.1.1, wants understood.
        assert re.search(rb"[05] +;", data)
        return
    if reader.is_complete:
        assert isinstance(event, h11.EndOfMessage)
        assert (bytes(reader.body), reader.rest) == (body, peer.trailing_data[0])
    else:
        assert event is h11.NEED_DATA
