"""ToolExec as it is spoken: what a request asks for, and how it is refused.

What it is: paths, methods, versions, tokens, fields and ids, checked in the order that
the protocol fixes, and the table of refusals.  What it is not: it runs nothing and
knows no tool.  ``toolexec_body`` cuts requests out of a stream, ``toolexec_form`` takes
their fields apart.

Rules of this file.

1. ``check`` is the order: path, method, token, version, fields.  Who has no token learns
   nothing but that.
2. Every refusal is a row of ``REFUSALS`` or a sentence on a row; its exit code is 86.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from protocol import toolexec_form

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REFUSED = 86
"""``X-Exit-Code`` of whatever was not run."""

TIMED_OUT = 124
"""``X-Exit-Code`` of what ran too long."""

TIMEOUT_NOTE = b"aifo-coder proxy timeout\n"
"""The last chunk of a streamed execution that ran too long."""

DEFAULT_SIGNAL = b"TERM"

SIGNALS = (b"INT", b"TERM", b"HUP", b"KILL", b"QUIT", b"USR1", b"USR2")
"""What ``/signal`` delivers."""

REASONS = {
    200: b"OK",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Payload Too Large",
    416: b"Range Not Satisfiable",
    426: b"Upgrade Required",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}

_EXEC_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_PIECES = re.compile(rb"[\t\n\v\f\r =]+")
_ABSOLUTE = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
# A word that a secret follows, what may stand between, and all the rest: where a secret
# ends depends on who reads it, in a script on its quotes.
_SECRET = re.compile(
    r"((?:(?<![\w-])--?(?:token|password|api[-_]?key|key)(?![\w-])|bearer(?![a-z]))"
    r"[\s=:,\"']*)(.*)",
    re.IGNORECASE | re.DOTALL,
)
# Long enough to be a child's token, or the MAC of a narrowed one.
_TOKEN = re.compile(r"(?<![0-9a-f])[0-9a-f]{32,}", re.IGNORECASE)
_MAX_OFFSET_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reply to what is not done.

    Attributes:
        status: of HTTP.
        body: one line with its LF.
        exit_code: what a shim exits with.
        headers: beyond those that every reply has.
    """

    status: int
    body: bytes
    exit_code: int = REFUSED
    headers: tuple[tuple[bytes, bytes], ...] = ()


UNAUTHORIZED = Refusal(401, b"unauthorized\n")
NOT_FOUND = Refusal(404, b"not found\n")
METHOD_NOT_ALLOWED = Refusal(405, b"method not allowed\n")
PAYLOAD_TOO_LARGE = Refusal(413, b"payload too large\n")
HEAD_TOO_LARGE = Refusal(431, b"request headers too large\n")
BUSY = Refusal(503, b"busy\n", headers=((b"Retry-After", b"1"),))
TIMEOUT = Refusal(504, b"timeout\n", TIMED_OUT)
NOTIFY_TIMEOUT = Refusal(408, b"timeout\n", TIMED_OUT)
BAD_VERSION = Refusal(
    426,
    b"Unsupported shim protocol; expected 1 or 2\n",
    headers=((b"Upgrade", b"aifo-toolexec/2, aifo-toolexec/1"),),
)
BAD_NOTIFY_VERSION = replace(
    BAD_VERSION, body=b"unsupported notify protocol; expected 2\n"
)


def bad_request(why: str) -> Refusal:
    """Return the 400 for a reason."""
    return Refusal(400, f"bad request: {shown(why)}\n".encode())


def not_permitted(tool: str) -> Refusal:
    """Return the 403 for a tool that no allowlist has."""
    text = f"forbidden: tool '{shown(tool)}' is not permitted by any allowlist\n"
    return Refusal(403, text.encode())


def id_in_use(exec_id: str) -> Refusal:
    """Return the 409 for an id that a live execution has."""
    return Refusal(409, f"exec id '{exec_id}' is in use\n".encode())


