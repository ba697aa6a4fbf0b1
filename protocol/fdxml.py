"""The XML that describes LLM fds to a model, sans-IO: values in, bytes out.

1. Every document parses with a standard parser and yields the exact text.  In bodies
   ``& < >`` are escaped and CR is ``&#13;``: a parser would turn a bare CR into LF.
2. The text of ``fd_content``, ``preview``, ``match`` and ``temp_content`` has exactly
   one LF after the start tag and one before the end tag that do not belong to the text.
3. Attributes keep their order.
4. Characters that XML 1.0 does not have (NUL, most control characters, lone surrogates)
   are replaced in attributes and messages; texts with them are served as base64.
5. ``raw`` leaves a body unescaped, for models that read code; it need not parse.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeAlias

    Value: TypeAlias = str | int | bool
    Attributes: TypeAlias = Sequence[tuple[str, Value]]

FORBIDDEN_CONTROLS = bytes(c for c in range(32) if c not in {9, 10, 13})
"""Control characters that XML 1.0 does not allow, not even escaped."""

_REPLACED = dict.fromkeys((*FORBIDDEN_CONTROLS, 0xFFFE, 0xFFFF), "\ufffd")
_REPLACED.update(dict.fromkeys(range(0xD800, 0xE000), "\ufffd"))
_IN_BODY = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", 13: "&#13;"}
_IN_ATTRIBUTE = {**_IN_BODY, ord('"'): "&quot;", 9: "&#9;", 10: "&#10;"}


def attribute(value: Value) -> str:
    """Return a value as it stands between the quotes of an attribute."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return value.translate(_REPLACED).translate(_IN_ATTRIBUTE)


def words(text: str) -> bytes:
    """Return a message as it stands in a body, UTF-8."""
    return text.translate(_REPLACED).translate(_IN_BODY).encode()


def body(text: bytes, *, raw: bool = False) -> bytes:
    """Return UTF-8 text as it stands in a body."""
    return text if raw else b"".join(_escaped(text))


def _escaped(text: bytes) -> Iterator[bytes]:
    """Yield an escaped text in pieces: a replacement does not let other threads run."""
    for start in range(0, len(text), PIECE_BYTES):
        piece = text[start : start + PIECE_BYTES]
        # In this order: an escape must not be escaped again.
        for character, escaped in _ESCAPES:
            if character in piece:
                piece = piece.replace(character, escaped)
        yield piece


PIECE_BYTES = 64 * 1024
"""Replacing this much takes a millisecond, even in a text of nothing but ``&``."""

_ESCAPES = (
    (b"&", b"&amp;"),
    (b"<", b"&lt;"),
    (b">", b"&gt;"),
    (b"\r", b"&#13;"),
)


def start(name: str, attributes: Attributes, end: str = ">") -> bytes:
    """Return a start tag; ``end`` is ``/>`` for an element without a body."""
    pairs = "".join(f' {key}="{attribute(value)}"' for key, value in attributes)
    return f"<{name}{pairs}{end}".encode()


def empty(name: str, attributes: Attributes) -> bytes:
    """Return an element that has only attributes."""
    return start(name, attributes, "/>")


def text_element(
    name: str, attributes: Attributes, text: bytes, *, raw: bool = False
) -> bytes:
    """Return an element around a text (rule 2)."""
    pieces = (text,) if raw else _escaped(text)
    head, tail = start(name, attributes) + b"\n", b"\n</%b>" % name.encode()
    return b"".join((head, *pieces, tail))


def listing(name: str, attributes: Attributes, rows: Iterable[bytes]) -> bytes:
    """Return an element with elements in it, one a line."""
    lines = b"".join(b"  %b\n" % row for row in rows)
    if not lines:
        return empty(name, attributes)
    return b"%b\n%b</%b>" % (start(name, attributes), lines, name.encode())


def result(
    attributes: Attributes, message: str, preview: bytes, *, raw: bool = False
) -> bytes:
    """Return the ``fd_result`` that stands for a large content."""
    return b"%b\n  <message>%b</message>\n  %b\n</fd_result>" % (
        start("fd_result", attributes),
        words(message),
        text_element("preview", (), preview, raw=raw),
    )


def add_summary(document: bytes, summary: str) -> bytes:
    """Return an ``fd_result`` with a summary after its message."""
    head, end, rest = document.partition(b"</message>\n")
    return b"%b%b  <summary>%b</summary>\n%b" % (head, end, words(summary), rest)


def export_result(attributes: Attributes, message: str, size: int, lines: int) -> bytes:
    """Return the ``fd_write`` of an export.

    Args:
        attributes: fd, file_path, success, mode.
        message: for the model.
        size: bytes that were written.
        lines: lines that were written.
    """
    return (
        b"%b\n  <message>%b</message>\n  <stats>\n    <bytes>%d</bytes>\n"
        b"    <lines>%d</lines>\n  </stats>\n</fd_write>"
    ) % (start("fd_write", attributes), words(message), size, lines)


def failure(kind: str, fd: str, message: str, details: str = "") -> bytes:
    """Return an ``fd_error``.

    Args:
        kind: ``not_found``, ``invalid_page``, ...
        fd: the LLM fd that the call named; empty if none.
        message: the reason, for the model.
        details: more about it; empty for none.
    """
    more = b"  <details>%b</details>\n" % words(details) if details else b""
    return b"%b\n  <message>%b</message>\n%b</fd_error>" % (
        start("fd_error", (("type", kind), ("fd", fd))),
        words(message),
        more,
    )
