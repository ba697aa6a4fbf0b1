"""Requests to the host of a credential and its answers, written anew (spec NET15).

1. A header that the child sends in the place of the secret is dropped, whatever its case.
2. An answer is asked for plain and whole: a secret is found neither in compressed bytes
   nor in ranges of three bytes each.
3. Names, values and reason of an answer are redacted as its body is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import h11

from hostlib.http_head import VERSIONS
from supervisor.network.proxy_http import (
    NEVER_NAMED,
    Fields,
    end_to_end,
    named_by_connection,
)

if TYPE_CHECKING:
    from supervisor.network.credential_file import Credential

_HTTPS_PORT = 443

_REFUSED_METHODS = frozenset({b"CONNECT", b"TRACE"})
"""A tunnel would not be HTTP, and TRACE has a server echo the secret (RFC 9110, 9.3.8)."""
_WRITTEN_ANEW = frozenset({b"accept-encoding", b"expect", b"if-range", b"range"})
_NO_LENGTH = frozenset({b"content-length"})


class RequestRefusedError(Exception):
    """A request that is not sent on.

    Attributes:
        status: of the reply.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class AnswerRefusedError(Exception):
    """An answer that is not passed on; the text says why."""


def request_for(head: h11.Request, credential: Credential) -> h11.Request:
    """Return the head of a request as the server gets it, with the secret.

    Raises:
        RequestRefusedError: it is none that a server of HTTP is sent.
    """
    fields = list(head.headers)
    if head.method in _REFUSED_METHODS:
        method = head.method.decode("ascii")
        raise RequestRefusedError(405, f"{method} is not sent with a credential")
    if head.http_version not in VERSIONS:
        raise RequestRefusedError(400, "it is no request of HTTP/1.1 or 1.0")
    if not head.target.startswith(b"/") and head.target != b"*":
        raise RequestRefusedError(400, "a target is a path; write /PATH")
    if named_by_connection(fields) & NEVER_NAMED:
        raise RequestRefusedError(400, "Connection names a field for the server")
    names = {name for name, _ in fields}
    own = credential.terms.header.encode("ascii")
    dropped = _WRITTEN_ANEW | {_plain(own)}
    kept = [row for row in end_to_end(fields) if _plain(row[0]) not in dropped]
    if b"transfer-encoding" in names:
        kept.append((b"Transfer-Encoding", b"chunked"))
    return h11.Request(
        method=head.method,
        target=head.target,
        headers=[
            (b"Host", _host_of(credential)),
            *kept,
            (b"Accept-Encoding", b"identity"),
            (own, credential.value),
            (b"Connection", b"close"),
        ],
    )


def answer_for(
    head: h11.Response, credential: Credential, *, has_body: bool
) -> h11.Response:
    """Return the head of an answer as the child gets it.

    Args:
        head: from the server.
        credential: whose secret is blotted out.
        has_body: a body follows; its length may change, and is not told.

    Raises:
        AnswerRefusedError: the body is compressed.
    """
    fields = list(head.headers)
    codings = [value for name, value in fields if name == b"content-encoding"]
    if any(value.strip().lower() not in {b"", b"identity"} for value in codings):
        raise AnswerRefusedError("the server compresses its answer unasked")
    dropped = _NO_LENGTH if has_body else frozenset()
    blot = credential.redactor.data
    kept: Fields = []
    for name, value in end_to_end(fields):
        if name.lower() in dropped or blot(name) != name:
            continue
        found = blot(_location(value, credential) if name == b"Location" else value)
        kept.append((name, found))
    return h11.Response(
        status_code=head.status_code, headers=kept, reason=blot(bytes(head.reason))
    )


def _plain(name: bytes) -> bytes:
    """Return a field's name as CGI compares it: `X_KEY` comes to a server as `X-Key`."""
    return name.lower().replace(b"_", b"-")


def _host_of(credential: Credential) -> bytes:
    terms = credential.terms
    port = "" if terms.port == _HTTPS_PORT else f":{terms.port}"
    return f"{terms.server}{port}".encode("ascii")


def _location(value: bytes, credential: Credential) -> bytes:
    """Return where a redirect leads; the same server has its name of the child again."""
    terms = credential.terms
    port = f":{terms.port}".encode("ascii")
    ports = b"(?:%b)?" % port if terms.port == _HTTPS_PORT else port
    server = re.escape(terms.server.encode("ascii"))
    own = re.compile(rb"https://%b%b(?=[/?#]|\Z)" % (server, ports), re.IGNORECASE)
    inner = f"http://{terms.inner_name}".encode("ascii")
    return own.sub(inner, value, count=1) if own.match(value) else value
