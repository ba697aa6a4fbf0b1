"""HTTP requests to the proxy: CONNECT, and URLs in requests (spec NET8).

1. h11 parses requests. Ambiguous forms that it accepts are refused here: bare LF, folded
   fields, a length beside chunks.
2. A request in absolute form is written anew, field by field and chunk by chunk, and is
   the only one of its connection: nothing of a second one reaches the server.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import h11
import msgspec

from hostlib.http_head import HeadError, HeadFault, parse_head
from supervisor.network.hosts import (
    HostError,
    format_host,
    parse_port,
    parse_proxied_host,
    shorten,
)
from supervisor.network.proxy_dialogue import ProxyError, ProxyTarget
from supervisor.network.reasons import Reason, describe_rule

if TYPE_CHECKING:
    from supervisor.network.reasons import NetworkRefusal

MAX_HEAD_BYTES = 16_384
"""Bytes of a request's head; servers usually take 8 KiB."""

_USUAL_PORT = 80

# TLS and other protocols have a NUL early, and would be waited for otherwise.
_NO_HTTP = re.compile(rb"(?<!\r)\n|\x00")
_ABSOLUTE = re.compile(
    r"http://(?P<authority>[^/?#]*)(?P<rest>[/?][^#]*)?", re.IGNORECASE
)
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate"),
        *(b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
"""Fields that are for the next hop alone (RFC 9110, 7.6.1; `chunked` is written anew)."""
NEVER_NAMED = frozenset({b"content-length", b"host"})
"""Fields that `Connection` may not take away: they say how the request is read."""

_DETAILS = {
    Reason.NO_RULE: "no rule allows it",
    Reason.REFUSED_BY_RULE: "a rule refuses it",
    Reason.PRIVATE_ADDRESS: "it stands for an address that is not public",
    Reason.OWN_ADDRESS: "it stands for an address of the host",
    Reason.FLEET_PORT: "it is a port of the fleet's Ray",
    Reason.NO_SUCH_NAME: "the name does not exist",
    Reason.NO_NAME: "the address stands for no name",
    Reason.TOO_MANY_NAMES: "the child has asked for too many names",
    Reason.TLS_NO_SNI: "the ClientHello names no host",
    Reason.TLS_NO_HELLO: "it does not begin with a ClientHello",
    Reason.TLS_OTHER_NAME: "the ClientHello names another host",
    Reason.LIMIT_CONNECTIONS: "the child has too many connections",
    Reason.LIMIT_NET_BYTES: "the child has sent and received too many bytes",
}

_FAULTS = {
    HeadFault.NO_HTTP: "it is no HTTP request",
    HeadFault.NO_REQUEST: "it is no request of HTTP/1.1 or 1.0",
    HeadFault.OTHER_VERSION: "it is no request of HTTP/1.1 or 1.0",
    HeadFault.FOLDED: "a header field is folded",
}

Fields = list[tuple[bytes, bytes]]


class _Denial(msgspec.Struct):
    """The body of a 403."""

    name: str
    port: int
    reason: str
    rule: str | None
    detail: str
    error: str = "policy_denied"


class HttpDialogue:
    """One connection that speaks HTTP."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._looked_at = 0  # bytes of the head in which no end was found
        self._target: ProxyTarget | None = None
        self._request: _Request | None = None  # in absolute form

    def receive(self, data: bytes) -> ProxyTarget | None:
        """Add what the program sent before it was answered; see `Dialogue`."""
        self._held += data
        head = self._take_head()
        if head is None:
            return None
        request, http = _parse_head(head)
        text = request.target.decode("ascii")
        if request.method == b"CONNECT":
            self._target = _parse_authority(text, None)
        else:
            self._target, path = _parse_url(text)
            self._request = _Request(self._target, path, request, http)
        return self._target

    def take_reply(self) -> bytes:
        """Return nothing: HTTP has no question before the request."""
        return b""

    def accept(self) -> bytes:
        """Return what opens a tunnel; nothing for a URL, which the server answers."""
        if self._request is not None:
            return b""
        return b"HTTP/1.1 200 Connection established\r\n\r\n"

    def refuse(self, refused: NetworkRefusal) -> bytes:
        """Return a 403 that tells the reason, and the rule that would allow it."""
        return _reply(b"403 Forbidden", denial(self._known(), refused))

    def fail(self) -> bytes:
        """Return a 502."""
        target = self._known()
        body = {"error": "unreachable", "name": str(target.host), "port": target.port}
        return _reply(b"502 Bad Gateway", msgspec.json.encode(body))

    def forward(self, data: bytes = b"") -> bytes:
        """Return what goes to the server for what the program sends; see `Dialogue`."""
        data = bytes(self._held) + data
        self._held.clear()
        return data if self._request is None else self._request.forward(data)

    def _known(self) -> ProxyTarget:
        if self._target is None:
            raise RuntimeError("cannot answer: no host was asked for yet")
        return self._target

    def _take_head(self) -> bytes | None:
        """Cut the head off once it is there as a whole."""
        end = self._held.find(b"\r\n\r\n", max(0, self._looked_at - 3))
        size = len(self._held) if end < 0 else end + 4
        if _NO_HTTP.search(self._held, self._looked_at, size):
            raise _error("it has NUL, or a line that does not end in CR LF")
        if size > MAX_HEAD_BYTES:
            raise _error(f"its head is longer than {MAX_HEAD_BYTES} bytes")
        self._looked_at = size
        if end < 0:
            return None
        head = bytes(self._held[:size])
        del self._held[:size]
        return head


def denial(target: ProxyTarget, refused: NetworkRefusal) -> bytes:
    """Return the body of a 403."""
    where = f"{format_host(target.host)}:{target.port}"
    why = f"{_DETAILS[refused.reason]}{describe_rule(refused.reason, refused.rule)}"
    detail = f"cannot connect to {where}: {why}"
    return msgspec.json.encode(
        _Denial(str(target.host), target.port, refused.reason, refused.rule, detail)
    )


class _Request:
    """The request in absolute form of a connection, and its body.

    Args:
        http: has read the head, and reads the body.
    """

    def __init__(
        self, target: ProxyTarget, path: str, head: h11.Request, http: h11.Connection
    ) -> None:
        self._http = http
        self._is_complete = False
        fields = list(head.headers)
        _check_framing(head, fields)
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in fields)
        port = "" if target.port == _USUAL_PORT else f":{target.port}"
        host = f"{format_host(target.host)}{port}"
        kept = [(b"Host", host.encode("ascii")), *end_to_end(fields)]
        if self._is_chunked:
            kept.append((b"Transfer-Encoding", b"chunked"))
        kept.append((b"Connection", b"close"))
        first = (head.method, path.encode("ascii"), head.http_version)
        lines = [b"%s %s HTTP/%s" % first, *(b"%s: %s" % field for field in kept)]
        self._head = b"\r\n".join((*lines, b"", b""))

    def forward(self, data: bytes) -> bytes:
        """Return the part of the request that goes to the server now."""
        out = [self._head]
        self._head = b""
        try:
            if data and not self._is_complete:  # h11 would hold what follows
                self._http.receive_data(data)
            while not self._is_complete:
                event = self._http.next_event()
                if isinstance(event, h11.Data):
                    out.append(self._write(bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    self._is_complete = True
                    out.append(b"0\r\n\r\n" if self._is_chunked else b"")
                else:
                    break  # more has to come
        except h11.RemoteProtocolError:
            raise ProxyError("cannot read the body of the request", b"") from None
        return b"".join(out)

    def _write(self, data: bytes) -> bytes:
        if not self._is_chunked or not data:
            return data
        return b"%x\r\n%s\r\n" % (len(data), data)


def _parse_head(head: bytes) -> tuple[h11.Request, h11.Connection]:
    try:
        return parse_head(head, 2 * MAX_HEAD_BYTES)
    except HeadError as why:
        raise _error(_FAULTS[why.fault]) from None


def _check_framing(head: h11.Request, fields: Fields) -> None:
    """Refuse a request whose end two servers could see in two places (RFC 9112, 6)."""
    names = {name for name, _ in fields}
    if b"transfer-encoding" in names and (
        b"content-length" in names or head.http_version == b"1.0"
    ):
        raise _error("its body has two lengths")
    if named_by_connection(fields) & NEVER_NAMED:
        raise _error("Connection names a field that is for the server")


def end_to_end(fields: Fields) -> Fields:
    """Return the fields that are not for the next hop alone, `Host` left out."""
    dropped = _HOP_BY_HOP | named_by_connection(fields) | {b"host"}
    return [(name.title(), value) for name, value in fields if name not in dropped]


def named_by_connection(fields: Fields) -> frozenset[bytes]:
    """Return the fields that `Connection` takes away."""
    values = (value for name, value in fields if name == b"connection")
    return frozenset(
        word.strip().lower() for value in values for word in value.split(b",")
    )


def _parse_url(text: str) -> tuple[ProxyTarget, str]:
    """Return the host of a URL, and the rest of the URL."""
    match = _ABSOLUTE.fullmatch(text)
    if match is None:
        raise _error("a proxy takes CONNECT and http:// URLs")
    rest = match["rest"] or "/"
    path = rest if rest.startswith("/") else f"/{rest}"
    return _parse_authority(match["authority"], _USUAL_PORT), path


def _parse_authority(text: str, usual_port: int | None) -> ProxyTarget:
    """Return the host of `HOST[:PORT]`; without a usual port, one has to be there."""
    if "@" in text:
        raise _error("a user's name in an address is refused; leave it out")
    end = text.rfind("]")
    after, colon, port_text = text[end + 1 :].partition(":")
    host_text = text[: end + 1] + after
    port = parse_port(port_text) if colon else usual_port
    if port is None:
        raise _error("a port is missing, or is no number from 1 to 65535")
    try:
        return ProxyTarget(parse_proxied_host(host_text), port)
    except HostError as why:
        raise _error(f"the host '{shorten(host_text)}' is refused: {why}") from None


def _error(reason: str) -> ProxyError:
    body = msgspec.json.encode({"error": "bad_request", "detail": reason})
    text = f"cannot read the request: {reason}"
    return ProxyError(text, _reply(b"400 Bad Request", body))


def _reply(status: bytes, body: bytes) -> bytes:
    return (
        b"HTTP/1.1 %s\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n%s"
    ) % (status, len(body), body)
