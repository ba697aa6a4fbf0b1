"""The requests of ToolExec and their refusals, in the order of the protocol.

``body`` cuts requests out of a stream and has their heads, ``form`` reads their fields.

Rules of this file.

1. ``check`` keeps the order: path, method, token, version, fields.  A client without a
   token learns only that it has none.  The head decides everything but the fields
   (``decide_by_head``), so a server can refuse before it receives a body.
2. The exit code of a refusal is 86, or 124 after a timeout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from protocol.toolexec import form as toolexec_form
from protocol.toolexec.body import REPLAY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.toolexec.body import Head


REFUSED = 86
"""``X-Exit-Code`` of a request that ran no tool."""

TIMED_OUT = 124
"""``X-Exit-Code`` of a tool that ran too long."""

TIMEOUT_NOTE = b"aifo-coder proxy timeout\n"
"""The last chunk of a streamed execution that ran too long."""

DEFAULT_SIGNAL = b"TERM"

SIGNALS = (b"INT", b"TERM", b"HUP", b"KILL", b"QUIT", b"USR1", b"USR2")
"""The signals that ``/signal`` delivers."""

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

MAX_AUTHORIZATIONS = 8
"""Most ``Authorization`` headers of a request: each is looked up before the client is
known."""

_EXEC_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_MAX_OFFSET_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reply to a request that the server does not carry out.

    Attributes:
        status: of HTTP.
        body: one line with its LF.
        exit_code: the status with which a shim exits.
        headers: headers beyond those of every reply.
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
BODY_TIMEOUT = Refusal(408, b"the body took too long\n")
HEALTHY = Refusal(200, b"ok\n", 0)
"""The answer to ``Health``; like a refusal it is sent before any body is received."""
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
    return Refusal(400, f"bad request: {printable(why)}\n".encode())


def not_permitted(tool: str) -> Refusal:
    """Return the 403 for a tool that no allowlist has."""
    text = f"forbidden: tool '{printable(tool)}' is not permitted by any allowlist\n"
    return Refusal(403, text.encode())


def id_in_use(exec_id: str) -> Refusal:
    """Return the 409 for an id that a live execution has."""
    return Refusal(409, f"exec id '{exec_id}' is in use\n".encode())


def host_fault(why: str) -> Refusal:
    """Return the 500 for something that the host could not do."""
    return Refusal(500, f"aifo-coder proxy error: {printable(why)}\n".encode())


def output_gone(offset: int) -> Refusal:
    """Return the 416 for output that the server does not keep any more."""
    return Refusal(416, b"output before byte %d is no longer kept\n" % offset)


# Requests


@dataclass(frozen=True, slots=True)
class Exec:
    """Run a tool.

    Attributes:
        version: 1 buffered, 2 streamed.
        tool: name of the tool; bytes as text with surrogates.
        cwd: its working directory; not yet resolved.
        args: its arguments.
        exec_id: the id that the client chose for the execution.
        detach: the execution outlives its client's connection.
        as_fd: large output may be answered as an LLM fd.
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
    """Send an execution's output from an offset, or only the head of that reply."""

    exec_id: str
    offset_bytes: int
    head_only: bool = False


@dataclass(frozen=True, slots=True)
class Health:
    """Answer that the server runs."""


Request = Exec | Signal | Notify | Replay | Health


@dataclass(frozen=True, slots=True)
class _Path:
    """A path that exists: its methods, and the reader of the rest of a request.

    Attributes:
        methods: the methods that it allows.
        has_version: returns whether a head asks for a known version.
        read: reads the rest.
        bad_version: the answer to another version.
    """

    methods: tuple[bytes, ...]
    has_version: Callable[[Head], bool]
    read: Callable[[Head, _RequestParts], Request | Refusal]
    bad_version: Refusal = BAD_VERSION


@dataclass(frozen=True, slots=True)
class _RequestParts:
    """The id and form of a request.

    Attributes:
        exec_id: the id in the path.
        form: the pairs of query and body.
    """

    exec_id: bytes = b""
    form: list[tuple[bytes, bytes]] = field(default_factory=list)


def check(
    head: Head, body: bytes, is_authorized: Callable[[Sequence[bytes]], bool]
) -> Request | Refusal:
    """Return the request of a head and body, or its refusal, in the protocol's order.

    Args:
        head: the parsed head.
        body: the complete body.
        is_authorized: takes the possible tokens (``Head.tokens``), and returns whether
            one is valid.
    """
    decision = decide_by_head(head, is_authorized)
    if decision is not None:
        return decision
    path, query, exec_id = head.place
    try:
        form = toolexec_form.pairs(query, body)
        return _PATHS[path].read(head, _RequestParts(exec_id, form))
    except toolexec_form.FormError as why:
        return bad_request(str(why))


