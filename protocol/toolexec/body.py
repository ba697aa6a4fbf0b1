"""Readers that cut the head and body of a ToolExec request out of a stream.

Bounds and framing are stricter than those of HTTP libraries.

1. A head has at most ``MAX_HEAD_BYTES`` and ``MAX_HEAD_LINES``; its lines may end in a
   bare LF.
2. In chunk framing every line ends in CRLF, and in nothing else: two readers that
   disagree about the end of a line see two requests in one (attack 33).
3. A request with a length that is chunked as well is refused.
4. A reader keeps at most a body and one line.  Chunks may be small, for their sizes are
   not kept; extensions and trailers have ``MAX_EXTRA_BYTES`` in all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_HEAD_BYTES = 65_536
"""Longest head, its blank line included."""

MAX_HEAD_LINES = 1024
"""Most lines of a head, the request line included, the blank one not."""

MAX_BODY_BYTES = 1024 * 1024
"""Longest body: 128 arguments of 4,096 bytes that are all escaped would be 1.5 MiB, and
no real request is like that."""

MAX_CHUNK_LINE_BYTES = 256
"""Longest line of a chunk's size, extensions included."""

MAX_EXTRA_BYTES = MAX_HEAD_BYTES
"""Most bytes of chunk framing beyond sizes and line ends: extensions, blanks and zeros
before a size, and trailers, which are header lines and have the bound of a head."""

_BLANK_LINE = re.compile(rb"\n\r?\n")
_LENGTH = re.compile(rb"[0-9]{1,20}")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
# The same with CRLF; it finds no line that is longer than it may be.
_SIZE_LINE = re.compile(
    rb"([0-9A-Fa-f]{1,16})[ \t]{0,99}(?:;[\t\x20-\x7e\x80-\xff]{0,99})?\r\n"
)
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class FramingError(Exception):
    """The end of a request is ambiguous: 400."""


class HeadTooLargeError(Exception):
    """A head, or the extensions and trailers of chunks, beyond the bounds: 431."""


class BodyTooLargeError(Exception):
    """A body beyond its bound: 413."""


class HeadReader:
    """Separates the head from a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._lines = 0

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Add received bytes, and return the head once it is complete.

        Returns:
            The head with its blank line, and the bytes after it; None if more is needed.

        Raises:
            HeadTooLargeError: the head passes a bound, complete or not.
        """
        seen = len(self._buffer)
        self._buffer += data
        end = _BLANK_LINE.search(self._buffer, max(0, seen - 2))
        size = end.end() if end else len(self._buffer)
        self._lines += self._buffer.count(b"\n", seen, size)
        if size > MAX_HEAD_BYTES or self._lines - bool(end) > MAX_HEAD_LINES:
            raise HeadTooLargeError
        if end is None:
            return None
        return bytes(self._buffer[:size]), bytes(self._buffer[size:])


