"""A byte stream in files, for children's logs and the daemon's journal.

Rules of this file.

1. A file's name is the offset of its first byte: ``00000000000000004096.log`` begins with
   byte 4,096 of the stream.  A reader names a place by its offset, which rotation does
   not change.
2. ``append`` does not raise if the disk fails: bytes that cannot be written are dropped
   and counted, and the caller reports it.  Offsets count the bytes that are in files,
   and those that a caller has skipped: its readers are told of them as of removed ones.
3. A directory or file that vanished is made anew with the next append.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from typing import NamedTuple

SUFFIX = ".log"

_DIGITS = 20
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


class Piece(NamedTuple):
    """The result of one read.

    Attributes:
        offset: offset of the first byte of ``data``.
        data: empty at the end of the stream.
        missed: bytes between the wanted offset and ``offset`` that are in no file.
    """

    offset: int
    data: bytes
    missed: int


class Segments:
    """The writer of one stream.

    Args:
        directory: made with the first byte.
        max_bytes: size at which a new file begins.
        keep: number of full files that are kept beside the newest one; as many bytes
            in smaller ones.

    Attributes:
        end: offset after the last byte that is in a file, or was skipped.
        dropped_bytes: number of bytes that could not be written.
        failure: the error of the last append; None if it succeeded.
        has_vanished: its files are gone and a new one was begun; a caller that reports
            it resets it.
    """

    def __init__(self, directory: str, max_bytes: int, keep: int) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd = -1
        self._size = 0
        self._skipped = 0
        self.dropped_bytes = 0
        self.failure: OSError | None = None
        self.has_vanished = False
        self.end = _end_of(directory)

    def last_byte(self) -> bytes:
        """Return the last byte of the stream; empty if none can be read."""
        try:
            return read_at(self.directory, -1, 1).data
        except OSError:
            return b""

    def append(self, data: bytes) -> bool:
        """Append bytes; return whether all of them are in a file now."""
        view = memoryview(data)
        try:
            while view:
                room = self._open()
                done = os.write(self._fd, view[:room])
                self._size += done
                self.end += done
                view = view[done:]
        except OSError as why:
            self.dropped_bytes += len(view)
            self.failure = why
            self.close()
            return False
        self.failure = None
        return True

    def skip(self, size: int) -> None:
        """Make a gap of bytes that were dropped; an empty file has its end, if it can."""
        self.end += size
        self._skipped += size
        with contextlib.suppress(OSError):
            self._open()
            self.close()

    def _open(self) -> int:
        """Open a file to append to, if none is open; return the room in it."""
        gone = False
        if self._fd >= 0:
            # Bytes that are written to a removed file would be lost.
            gone = os.fstat(self._fd).st_nlink == 0
            if not gone and self._size < self._max_bytes:
                return self._max_bytes - self._size
            self.close()
        os.makedirs(self.directory, _DIRECTORY_MODE, exist_ok=True)
        newest = _segments(self.directory)[-1:]
        start, size = newest[0] if newest else (self.end, 0)
        if not newest or start + size != self.end or size >= self._max_bytes:
            if newest and not size:  # else each piece that is dropped leaves a file
                os.rename(self._path(start), self._path(self.end))
            start, size = self.end, 0
        path = self._path(start)
        self._fd = os.open(path, _FLAGS, _FILE_MODE)
        self._size = os.fstat(self._fd).st_size
        self.has_vanished |= gone or (not newest and self.end > self._skipped)
        self._forget_old()
        return max(1, self._max_bytes - self._size)

    def _forget_old(self) -> None:
        left = self._keep * self._max_bytes
        for start, size in reversed(_segments(self.directory)[:-1]):
            left -= size
            if left < 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(start))

    def _path(self, start: int) -> str:
        return f"{self.directory}/{start:0{_DIGITS}}{SUFFIX}"

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptor of the open file, if any."""
        return (self._fd,) if self._fd >= 0 else ()

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_at(directory: str, offset: int, size: int) -> Piece:
    """Return a piece of a stream, which its writer may append to meanwhile.

    Args:
        directory: the stream's directory.
        offset: the first byte; a negative one counts from the end.
        size: most bytes.

    Raises:
        OSError: a file exists and cannot be read.
    """
    found = _segments(directory)
    end = sum(found[-1]) if found else 0
    if offset < 0:
        offset = max(found[0][0] if found else 0, end + offset)
    vanished = False
    for start, length in found:
        if start + length <= offset:
            continue
        begin = max(start, offset)
        try:
            fd = os.open(
                f"{directory}/{start:0{_DIGITS}}{SUFFIX}",
                os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
        except FileNotFoundError:
            vanished = True
            continue  # rotation removed it: read the next one, and report the gap
        try:
            data = os.pread(fd, size, begin - start)
        finally:
            os.close(fd)
        if data:
            return Piece(begin, data, begin - offset)
    if vanished:  # files that are newer than the list may be there
        return read_at(directory, offset, size)
    return Piece(offset, b"", 0)


def extent(directory: str) -> tuple[int, int]:
    """Return the offsets of a stream's first kept byte, and of its end."""
    found = _segments(directory)
    return (found[0][0], sum(found[-1])) if found else (0, 0)


def last_lines(
    directory: str, count: int, max_bytes: int, until: int | None = None
) -> int:
    """Return the offset at which the last lines of a stream begin.

    Args:
        directory: the stream's directory.
        count: number of lines.
        max_bytes: most bytes to look back; the result lies no further back.
        until: the end to count from; None for the end of the stream.
    """
    first, end = extent(directory)
    if until is not None:
        end = max(first, min(end, until))
    if count <= 0:
        return end
    begin = max(first, end - max_bytes)
    data = b""
    at = begin
    gap = [(0, begin)]  # the place in the data behind each gap, and its offset
    while at < end:
        piece = read_at(directory, at, end - at)
        if not piece.data or piece.offset >= end:
            break
        if piece.missed:
            gap.append((len(data), piece.offset))
        data += piece.data[: end - piece.offset]
        at = piece.offset + len(piece.data)
    place = len(data)
    for _ in range(count):
        place = data.rfind(b"\n", 0, max(0, place - 1)) + 1
        if place == 0:
            break
    behind, offset = gap[bisect_right(gap, place, key=lambda one: one[0]) - 1]
    return offset + place - behind


def _segments(directory: str) -> list[tuple[int, int]]:
    """Return (offset, size) of each file, in order; empty if there is no directory."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                if len(name) == _DIGITS and name.isdigit() and name != entry.name:
                    with contextlib.suppress(FileNotFoundError):
                        size = entry.stat(follow_symlinks=False).st_size
                        found.append((int(name), size))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found)


def _end_of(directory: str) -> int:
    try:
        found = _segments(directory)
    except OSError:
        return 0
    return sum(found[-1]) if found else 0
