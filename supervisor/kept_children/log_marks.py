"""Marks of a child's log: time, stream and process of each piece.

An index beside the files of a log, in ``.marks``: one line of ``RECORD_BYTES`` a mark,
with the offset in the log from which it counts.

Rules of this file.

1. A mark is written before its piece: a reader finds no bytes without their mark.
2. A piece that comes within ``GRAIN_S`` of a mark of its kind gets no mark of its own.
3. Bytes without a mark (of an older host, after rotation, on a full disk) are read as
   usual; their time and stream are not known.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from hostlib.segments import Segments, extent, read_at

DIRECTORY = ".marks"
"""Beside the files of the log, and hidden: ``cat NAME/*`` shows the output alone."""

OUT, ERR = "out", "err"

GRAIN_S = 0.01
"""Exactness of times: a child that writes byte by byte has at most 100 marks a
second."""

RECORD_BYTES = 40

_KINDS = {"o": (OUT, False), "O": (OUT, True), "e": (ERR, False), "E": (ERR, True)}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_BLOCK_BYTES = 4096 * RECORD_BYTES


class Mark(NamedTuple):
    """Time and stream of the bytes from an offset on.

    Attributes:
        offset: in the log.
        time_s: when they came, seconds since the epoch.
        stream: ``out`` or ``err``.
        begins: whether they are the first output of a new process.
    """

    offset: int
    time_s: float
    stream: str
    begins: bool


class Marks:
    """The marks of one log; its writer.

    Args:
        directory: the log's.
        max_bytes: as of the log.
        keep: as of the log.
        log_end: offset at which the log goes on.
    """

    def __init__(self, directory: str, max_bytes: int, keep: int, log_end: int) -> None:
        where = f"{directory}/{DIRECTORY}"
        whole = max(1, max_bytes // RECORD_BYTES) * RECORD_BYTES
        last = _last_mark(directory)
        if last is not None and last.offset > log_end:
            _remove(where)  # of a log that was removed
        self.segments = Segments(where, whole, keep)
        self._last: Mark | None = None

    def add(self, offset: int, stream: str, *, begins: bool) -> None:
        """Write a mark for the bytes that are appended next."""
        now_s, last = time.time(), self._last
        if last is not None and stream == last.stream and not begins:
            is_soon = 0 <= now_s - last.time_s < GRAIN_S
            if is_soon:
                return
        mark = Mark(offset, now_s, stream, begins)
        # A full disk may have cut a record off.
        odd = self.segments.end % RECORD_BYTES
        filling = b"\n" * (RECORD_BYTES - odd) if odd else b""
        if self.segments.append(filling + _record(mark)):
            self._last = mark

    def close(self) -> None:
        """Close the file."""
        self.segments.close()


def marks_between(directory: str, begin: int, end: int) -> list[Mark]:
    """Return the marks of a part of a log, from the one that covers its first byte.

    Raises:
        OSError: it cannot be read.
    """
    where = f"{directory}/{DIRECTORY}"
    numbers = _numbers(where)
    at = bisect_right(numbers, begin, key=lambda n: _mark_at(where, numbers, n).offset)
    place = numbers.start + max(0, at - 1)
    found: list[Mark] = []
    while place < numbers.stop:
        data = read_at(where, place * RECORD_BYTES, _BLOCK_BYTES).data
        lines = range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES)
        for mark in (_parse(data[line : line + RECORD_BYTES]) for line in lines):
            if mark is None:
                continue
            if mark.offset >= end:
                return found
            if found and mark.offset <= begin:
                found.clear()  # no bytes followed the mark before
            found.append(mark)
        if not lines:
            break
        place += len(lines)
    return found


def offset_since(directory: str, time_s: float) -> int | None:
    """Return the offset of the first bytes since a time; None if there are none.

    Raises:
        OSError: it cannot be read.
    """
    where = f"{directory}/{DIRECTORY}"
    numbers = _numbers(where)
    at = bisect_left(numbers, time_s, key=lambda n: _mark_at(where, numbers, n).time_s)
    if at == len(numbers):
        return None
    return _mark_at(where, numbers, numbers[at]).offset


def _numbers(where: str) -> range:
    """Return the numbers of the records that are there."""
    begin, end = extent(where)
    return range(-(-begin // RECORD_BYTES), end // RECORD_BYTES)


def _mark_at(where: str, numbers: range, number: int) -> Mark:
    """Return a mark, or the one before if the record is broken."""
    while number >= numbers.start:
        data = read_at(where, number * RECORD_BYTES, RECORD_BYTES).data
        mark = _parse(data)
        if mark is not None:
            return mark
        number -= 1
    return Mark(0, 0.0, OUT, False)


def _last_mark(directory: str) -> Mark | None:
    where = f"{directory}/{DIRECTORY}"
    try:
        numbers = _numbers(where)
        return _mark_at(where, numbers, numbers[-1]) if numbers else None
    except OSError:
        return None


def _remove(where: str) -> None:
    with contextlib.suppress(OSError), os.scandir(where) as entries:
        for entry in entries:
            os.unlink(entry.path)  # noqa: PTH108 - a str throughout


def _record(mark: Mark) -> bytes:
    time_us = round(mark.time_s * 1_000_000)
    letter = _LETTERS[mark.stream, mark.begins]
    return b"%020d %016d %b\n" % (mark.offset, time_us, letter.encode())


def _parse(record: bytes) -> Mark | None:
    """Return the mark that a record holds; None if it is broken."""
    fields = record.split()
    if len(record) != RECORD_BYTES or len(fields) != 3:
        return None
    kind = _KINDS.get(fields[2].decode("latin-1"))
    if kind is None or not (fields[0].isdigit() and fields[1].isdigit()):
        return None
    return Mark(int(fields[0]), int(fields[1]) / 1_000_000, *kind)