def host_fault(why: str) -> Refusal:
    """Return the 500 for something that the host could not do."""
    return Refusal(500, f"aifo-coder proxy error: {shown(why)}\n".encode())


def dropped(offset: int) -> Refusal:
    """Return the 416 for output that is not kept any more."""
    return Refusal(416, b"output before byte %d is no longer kept\n" % offset)


# What was asked for


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request, as a parser of HTTP gives it; header names in lower case."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    version: bytes = b"1.1"

    def values(self, name: bytes) -> list[bytes]:
        """Return all values of a header."""
        return [value for key, value in self.headers if key == name]

    def says(self, name: bytes) -> bool:
        """Whether a header switches something on with ``1``."""
        return b"1" in self.values(name)


@dataclass(frozen=True, slots=True)
class Exec:
    """Run a tool.

    Attributes:
        version: 1 buffered, 2 streamed.
        tool: its name; text stands for bytes.
        cwd: where; not yet resolved.
        args: its arguments.
        exec_id: what the client wants it to be called.
        detach: it outlives its client's connection.
        as_fd: large output may be answered as a handle.
    """

    version: int
    tool: str
    cwd: bytes
    args: tuple[bytes, ...]
    exec_id: str | None = None
    detach: bool = False
    as_fd: bool = False


@dataclass(frozen=True, slots=True)
class Signal:
    """Signal an execution; ``signal`` without SIG."""

    exec_id: str
    signal: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Run the notification command."""

    command: str
    args: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Send an execution's output from an offset."""

    exec_id: str
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Health:
    """Say that the server is there."""


Request = Exec | Signal | Notify | Replay | Health


