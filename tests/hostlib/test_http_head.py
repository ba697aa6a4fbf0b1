"""Heads of requests: refusals beyond h11's own rules, and their texts."""

import h11
import pytest

from hostlib.http_head import HeadError, HeadFault, parse_head

FIRST = b"POST /a HTTP/1.1\r\nHost: a\r\n"


# attack 33
@pytest.mark.parametrize(
    ("text", "fault", "words"),
    [
        (b"POST\r\n\r\n", HeadFault.NO_HTTP, "illegal request line"),
        (b"\r\n" + FIRST + b"\r\n", HeadFault.NO_HTTP, "no request line received"),
        (FIRST, HeadFault.NO_REQUEST, "no request"),
        (b"", HeadFault.NO_REQUEST, "no request"),
        (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", HeadFault.OTHER_VERSION, "another HTTP"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", HeadFault.OTHER_VERSION, "another HTTP"),
        (FIRST + b"X: b\r\n c\r\n\r\n", HeadFault.FOLDED, "a folded header"),
        (FIRST + b"X: b\n\tc\r\n\r\n", HeadFault.FOLDED, "a folded header"),
    ],
)
def test_a_head_that_is_refused_has_a_fault(
    text: bytes, fault: HeadFault, words: str
) -> None:
    with pytest.raises(HeadError) as caught:
        parse_head(text, 4096)
    assert caught.value.fault is fault
    assert str(caught.value) == words


# A line that is refused may hold a token.
def test_an_error_does_not_hold_the_line() -> None:
    with pytest.raises(HeadError) as caught:
        parse_head(FIRST + b"Authorization secret\r\n\r\n", 4096)
    assert "secret" not in str(caught.value)


def test_the_parser_of_a_head_reads_the_body() -> None:
    head, http = parse_head(FIRST + b"Transfer-Encoding: chunked\r\n\r\n", 4096)
    assert (head.method, head.target) == (b"POST", b"/a")
    http.receive_data(b"2\r\nab\r\n0\r\n\r\n")
    data = http.next_event()
    assert isinstance(data, h11.Data)
    assert bytes(data.data) == b"ab"
    assert isinstance(http.next_event(), h11.EndOfMessage)


def test_a_line_of_the_framing_that_is_longer_than_the_bound_is_refused() -> None:
    _, http = parse_head(FIRST + b"Transfer-Encoding: chunked\r\n\r\n", 64)
    http.receive_data(b"2;" + b"x" * 64)
    with pytest.raises(h11.RemoteProtocolError):
        http.next_event()
