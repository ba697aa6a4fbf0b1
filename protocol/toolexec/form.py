"""The form of a ToolExec request: pairs of bytes, as a shell's client wrote them.

1. ``&`` separates pairs, the first ``=`` splits one, ``+`` is a blank, ``%XX`` a byte;
   an invalid ``%`` stands for itself.  Nothing is text: the tool receives exactly the
   bytes of an argument.
2. Keys are compared without case; unknown keys are skipped.
3. A form with too many fields, too long a value or a NUL is answered with a 400 that
   says so.
4. The cost of a form is bounded before it is decoded: the number of fields is limited,
   and unknown keys and values that are too long in any encoding are not decoded.

Source: the HTML form encoding, as far as ``curl --data-urlencode`` writes it.
"""

from __future__ import annotations

import binascii
from typing import NamedTuple

MAX_TOOL_BYTES = 64
"""Longest name of a tool; the longest in any allowlist has ten."""

MAX_CWD_BYTES = 4096
"""PATH_MAX on Linux."""

MAX_ARGS = 128
"""Most arguments; with ``MAX_ARG_BYTES`` half of the default limit of execve(2)."""

MAX_ARG_BYTES = 4096
"""Longest argument."""

MAX_FIELDS = 1024
"""Most fields of query and body together, empty ones included; the largest request that
has a meaning takes 130."""

_KEYS = frozenset({b"arg", b"cmd", b"cwd", b"exec_id", b"from", b"signal", b"tool"})
_ESCAPED = 3
"""Most encoded bytes for one byte."""

_MAX_RAW_KEY_BYTES = _ESCAPED * max(map(len, _KEYS))
_MAX_RAW_VALUE_BYTES = _ESCAPED * max(MAX_TOOL_BYTES, MAX_CWD_BYTES, MAX_ARG_BYTES)

# Maps a byte to its part in an escape: "%" for the sign, "h" for a digit, else ".".
_SHAPES = bytes(
    byte if byte == 0x25 else 0x68 if chr(byte) in "0123456789ABCDEFabcdef" else 0x2E
    for byte in range(256)
)
# XOR mask that turns the "%" of an escape into the "=" of quoted-printable, RFC 2045.
_TO_QUOTED = bytes(0x25 ^ 0x3D if byte == 0x21 else 0 for byte in range(256))


class FormError(Exception):
    """A form that cannot be used; the text says why."""


class FormCall(NamedTuple):
    """The tool, directory and arguments that a form asks to run.

    Attributes:
        tool: name of the tool.
        cwd: its working directory; ``b"."`` if the form names none.
        args: its arguments, in order.
    """

    tool: bytes
    cwd: bytes
    args: tuple[bytes, ...]


def decode(text: bytes) -> bytes:
    """Return a key or value without its encoding.

    Every step is a loop in C: in Python a form of a MiB would take half a second.
    """
    text = text.replace(b"+", b" ")
    if b"%" not in text:
        return text
    text = text.replace(b"=", b"%3D")
    signs = text.translate(_SHAPES).replace(b"%hh", b"!hh").translate(_TO_QUOTED)
    quoted = int.from_bytes(text, "big") ^ int.from_bytes(signs, "big")
    return binascii.a2b_qp(quoted.to_bytes(len(text), "big"))


def pairs(*parts: bytes) -> list[tuple[bytes, bytes]]:
    """Return (key in lower case, value) of a query and a body, in that order.

    Only known keys; values are still encoded.

    Raises:
        FormError: there are too many fields.
    """
    if sum(part.count(b"&") + 1 for part in parts if part) > MAX_FIELDS:
        raise FormError(f"more than {MAX_FIELDS} fields")
    found = []
    for part in parts:
        for piece in part.split(b"&"):
            raw_key, _, value = piece.partition(b"=")
            if len(raw_key) <= _MAX_RAW_KEY_BYTES:
                key = decode(raw_key).lower()
                if key in _KEYS:
                    found.append((key, value))
    return found


def call_of(form: list[tuple[bytes, bytes]]) -> FormCall:
    """Return the call that a form describes.

    Args:
        form: from ``pairs``.

    Raises:
        FormError: the form names no tool, or breaks a bound.
    """
    tool = _name(form, b"tool")
    cwd = last(form, b"cwd")
    if cwd is None:
        cwd = b"."
    if len(cwd) > MAX_CWD_BYTES:
        raise FormError(f"cwd longer than {MAX_CWD_BYTES} bytes")
    if cwd != b"." and not cwd.startswith(b"/"):
        raise FormError("cwd is neither '.' nor an absolute path")
    return FormCall(tool, cwd, _args(form, tool, cwd))


def notification_of(
    form: list[tuple[bytes, bytes]],
) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the command and the arguments that a form notifies with.

    Raises:
        FormError: as for ``call_of``; a ``cwd`` is ignored.
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
    """Return the arguments; check them and the other values first."""
    raw_args = [value for name, value in form if name == b"arg"]
    if len(raw_args) > MAX_ARGS:
        raise FormError(f"more than {MAX_ARGS} arguments")
    args = [_decode_short(value) for value in raw_args]
    if max(map(len, args), default=0) > MAX_ARG_BYTES:
        raise FormError(f"an argument longer than {MAX_ARG_BYTES} bytes")
    if any(b"\0" in value for value in (*others, *args)):
        raise FormError("a NUL byte")
    return tuple(args)


def last(form: list[tuple[bytes, bytes]], key: bytes) -> bytes | None:
    """Return the last value of a key, decoded; None if there is none."""
    value = dict(form).get(key)
    return None if value is None else _decode_short(value)


def _decode_short(value: bytes) -> bytes:
    """Decode a value; one that is too long for any key stays encoded, and too long."""
    return decode(value) if len(value) <= _MAX_RAW_VALUE_BYTES else value
