"""A parser of complete HTTP/1.1 request heads: h11 with stricter rules, no I/O.

For ToolExec and the proxy, which cut a head out of their streams and have bounds and
refusals of their own.  `hostlib.http1` serves whole connections with h11.
"""

from __future__ import annotations

import re
from enum import Enum

import h11

# h11 joins folded lines and takes any HTTP/x.y; RFC 9112 (5.2) lets a server refuse.
_FOLDED = re.compile(rb"\n[ \t]")
VERSIONS = (b"1.0", b"1.1")


class HeadFault(Enum):
    """The reason for refusing a head."""

    NO_HTTP = "no HTTP"
    NO_REQUEST = "no request"
    OTHER_VERSION = "another HTTP"
    FOLDED = "a folded header"


class HeadError(Exception):
    """A head cannot be accepted.

    Attributes:
        fault: the reason; the text of ``NO_HTTP`` is h11's, without the line itself,
            which may hold a token.
    """

    def __init__(self, fault: HeadFault, text: str = "") -> None:
        super().__init__(text or fault.value)
        self.fault = fault


def parse_head(text: bytes, max_bytes: int) -> tuple[h11.Request, h11.Connection]:
    """Return a request's head, and the parser that reads its body.

    Args:
        text: the complete head, up to its blank line.
        max_bytes: longest head, and longest line of the body's framing.

    Raises:
        HeadError: the head is refused.
    """
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=max_bytes)
    try:
        http.receive_data(text)
        request = http.next_event()
    except h11.RemoteProtocolError as why:
        reason, _, _ = str(why).partition(": bytearray")
        raise HeadError(HeadFault.NO_HTTP, reason) from None
    if not isinstance(request, h11.Request):
        raise HeadError(HeadFault.NO_REQUEST)
    if request.http_version not in VERSIONS:
        raise HeadError(HeadFault.OTHER_VERSION)
    if _FOLDED.search(text):
        raise HeadError(HeadFault.FOLDED)
    return request, http