def decide_by_head(
    head: Head, is_authorized: Callable[[Sequence[bytes]], bool]
) -> Health | Refusal | None:
    """Return the answer that a head alone decides; None if the body is needed."""
    if len(head.authorizations) > MAX_AUTHORIZATIONS:
        return bad_request(f"more than {MAX_AUTHORIZATIONS} Authorization headers")
    name, _, _ = head.place
    path = _PATHS.get(name)
    if path is None and name != _HEALTH:
        return NOT_FOUND
    methods = _GET if path is None else path.methods
    if head.method not in methods:
        allow = (b"Allow", b", ".join(methods))
        return replace(METHOD_NOT_ALLOWED, headers=(allow,))
    if path is None:
        return Health()
    if not is_authorized(head.tokens):
        return UNAUTHORIZED
    return None if path.has_version(head) else path.bad_version


def is_exec_id(text: bytes) -> bool:
    """Return whether a text can name an execution."""
    return _EXEC_ID.fullmatch(text) is not None


def _is_executable(head: Head) -> bool:
    # HTTP/1.0 has no chunks, so it cannot stream (spec: 426).
    return head.speaks == 1 or _is_streamable(head)


def _is_streamable(head: Head) -> bool:
    return head.speaks == 2 and head.version != b"1.0"


def _read_exec(head: Head, asked: _RequestParts) -> Request | Refusal:
    call = toolexec_form.call_of(asked.form)
    ids = head.values(b"x-aifo-exec-id")
    if len(ids) > 1 or not all(map(is_exec_id, ids)):
        return bad_request("bad exec id")
    return Exec(
        head.speaks,
        _text(call.tool),
        call.cwd,
        call.args,
        exec_id=ids[0].decode() if ids else None,
        detach=head.has_switch(b"x-aifo-detach"),
        as_fd=head.has_switch(b"x-sandhost-fd"),
    )


def _read_replay(head: Head, asked: _RequestParts) -> Request | Refusal:
    if not is_exec_id(asked.exec_id):
        return bad_request("bad exec id")
    offset = toolexec_form.last(asked.form, b"from")
    if offset is None:
        offset = b"0"
    if not offset.isdigit() or len(offset) > _MAX_OFFSET_DIGITS:
        return bad_request("bad offset")
    return Replay(asked.exec_id.decode(), int(offset), head.method == b"HEAD")


def _read_signal(_head: Head, asked: _RequestParts) -> Request | Refusal:
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


def _read_notify(_head: Head, asked: _RequestParts) -> Request | Refusal:
    command, args = toolexec_form.notification_of(asked.form)
    return Notify(_text(command), args)


_HEALTH = b"/healthz"
"""The only path that needs no token, version or form."""

_GET = (b"GET", b"HEAD")
_POST = (b"POST",)

# In lower case, except for REPLAY.
_PATHS = {
    b"/exec": _Path(_POST, _is_executable, _read_exec),
    REPLAY: _Path(_GET, _is_streamable, _read_replay),
    b"/signal": _Path(_POST, lambda head: head.speaks != 0, _read_signal),
    b"/notify": _Path(
        _POST, lambda head: head.speaks == 2, _read_notify, BAD_NOTIFY_VERSION
    ),
}


# Text for people


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """Return a text for one line, without control characters and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


# Log lines of a request hide secrets in its arguments.  The end of a secret depends on
# the program that reads it (in a script on quotes), so an argument is hidden from the
# word that announces a secret to its end.

# Groups: a word that announces a secret with the separator after it, and the rest.
_SECRET = re.compile(
    r"((?:(?<![\w-])--?(?:token|password|api[-_]?key|key)(?![\w-])|bearer(?![a-z]))"
    r"[\s=:,\"']*)(.*)",
    re.IGNORECASE | re.DOTALL,
)
# The shape of a child's token, or of the MAC of a narrowed one.
_TOKEN = re.compile(r"(?<![0-9a-f])[0-9a-f]{32,}", re.IGNORECASE)


def redact(args: Sequence[bytes]) -> str:
    """Return arguments for a log line, without possible secrets.

    After ``--token``, ``--password``, ``--api-key``, ``--key`` and ``Bearer`` the rest of
    the argument is hidden, or the next argument if there is no rest.  A text with the
    shape of a token is hidden as well.
    """
    found: list[str] = []
    hidden = False
    for arg in args:
        text = arg.decode("utf-8", "surrogateescape")
        secret = _SECRET.search(text)
        is_next = secret is not None and not secret[2]
        if hidden:
            # A hidden argument may itself be a word that announces a secret.
            hidden = is_next or not text.strip()
            text = "***"
        elif secret is not None:
            hidden = is_next
            text = text[: secret.end(1)] + ("" if hidden else "***")
        found.append(printable(_TOKEN.sub("***", text)))
    return " ".join(found)
