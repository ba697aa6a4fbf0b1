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


def call_of(form: list[tuple[bytes, bytes]]) -> Call:
    """Return the call that a form describes.

    Args:
        form: from ``pairs``.

    Raises:
        FormError: it names no tool, or breaks a bound.
    """
    tool = _name(form, b"tool")
    cwd = last(form, b"cwd")
    if cwd is None:
        cwd = b"."
    if len(cwd) > MAX_CWD_BYTES:
        raise FormError(f"cwd longer than {MAX_CWD_BYTES} bytes")
    if cwd != b"." and not cwd.startswith(b"/"):
        raise FormError("cwd is neither '.' nor an absolute path")
    return Call(tool, cwd, _args(form, tool, cwd))


def notification_of(
    form: list[tuple[bytes, bytes]],
) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the command and the arguments that a form notifies with.

    Raises:
        FormError: as for ``call_of``; it has no ``cwd``, so one is passed over.
    """
    command = _name(form, b"cmd")
    return command, _args(form, command)


def _name(form: list[tuple[bytes, bytes]], key: bytes) -> bytes:
    name = last(form, key)
    if not name:
        raise FormError(f"no {key.decode()}")
    if len(name) > MAX_TOOL_BYTES:
        raise FormError(f"{key.decode()} longer than {MAX_TOOL_BYTES} bytes")
    return name


def _args(form: list[tuple[bytes, bytes]], *others: bytes) -> tuple[bytes, ...]:
    """Return the arguments, once they and the other values are found to be usable."""
    args = [value for name, value in form if name == b"arg"]
    if len(args) > MAX_ARGS:
        raise FormError(f"more than {MAX_ARGS} arguments")
    if max(map(len, args), default=0) > MAX_ARG_BYTES:
        raise FormError(f"an argument longer than {MAX_ARG_BYTES} bytes")
    if any(b"\0" in value for value in (*others, *args)):
        raise FormError("a NUL byte")
    return tuple(args)


def last(form: list[tuple[bytes, bytes]], key: bytes) -> bytes | None:
    """Return the last value of a key, None if there is none."""
    return dict(form).get(key)
