"""The whole head of one HTTP/1.1 request, parsed by h11 and held to stricter rules.

ToolExec and the proxy cut a head out of their streams, each with its own bounds and its
own words for a refusal; `hostlib.http1` serves connections that h11 reads by itself.

No I/O.
"""

from __future__ import annotations

import re
from enum import Enum

import h11

# h11 joins folded lines and takes any HTTP/x.y; RFC 9112 (5.2) lets a server refuse.
_FOLDED = re.compile(rb"\n[ \t]")
VERSIONS = (b"1.0", b"1.1")


class HeadFault(Enum):
    """The reason for which a head is refused."""

    NO_HTTP = "no HTTP"
    NO_REQUEST = "no request"
    OTHER_VERSION = "another HTTP"
    FOLDED = "a folded header"


class HeadError(Exception):
    """A head that is refused.

    Attributes:
        fault: as above; the text of ``NO_HTTP`` is h11's, without the line itself,
            which may hold a token.
    """

    def __init__(self, fault: HeadFault, text: str = "") -> None:
        super().__init__(text or fault.value)
        self.fault = fault


def parse_head(text: bytes, max_bytes: int) -> tuple[h11.Request, h11.Connection]:
    """Return a request's head, and the parser that reads its body.

    Args:
        text: all of it, with its blank line and nothing behind that.
        max_bytes: most of it, and of a line of its body's framing.

    Raises:
        HeadError: it is refused.
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
