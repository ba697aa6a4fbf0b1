"""The form of a ToolExec request: pairs of bytes, as a shell's client wrote them.

Rules of this file.

1. ``&`` separates pairs, the first ``=`` splits one, ``+`` is a blank, ``%XX`` a byte;
   an invalid ``%`` stands for itself.  Nothing is text: an argument is what the tool
   will see, byte by byte.
2. Keys are compared without case; keys that nobody asked for are passed over.
3. What is too long, too many, or holds NUL is said in words for a 400.

Source: the HTML form encoding, as far as ``curl --data-urlencode`` writes it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_TOOL_BYTES = 64
"""Longest name of a tool; the longest in any allowlist has ten."""

MAX_CWD_BYTES = 4096
"""PATH_MAX on Linux."""

MAX_ARGS = 128
"""Most arguments; with the next bound half of what execve(2) takes by default."""

MAX_ARG_BYTES = 4096
"""Longest argument."""

_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")


class FormError(Exception):
    """A form that cannot be used; the text says why."""


class Call(NamedTuple):
    """What a form asks to run.

    Attributes:
        tool: its name.
        cwd: where, ``b"."`` unless the form says so.
        args: its arguments, in order.
    """

    tool: bytes
    cwd: bytes
    args: tuple[bytes, ...]


def decode(text: bytes) -> bytes:
    """Undo the encoding of one key or value."""
    text = text.replace(b"+", b" ")
    if b"%" not in text:
        return text
    return _ESCAPE.sub(lambda found: bytes((int(found[1], 16),)), text)


def pairs(*parts: bytes) -> list[tuple[bytes, bytes]]:
    """Return (key in lower case, value) of a query and a body, in that order."""
    found = []
    for part in parts:
        for piece in part.split(b"&"):
            if piece:
                key, _, value = piece.partition(b"=")
                found.append((decode(key).lower(), decode(value)))
    return found


def call_of(form: list[tuple[bytes, bytes]], key: bytes = b"tool") -> Call:
    """Return the call that a form describes.

    Args:
        form: from ``pairs``.
        key: what names the tool: ``tool``, or ``cmd`` for a notification.

    Raises:
        FormError: it names none, or breaks a bound.
    """
    tool, cwd = last(form, key), last(form, b"cwd")
    args = [value for name, value in form if name == b"arg"]
    if cwd is None:
        cwd = b"."
    if not tool:
        raise FormError(f"no {key.decode()}")
    if len(tool) > MAX_TOOL_BYTES:
        raise FormError(f"{key.decode()} longer than {MAX_TOOL_BYTES} bytes")
    _check_cwd(cwd)
    if len(args) > MAX_ARGS:
        raise FormError(f"more than {MAX_ARGS} arguments")
    if max(map(len, args), default=0) > MAX_ARG_BYTES:
        raise FormError(f"an argument longer than {MAX_ARG_BYTES} bytes")
    if any(b"\0" in value for value in (tool, cwd, *args)):
        raise FormError("a NUL byte")
    return Call(tool, cwd, tuple(args))


def _check_cwd(cwd: bytes) -> None:
    if len(cwd) > MAX_CWD_BYTES:
        raise FormError(f"cwd longer than {MAX_CWD_BYTES} bytes")
    if cwd != b"." and not cwd.startswith(b"/"):
        raise FormError("cwd is neither '.' nor an absolute path")


def last(form: list[tuple[bytes, bytes]], key: bytes) -> bytes | None:
    """Return the last value of a key, None if there is none."""
    return dict(form).get(key)