class BodyReader:
    """Separates a body from the bytes after a head.

    Args:
        headers: of the head, names in lower case.
        version: ``b"1.0"`` or ``b"1.1"``.

    Attributes:
        body: the decoded body so far.
        is_complete: the body has ended.
        rest: the bytes after its end.

    Raises:
        FramingError: the head gives two lengths, or one that cannot be understood.
        BodyTooLargeError: the head announces more than the bound.
    """

    def __init__(self, headers: Sequence[tuple[bytes, bytes]], version: bytes) -> None:
        self.body = bytearray()
        self.rest = b""
        self._buffer = bytearray()
        self._extra_bytes = 0
        lengths = [value for name, value in headers if name == b"content-length"]
        codings = [value for name, value in headers if name == b"transfer-encoding"]
        if codings and (lengths or version == b"1.0"):
            raise FramingError("Transfer-Encoding beside Content-Length or in HTTP/1.0")
        if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
            raise FramingError("a Transfer-Encoding other than chunked")
        if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
            raise FramingError("a bad Content-Length")
        self._left = int(lengths[0]) if lengths else 0
        if self._left > MAX_BODY_BYTES:
            raise BodyTooLargeError
        self._is_chunked = bool(codings)
        self._step = self._size_line if codings else self._last_part
        self.is_complete = not codings and self._left == 0

    def feed(self, data: bytes) -> None:
        """Add received bytes to the body.

        Raises:
            FramingError: the bytes are no chunk.
            BodyTooLargeError: the body is longer than its bound.
            HeadTooLargeError: extensions and trailers are longer than their bound.
        """
        self._buffer += data
        while not self.is_complete and self._step():
            pass
        if self.is_complete:
            self.rest += self._buffer
            self._buffer.clear()

    def replay(self) -> tuple[bytes | bytearray, ...]:
        """Return the bytes that bring a new reader to the state of this one.

        The parts are no copies: they are good until the next ``feed``.  The decoded body
        is one chunk of them, not the chunks that came.
        """
        if not self._is_chunked:
            return self.body, self._buffer, self.rest
        size, behind = len(self.body) + self._left, b""
        if self._step in {self._size_line, self._trailer_line}:
            behind += b"\r\n" if size else b""
        if self._step == self._trailer_line:
            behind += b"0\r\n"
        if self.is_complete:
            behind += b"\r\n"
        start = b"%x\r\n" % size if size else b""
        return start, self.body, behind, self._buffer, self.rest

    # Each step takes the bytes that it can and returns whether the next one may begin.

    def _last_part(self) -> bool:
        self._take_part()
        self.is_complete = self._left == 0
        return False

    def _take_whole_chunks(self) -> None:
        """Take the chunks that have been received completely.

        The steps take the rest.  This only makes a body in small chunks cheaper.
        """
        buffer, body, at = self._buffer, self.body, 0
        extra_bytes = self._extra_bytes
        while line := _SIZE_LINE.match(buffer, at):
            start, size = line.end(), int(line[1], 16)
            end = start + size
            if not size or len(body) + size > MAX_BODY_BYTES:
                break
            extra_bytes += start - at - 2 - len(b"%x" % size)
            if extra_bytes > MAX_EXTRA_BYTES or buffer[end : end + 2] != b"\r\n":
                break
            body += buffer[start:end]
            at, self._extra_bytes = end + 2, extra_bytes
        del buffer[:at]

    def _size_line(self) -> bool:
        self._take_whole_chunks()
        line = self.take_line(MAX_CHUNK_LINE_BYTES, FramingError("a long chunk size"))
        if line is None:
            return False
        size = _SIZE.fullmatch(line)
        if size is None:
            raise FramingError("a bad chunk size")
        self._left = int(size[1], 16)
        if len(self.body) + self._left > MAX_BODY_BYTES:
            raise BodyTooLargeError
        self._take_extra(len(line) - len(b"%x" % self._left))
        self._step = self._chunk if self._left else self._trailer_line
        return True

    def _chunk(self) -> bool:
        self._take_part()
        if self._left == 0:
            self._step = self._chunk_end
        return self._left == 0

    def _chunk_end(self) -> bool:
        if len(self._buffer) < 2 and b"\r\n".startswith(self._buffer):
            return False
        if not self._buffer.startswith(b"\r\n"):
            raise FramingError("a chunk longer than its size")
        del self._buffer[:2]
        self._step = self._size_line
        return True

    def _trailer_line(self) -> bool:
        longest = MAX_EXTRA_BYTES - self._extra_bytes
        line = self.take_line(longest, HeadTooLargeError())
        if line is None:
            return False
        self._take_extra(len(line) + 2 if line else 0)
        if line and not _TRAILER.fullmatch(line):
            raise FramingError("a bad trailer")
        self.is_complete = not line
        return True

    def _take_part(self) -> None:
        part = self._buffer[: self._left]
        del self._buffer[: len(part)]
        self.body += part
        self._left -= len(part)

    def _take_extra(self, size_bytes: int) -> None:
        self._extra_bytes += size_bytes
        if self._extra_bytes > MAX_EXTRA_BYTES:
            raise HeadTooLargeError

    def take_line(self, longest: int, too_long: Exception) -> bytes | None:
        """Remove and return a line without its CRLF; None if it is not complete."""
        end = self._buffer.find(b"\n", 0, longest + 2)
        if end < 0:
            if len(self._buffer) <= longest + 1:
                return None
            raise too_long
        if end < 1 or self._buffer[end - 1] != 0x0D:
            raise FramingError("a line without CRLF in the chunks")
        line = bytes(self._buffer[: end - 1])
        del self._buffer[: end + 1]
        return line


REPLAY = b"/exec/ID"
"""Stands for the paths of executions; no path in lower case equals it."""

_ABSOLUTE = re.compile(rb"https?://[^/?]*", re.IGNORECASE)


@dataclass(frozen=True)
class Head:
    """The head of a request, as an HTTP parser gives it; header names in lower case."""

    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    version: bytes = b"1.1"

    def values(self, name: bytes) -> list[bytes]:
        """Return all values of a header."""
        return [value for key, value in self.headers if key == name]

    def has_switch(self, name: bytes) -> bool:
        """Return whether a header switches something on with ``1``."""
        return b"1" in self.values(name)

    @cached_property
    def place(self) -> tuple[bytes, bytes, bytes]:
        """(path in lower case, query, id) of the target; only ``REPLAY`` has an id."""
        absolute = _ABSOLUTE.match(self.target)
        target = self.target[absolute.end() :] if absolute else self.target
        path, _, query = target.partition(b"?")
        name = path.lower()
        if name.startswith(b"/exec/") and name != b"/exec/":
            return REPLAY, query, path[len(b"/exec/") :]
        return name, query, b""

    @cached_property
    def speaks(self) -> int:
        """The protocol version that the client asks for; 0 for none or an unknown one."""
        found = self.values(b"x-aifo-proto")
        if len(found) != 1 or found[0].strip() not in (b"1", b"2"):
            return 0
        return int(found[0])

    @cached_property
    def authorizations(self) -> list[bytes]:
        """The values of ``Authorization``."""
        return self.values(b"authorization")

    @cached_property
    def tokens(self) -> list[bytes]:
        """The texts in ``Authorization`` that may be the token.

        Each value as it is, and its last piece between blanks and ``=``, whatever the
        scheme, without the punctuation around it.
        """
        found = []
        for value in self.authorizations:
            last = value.replace(b"=", b" ").rsplit(maxsplit=1)[-1:]
            found += [value, *(piece.strip(b",;\"'") for piece in last)]
        return found
