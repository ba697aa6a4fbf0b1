"""Where a ToolExec request begins and ends: head and body, cut out of a stream.

The bounds and the framing, stricter than HTTP libraries are.

Rules of this file.

1. A head has at most ``MAX_HEAD_BYTES`` and ``MAX_HEAD_LINES``; its lines may end in a
   bare LF.
2. In chunk framing every line ends in CRLF, and nothing else is taken for its end: two
   readers that differ about that see two requests in one (attack 33).
3. A request that has a length and is chunked as well is refused, whatever it holds.
4. What a reader keeps is bounded by the body's bound and by one line's.  Chunks may be as
   small as they like, for of their sizes nothing is kept; what framing may hold without
   end (extensions, trailers) has ``MAX_EXTRA_BYTES`` in all.
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
"""Longest body: every argument at its bound and escaped would be 1.5 MiB, and nobody
has 128 arguments of 4,096 bytes that are all escaped."""

MAX_CHUNK_LINE_BYTES = 256
"""Longest line of a chunk's size, extensions included."""

MAX_EXTRA_BYTES = MAX_HEAD_BYTES
"""Most of what chunk framing holds beyond sizes and line ends: extensions, blanks and
zeros before a size, and trailers, which are header lines and have their bound."""

_BLANK_LINE = re.compile(rb"\n\r?\n")
_LENGTH = re.compile(rb"[0-9]{1,20}")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
# Likewise with its line's end; of one that is longer than it may be it finds nothing.
_SIZE_LINE = re.compile(
    rb"([0-9A-Fa-f]{1,16})[ \t]{0,99}(?:;[\t\x20-\x7e\x80-\xff]{0,99})?\r\n"
)
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class FramingError(Exception):
    """A request whose end cannot be told: 400."""


class HeadTooLargeError(Exception):
    """A head, or what stands for more of it in chunks, beyond its bounds: 431."""


class BodyTooLargeError(Exception):
    """A body beyond its bound: 413."""


class HeadReader:
    """Cuts the head off a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._lines = 0

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Take bytes in.

        Returns:
            The head with its blank line, and what follows it; None if more is needed.

        Raises:
            HeadTooLargeError: it passes a bound, complete or not.
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
    """Cuts the body off what follows a head.

    Args:
        headers: of the head, names in lower case.
        version: ``b"1.0"`` or ``b"1.1"``.

    Attributes:
        body: what it held so far, decoded.
        is_complete: it has ended.
        rest: what came after its end.

    Raises:
        FramingError: the head says two things about its length, or nothing that can be
            understood.
        BodyTooLargeError: it announces more than there may be.
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
        """Take bytes in.

        Raises:
            FramingError: what is there is no chunk.
            BodyTooLargeError: it is longer than it may be.
            HeadTooLargeError: its extensions and trailers are.
        """
        self._buffer += data
        while not self.is_complete and self._step():
            pass
        if self.is_complete:
            self.rest += self._buffer
            self._buffer.clear()

    def held(self) -> tuple[bytes | bytearray, ...]:
        """Return what brings another reader to where this one is, once it is fed that.

        The parts are no copies: they are good until more is taken in.  All that was
        decoded is one chunk of them, however many it came in.
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

    # Each step takes what it can and tells whether the next one may begin.

    def _last_part(self) -> bool:
        self._take_part()
        self.is_complete = self._left == 0
        return False

    def _take_whole_chunks(self) -> None:
        """Take the chunks that are there from size to end.

        Whatever else is there is left for the steps, so this changes nothing but what a
        body in small chunks costs.
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
        line = self._line(MAX_CHUNK_LINE_BYTES, FramingError("a long chunk size"))
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
        line = self._line(longest, HeadTooLargeError())
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

    def _line(self, longest: int, too_long: Exception) -> bytes | None:
        """Take a line off the buffer, without its CRLF; None if it is not all there."""
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


# The head of a ToolExec request: what a parser of HTTP gives, and what follows from that.
#
# A value; nothing is refused here.

REPLAY = b"/exec/ID"
"""Stands for the paths of executions; no path in lower case is the same."""

_ABSOLUTE = re.compile(rb"https?://[^/?]*", re.IGNORECASE)


@dataclass(frozen=True)
class Head:
    """The head of a request; header names in lower case."""

    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    version: bytes = b"1.1"

    def values(self, name: bytes) -> list[bytes]:
        """Return all values of a header."""
        return [value for key, value in self.headers if key == name]

    def says(self, name: bytes) -> bool:
        """Whether a header switches something on with ``1``."""
        return b"1" in self.values(name)

    @cached_property
    def place(self) -> tuple[bytes, bytes, bytes]:
        """(path in lower case, query, id) of its target; ``REPLAY`` has an id."""
        absolute = _ABSOLUTE.match(self.target)
        target = self.target[absolute.end() :] if absolute else self.target
        path, _, query = target.partition(b"?")
        name = path.lower()
        if name.startswith(b"/exec/") and name != b"/exec/":
            return REPLAY, query, path[len(b"/exec/") :]
        return name, query, b""

    @cached_property
    def speaks(self) -> int:
        """The version that it asks for; 0 for none that is spoken."""
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
        """What may be the token in them.

        Each value as it is, and its last piece between blanks and ``=``, whatever the
        scheme, without the punctuation around it.
        """
        found = []
        for value in self.authorizations:
            last = value.replace(b"=", b" ").rsplit(maxsplit=1)[-1:]
            found += [value, *(piece.strip(b",;\"'") for piece in last)]
        return found
