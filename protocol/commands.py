"""The table of the FS Proxy wire: each command word, its parameters and its reply.

``COMMANDS`` is the only list of commands.  The parser and the formatter (``grammar``)
and the reference (``reference``) read it.  The grammar names three: OPEN, whose line has
a form of its own, WRITE and LLM_CHAT, which have checks that no row says.

Beside it, the pieces of an error's reply line.  A peer's text passes ``echo`` before it
stands in one (spec F6).
"""

from __future__ import annotations

from protocol import messages as m
from protocol.limits import MAX_DIGITS, MAX_ECHO_BYTES

MODES = (b"r", b"w", b"a", b"r+", b"w+", b"a+")
"""The six open modes of the wire (spec O3)."""

_CONTROL = bytes(63 if c < 32 or c == 127 else c for c in range(256))


class Command:
    """One row of the table.

    Attributes:
        word: the command word.
        message: the class of a parsed line.
        params: (kind, name) a parameter; errors use the name.  Kinds are ``fileno``,
            ``number``, ``length`` (a number of payload bytes), ``flag``, ``mode``,
            ``name`` (may hold blanks) and ``optional`` (any token, only at the end).
        required: number of parameters that may not be missing.
        is_free: whether a parameter may hold text that would not parse back.
        requires: the error for a wrong number of parameters.
        reply: ``empty`` (``OK``), ``number`` (``OK n``), ``body`` (``OK n`` and n
            bytes), ``text`` (``OK`` and free text) or ``chat`` (``OK n STATUS`` and n
            bytes).
        spare: tokens tolerated after the last parameter (spec R2).
        payload: the bytes after the line, in words, for the reference.
        about: one line for the reference.
    """

    __slots__ = (
        "about",
        "is_free",
        "message",
        "params",
        "payload",
        "reply",
        "required",
        "requires",
        "spare",
        "word",
    )

    def __init__(  # noqa: PLR0913 - one row of the table
        self,
        word: bytes,
        message: type[m.Request],
        params: tuple[tuple[str, str], ...],
        reply: str,
        about: str,
        *,
        spare: tuple[bytes, ...] = (),
        payload: str = "",
    ) -> None:
        self.word = word
        self.message = message
        self.params = params
        self.reply = reply
        self.about = about
        self.spare = spare
        self.payload = payload
        names = [name for kind, name in params if kind != "optional"]
        self.required = len(names)
        self.is_free = any(kind in ("name", "optional") for kind, _ in params)
        self.requires = error(_requires_text(word, names).encode())


def _requires_text(word: bytes, names: list[str]) -> str:
    if not names:
        return f"{word.decode()} takes no parameters"
    if len(names) > 2:
        listed = ", ".join(names[:-1]) + ", and " + names[-1]
    else:
        listed = " and ".join(names)
    return f"{word.decode()} requires {listed}"


def echo(piece: bytes) -> bytes:
    """Return peer text for an error: at most 200 bytes, no control bytes (spec F6)."""
    return piece[:MAX_ECHO_BYTES].translate(_CONTROL)


def error(text: bytes) -> bytes:
    """Return an error's reply line; each piece of a peer in ``text`` passed ``echo``."""
    return b"ERROR " + text + b"\n"


def invalid(what: str, token: bytes) -> bytes:
    """Return the reply line ``ERROR invalid WHAT: TOKEN``."""
    return b"ERROR invalid " + what.encode() + b": " + echo(token) + b"\n"


def is_number(token: bytes) -> bool:
    """Return whether a token is a number: one to 18 ASCII digits (spec F5)."""
    return token.isdigit() and len(token) <= MAX_DIGITS


FILENO = ("fileno", "fileno")
_SIZE = ("number", "size")
_FLAG = ("flag", "is_top_level")
NAME = ("name", "filename")

ROWS = (
    Command(
        b"OPEN",
        m.Open,
        (NAME, ("mode", "mode"), _FLAG),
        "number",
        "opens a file and answers its fileno",
    ),
    Command(
        b"READ",
        m.Read,
        (FILENO, _SIZE),
        "body",
        "reads at the handle's offset",
        spare=(b"true", b"false"),
    ),
    Command(
        b"WRITE",
        m.Write,
        (FILENO, ("length", "size")),
        "number",
        "writes at the handle's offset",
        payload="size bytes",
    ),
    Command(b"CLOSE", m.Close, (FILENO,), "empty", "closes a file"),
    Command(b"PING", m.Ping, (), "empty", "answers"),
    Command(b"CAPS", m.Caps, (), "body", "tells version, commands, limits, rights"),
    Command(
        b"SEEK",
        m.Seek,
        (FILENO, ("number", "offset")),
        "number",
        "sets the handle's offset, in bytes from the start",
    ),
    Command(b"SYNC", m.Sync, (FILENO,), "empty", "puts the file's data on the disk"),
    Command(b"TRUNCATE", m.Truncate, (FILENO, _SIZE), "empty", "sets the file's size"),
    Command(
        b"STAT", m.Stat, (_FLAG, NAME), "body", "tells size, mtime_ns, kind as JSON"
    ),
    Command(b"LIST", m.ListDir, (_FLAG, NAME), "body", "lists a directory as JSON"),
    Command(b"MKDIR", m.MakeDir, (_FLAG, NAME), "empty", "makes a directory"),
    Command(
        b"REMOVE",
        m.Remove,
        (_FLAG, NAME),
        "empty",
        "removes a file or empty directory",
    ),
    Command(
        b"RENAME",
        m.Rename,
        (_FLAG, ("length", "old_length"), ("length", "new_length")),
        "empty",
        "renames a file or directory",
        payload="the old name, then the new one",
    ),
    Command(
        b"ATTACH",
        m.Attach,
        (),
        "text",
        "opens one more connection: its descriptor comes with the reply's first byte",
    ),
    Command(
        b"NARROW",
        m.Narrow,
        (("length", "size"),),
        "empty",
        "gives up rights of this connection for good",
        payload="size bytes of JSON",
    ),
    Command(
        b"LLM_CHAT",
        m.Chat,
        (
            _FLAG,
            ("length", "input_files_count"),
            ("length", "output_files_count"),
            ("length", "prompt_length"),
            ("length", "preset_length"),
        ),
        "chat",
        "asks the model",
        payload="input files, output files, prompt, preset",
    ),
    Command(b"LLM_QUOTA", m.Quota, (), "text", "tells the quota"),
    Command(b"LLM_CONFIG", m.Config, (), "body", "tells the LLM configuration"),
    Command(
        b"FD_CALL",
        m.FdCall,
        (("length", "size"),),
        "body",
        "calls an LLM fd tool",
        payload="size bytes of JSON",
    ),
    Command(
        b"FD_PUT",
        m.FdPut,
        (("length", "size"), ("optional", "token")),
        "text",
        "adds a piece of content",
        payload="size bytes",
    ),
)

COMMANDS: dict[bytes, Command] = {row.word: row for row in ROWS}
"""The table, by command word."""

BY_MESSAGE: dict[type[m.Request], Command] = {row.message: row for row in ROWS}
"""The same rows, by message class."""
