"""Heads of requests and replies as bytes, by h11.

One head at a time, without a state of its own.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

import h11

from hostlib.http_head import HeadError, HeadFault, parse_head
from protocol.toolexec import requests
from protocol.toolexec.body import MAX_HEAD_BYTES, Head

CONTENT_TYPE = (b"Content-Type", b"text/plain; charset=utf-8")
CLOSE = (b"Connection", b"close")

# Some old clients sent one more behind a request's body (RFC 9112, 2.2).
_EMPTY_LINE = re.compile(rb"\A\r?\n")

# The request for h11 where the reply does not depend on it.
_ANY = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
_END = b"\r\n"

Headers = list[tuple[bytes, bytes]]


class RefusedAtOnceError(Exception):
    """A request that is refused before it was read whole."""

    def __init__(self, refusal: requests.Refusal) -> None:
        super().__init__(refusal.status)
        self.refusal = refusal


def read(text: bytes) -> tuple[Head, bool]:
    """Return the head of a request.

    Args:
        text: the whole head, with its blank line.

    Returns:
        Its content, and whether its client waits for 100.

    Raises:
        RefusedAtOnceError: it cannot be parsed.
    """
    text = _EMPTY_LINE.sub(b"", text, count=1)
    try:
        event, http = parse_head(text, 2 * MAX_HEAD_BYTES)
    except HeadError as why:
        is_strictness = why.fault in (HeadFault.OTHER_VERSION, HeadFault.FOLDED)
        reason = "a folded header or another HTTP" if is_strictness else str(why)
        raise RefusedAtOnceError(requests.bad_request(reason)) from None
    headers = tuple(event.headers)
    head = Head(event.method, event.target, headers, event.http_version)
    return head, http.they_are_waiting_for_100_continue


def reply_head(status: int, headers: Headers) -> bytes:
    """Return the head of a reply."""
    return _write_head(status, headers)[0]


@cache
def continue_reply() -> bytes:
    """Return the 100 that lets a client send its body."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(_ANY + b"Content-Length: 1\r\nExpect: 100-continue\r\n" + _END)
    http.next_event()
    return http.send(h11.InformationalResponse(status_code=100, headers=[])) or b""


# h11 makes the common parts of all streamed replies once.


def chunked_head(exec_id: str) -> bytes:
    """Return the head of a reply in chunks; ``trailer`` ends it."""
    before, after = _chunked_head()
    return before + exec_id.encode() + after


@cache
def _chunked_head() -> tuple[bytes, bytes]:
    """Return the bytes before and after the execution's id."""
    mark = b"----"
    headers = [
        CONTENT_TYPE,
        (b"X-Exec-Id", mark),
        (b"Transfer-Encoding", b"chunked"),
        (b"Trailer", b"X-Exit-Code"),
        CLOSE,
    ]
    before, _, after = reply_head(200, headers).partition(mark)
    return before, after


@lru_cache(maxsize=256)  # as many as there are exit codes
def trailer(exit_code: int) -> bytes:
    """Return the last chunk with the exit code in a trailer."""
    headers = [CONTENT_TYPE, (b"Transfer-Encoding", b"chunked"), CLOSE]
    _, http = _write_head(200, headers)
    trailers = [(b"X-Exit-Code", b"%d" % exit_code)]
    return http.send(h11.EndOfMessage(headers=trailers)) or b""


def _write_head(status: int, headers: Headers) -> tuple[bytes, h11.Connection]:
    """Return the head of a reply, and the connection that writes its end."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(_ANY + _END)
    http.next_event()
    response = h11.Response(
        status_code=status, headers=headers, reason=requests.REASONS[status]
    )
    return http.send(response) or b"", http
