"""The lines that a client of the control socket receives, as bytes without I/O."""

from __future__ import annotations

MAX_LINE_BYTES = 256 * 1024 * 1024
"""Longest answer: a row has some 300 bytes, a host a million files."""


class LineTooLongError(ValueError):
    """The other end sends no line of the control socket."""


class LineReader:
    """The lines of one connection, made of the pieces in which they are received."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are whole now, without their ends.

        Raises:
            LineTooLongError: one has more than ``MAX_LINE_BYTES``.
        """
        first, *others = data.split(b"\n")
        self._size += len(first)
        if self._size > MAX_LINE_BYTES:
            raise LineTooLongError(f"a line has more than {MAX_LINE_BYTES} bytes")
        self._parts.append(first)
        if not others:
            return []
        whole = b"".join(self._parts)
        self._parts, self._size = [others[-1]], len(others[-1])
        return [whole, *others[:-1]]

    def rest(self) -> bytes:
        """Return what has come of a line that is not whole."""
        return b"".join(self._parts)
