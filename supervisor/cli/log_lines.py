"""Lines of a child's log for people: time, stream, control characters escaped.

Takes pieces of a log and yields text.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from hostlib.messages import show_controls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.client import LogEntry, LogMark

MAX_LINE_BYTES = 65_536
"""Longest line; a longer one is shown in parts."""

_UNKNOWN = "-"


class LogLines:
    """The lines of one log.

    Each stream's lines are joined on their own: output of the other one does not split
    them.

    Args:
        timestamps: each line begins with its time, in UTC.
        raw: control characters are left as they are.
    """

    def __init__(self, *, timestamps: bool, raw: bool) -> None:
        self._timestamps = timestamps
        self._raw = raw
        self._partial: dict[str, tuple[LogMark | None, bytes]] = {}

    def take(self, entry: LogEntry) -> Iterator[bytes]:
        """Yield the lines that end in a piece of the log, each with its LF."""
        if entry.missed:
            yield from self.rest()
        for mark, data in parts_of(entry):
            if mark is not None and mark.begins and mark.offset >= entry.offset:
                yield from self.rest()
                yield f"--- started at {_time(mark)} ---\n".encode()
            yield from self._lines(mark, data)

    def _lines(self, mark: LogMark | None, data: bytes) -> Iterator[bytes]:
        stream = _UNKNOWN if mark is None else mark.stream
        began, partial = self._partial.pop(stream, (mark, b""))
        *lines, rest = (partial + data).split(b"\n")
        for line in lines:
            yield self._line(stream, began, line)
            began = mark
        if len(rest) > MAX_LINE_BYTES:
            yield self._line(stream, began, rest)
        elif rest:
            self._partial[stream] = (began, rest)

    def rest(self) -> Iterator[bytes]:
        """Yield the unfinished lines, as if they had ended."""
        for stream, (began, line) in self._partial.items():
            yield self._line(stream, began, line)
        self._partial.clear()

    def _line(self, stream: str, began: LogMark | None, line: bytes) -> bytes:
        head = f"{stream:3} | "
        if self._timestamps:
            head = f"{_time(began)} {head}"
        return head.encode() + (line if self._raw else visible(line)) + b"\n"


def parts_of(entry: LogEntry) -> Iterator[tuple[LogMark | None, bytes]]:
    """Yield the bytes of each mark; None where no mark is known."""
    end = entry.offset + len(entry.data)
    begins = [max(entry.offset, mark.offset) for mark in entry.marks]
    edges = [*begins, end]
    if edges[0] > entry.offset:
        yield None, entry.data[: edges[0] - entry.offset]
    for mark, (begin, following) in zip(entry.marks, pairwise(edges), strict=True):
        data = entry.data[begin - entry.offset : following - entry.offset]
        if data:
            yield mark, data


def _time(mark: LogMark | None) -> str:
    if mark is None:
        return _UNKNOWN.ljust(len("2026-01-01T00:00:00.000Z"))
    moment = datetime.fromtimestamp(mark.time_s, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03}Z"


def visible(line: bytes) -> bytes:
    r"""Return a line with control characters as ``^[``, ``\x9b`` or ``\u202e``."""
    text = line.removesuffix(b"\r").decode("utf-8", "backslashreplace")
    return show_controls(text).encode()