@dataclass(frozen=True, slots=True)
class _Path:
    """A path that exists: its only method, and what reads the rest of a request."""

    method: bytes
    read: Callable[[Head, _Asked], Request | Refusal]
    has_token: bool = True


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request holds beyond its head.

    Attributes:
        exec_id: from the path.
        form: the pairs of query and body.
    """

    exec_id: bytes = b""
    form: list[tuple[bytes, bytes]] = field(default_factory=list)


def check(
    head: Head, body: bytes, is_authorized: Callable[[Sequence[bytes]], bool]
) -> Request | Refusal:
    """Take a request apart, in the order of the protocol.

    Args:
        head: parsed.
        body: all of it.
        is_authorized: told the pieces that may be a token (``token_pieces``).
    """
    target = head.target
    absolute = _ABSOLUTE.match(target)
    path, _, query = (target[absolute.end() :] if absolute else target).partition(b"?")
    name, exec_id = path.lower(), b""
    if name.startswith(b"/exec/"):
        name, exec_id = b"/exec/", path[len(b"/exec/") :]
    known = _PATHS.get(name)
    if known is None:
        return NOT_FOUND
    if head.method != known.method:
        return replace(METHOD_NOT_ALLOWED, headers=((b"Allow", known.method),))
    if known.has_token and not is_authorized(
        token_pieces(head.values(b"authorization"))
    ):
        return UNAUTHORIZED
    try:
        return known.read(head, _Asked(exec_id, toolexec_form.pairs(query, body)))
    except toolexec_form.FormError as why:
        return bad_request(str(why))


def version_of(head: Head) -> int:
    """Return the version that a head asks for; 0 for none that is spoken."""
    found = head.values(b"x-aifo-proto")
    if len(found) != 1 or found[0].strip() not in (b"1", b"2"):
        return 0
    return int(found[0])


def token_pieces(values: Sequence[bytes]) -> list[bytes]:
    """Return what may be the token in the values of ``Authorization``.

    Each value as it is, and its last piece between blanks and ``=``, whatever the
    scheme, without the punctuation around it.
    """
    found = []
    for value in values:
        pieces = [piece for piece in _PIECES.split(value) if piece]
        found += [value, *(piece.strip(b",;\"'") for piece in pieces[-1:])]
    return found


def is_exec_id(text: bytes) -> bool:
    """Whether a text can name an execution."""
    return _EXEC_ID.fullmatch(text) is not None


def _read_exec(head: Head, asked: _Asked) -> Request | Refusal:
    version = version_of(head)
    # HTTP/1.0 has no chunks, so there is nothing to stream in (spec: 426).
    if version == 0 or (version == 2 and head.version == b"1.0"):
        return BAD_VERSION
    call = toolexec_form.call_of(asked.form)
    ids = head.values(b"x-aifo-exec-id")
    if len(ids) > 1 or not all(map(is_exec_id, ids)):
        return bad_request("bad exec id")
    return Exec(
        version,
        _text(call.tool),
        call.cwd,
        call.args,
        exec_id=ids[0].decode() if ids else None,
        detach=head.says(b"x-aifo-detach"),
        as_fd=head.says(b"x-sandhost-fd"),
    )


def _read_replay(head: Head, asked: _Asked) -> Request | Refusal:
    if version_of(head) != 2 or head.version == b"1.0":
        return BAD_VERSION
    if not is_exec_id(asked.exec_id):
        return bad_request("bad exec id")
    offset = toolexec_form.last(asked.form, b"from")
    if offset is None:
        offset = b"0"
    if not offset.isdigit() or len(offset) > _MAX_OFFSET_DIGITS:
        return bad_request("bad offset")
    return Replay(asked.exec_id.decode(), int(offset))


def _read_signal(head: Head, asked: _Asked) -> Request | Refusal:
    if version_of(head) == 0:
        return BAD_VERSION
    exec_id = toolexec_form.last(asked.form, b"exec_id")
    if not exec_id:
        return bad_request("no exec_id")
    if not is_exec_id(exec_id):
        return bad_request("bad exec id")
    name = toolexec_form.last(asked.form, b"signal")
    name = DEFAULT_SIGNAL if name is None else name.upper().removeprefix(b"SIG")
    if name not in SIGNALS:
        return bad_request("bad signal")
    return Signal(exec_id.decode(), name.decode())


def _read_notify(head: Head, asked: _Asked) -> Request | Refusal:
    if version_of(head) != 2:
        return BAD_NOTIFY_VERSION
    command, args = toolexec_form.notification_of(asked.form)
    return Notify(_text(command), args)


def _read_health(_head: Head, _asked: _Asked) -> Request | Refusal:
    return Health()


# In lower case; `/exec/` stands for those with an id.
_PATHS = {
    b"/exec": _Path(b"POST", _read_exec),
    b"/exec/": _Path(b"GET", _read_replay),
    b"/signal": _Path(b"POST", _read_signal),
    b"/notify": _Path(b"POST", _read_notify),
    b"/healthz": _Path(b"GET", _read_health, has_token=False),
}


# Text for people


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def shown(text: str) -> str:
    """Return a text for one line: no control characters, no lone surrogates."""
    return "".join(char if char.isprintable() else "?" for char in text)


def redacted(args: Sequence[bytes]) -> str:
    """Return arguments for a log line, without what may be a secret.

    Left out is what follows ``--token``, ``--password``, ``--api-key``, ``--key`` and
    ``Bearer``: the rest of the argument, wherever in it that begins, or the next argument
    if there is no rest. So is what has the shape of a token.
    """
    found: list[str] = []
    hidden = False
    for arg in args:
        text = _text(arg)
        secret = _SECRET.search(text)
        is_next = secret is not None and not secret[2]
        if hidden:
            # What stands for the secret of another word may be such a word itself.
            hidden = is_next or not text.strip()
            text = "***"
        elif secret is not None:
            hidden = is_next
            text = text[: secret.end(1)] + ("" if hidden else "***")
        found.append(shown(_TOKEN.sub("***", text)))
    return " ".join(found)
