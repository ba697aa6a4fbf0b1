"""The streams of a daemon: output of children, the journal, a stop's progress.

Rules of this file.

1. There is no queue: a reader reads files by offset at its own pace and blocks no
   other. Bytes that are in no file any more are reported by their number, those behind
   the last one in a file as well: a full disk may have lost them.
2. The event is taken before the file is read, so that no change is missed.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
import trio

from hostlib.listener import OUT_OF_RESOURCES
from hostlib.segments import extent, last_lines, read_at
from hostlib.threads import in_thread
from supervisor.config.child import is_child_name
from supervisor.control.blockers import MAX_NAMED
from supervisor.control.client import NO_LOG
from supervisor.control.server import OrderError, Orders, Send, UnavailableOrderError
from supervisor.kept_children.adhoc_logs import MOST_LOGS
from supervisor.kept_children.log_marks import marks_between, offset_since

if TYPE_CHECKING:
    from hostlib.journal import SegmentJournal
    from hostlib.segments import Piece
    from supervisor.host import Host
    from supervisor.kept_children.log_marks import Mark
    from supervisor.kept_children.roster import Children

PIECE_BYTES = 32_768
"""Sent in one item; base64 makes 44 KiB of it."""

LAST_LINES_BYTES = 16 * 1024 * 1024
"""Most bytes that are searched for the last lines."""

PROGRESS_S = 0.5
"""Time between two reports of the number that a stop waits for."""


NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class LogsArgs(msgspec.Struct, forbid_unknown_fields=True):
    """``logs``: the whole log, its last lines, from an offset, or since a time."""

    name: str
    follow: bool = False
    lines: NotNegative | None = None
    offset: NotNegative | None = None
    since: float | None = None


class EventsArgs(msgspec.Struct, forbid_unknown_fields=True):
    """``events``: from now on, after the last lines if they are asked for."""

    follow: bool = True
    lines: NotNegative | None = 0
    offset: NotNegative | None = None


class StopArgs(msgspec.Struct, forbid_unknown_fields=True):
    """``stop``."""

    grace: Annotated[float, msgspec.Meta(ge=0)] | None = None


T = TypeVar("T")
Bell = Callable[[], trio.Event]
Take = Callable[[int, bytes, int], Awaitable[None]]


class _Source(NamedTuple):
    """A stream that is read.

    Attributes:
        directory: has its files.
        end: returns the offset behind all that has come, in a file or not.
        bell: set with more bytes; None to wait for none.
        ended: returns whether it is complete.
    """

    directory: str
    end: Callable[[], int]
    bell: Bell | None
    ended: Callable[[], bool]


class OverdueChildren:
    """Children that a stop had to kill, for clients that wait for its end.

    Attributes:
        count: the number of them.
        rows: the first ones, at most ``MAX_NAMED``.
        changed: set with the next one; take it before reading.
    """

    def __init__(self) -> None:
        self.count = 0
        self.rows: list[dict[str, object]] = []
        self.changed = trio.Event()

    def add(self, row: dict[str, object]) -> None:
        """Add a child as ``blocker`` describes it."""
        self.count += 1
        if len(self.rows) < MAX_NAMED:
            self.rows.append(row)
        self.changed.set()
        self.changed = trio.Event()


class DaemonStreams:
    """The streams of one daemon.

    Args:
        host: has the children.
        children: the kept ones.
        journal: the source of events.
        log_dir: has the logs by name.
        stop: stops the daemon with a grace period.
        overdue: children that a stop had to kill.
    """

    def __init__(
        self,
        host: Host,
        children: Children,
        journal: SegmentJournal,
        log_dir: str,
        stop: Callable[[float | None], None],
        overdue: OverdueChildren,
    ) -> None:
        self._host = host
        self._children = children
        self._journal = journal
        self._log_dir = log_dir
        self._stop_daemon = stop
        self._overdue = overdue

    def add_to(self, orders: Orders) -> None:
        """Register the streams."""
        streams = {"logs": self._logs, "events": self._events, "stop": self._stop}
        orders.streams.update(streams)

    async def _logs(self, words: dict[str, Any], send: Send) -> None:
        args = msgspec.convert(words, LogsArgs)
        kept = self._children.find(args.name)
        name = args.name if kept is None else kept.name
        directory = f"{self._log_dir}/{name}"
        if kept is None and not await self._has_log(name):
            raise OrderError(
                f"{NO_LOG} {name!r}: there is no such child, or its log was removed: of"
                f" children that ended the newest {MOST_LOGS} are kept"
            )
        log = None if kept is None else kept.log
        follow = args.follow and log is not None

        async def take(offset: int, data: bytes, missed: int) -> None:
            end = offset + len(data)
            text = base64.b64encode(data).decode()
            marks: list[Mark] = []
            if data:
                marks = await _read_disk(marks_between, directory, offset, end)
            item = {"offset": offset, "missed": missed, "data": text, "marks": marks}
            await send(item)

        last = await _end(directory) if log is None else log.segments.end
        until = None if follow else last
        begin = await _begin(directory, args.lines, args.offset, until)
        if args.since is not None:
            since = await _read_disk(offset_since, directory, args.since)
            begin = max(begin, last if since is None else since)
        source = _Source(
            directory,
            end=lambda: last if log is None else log.segments.end,
            bell=(lambda: log.changed) if follow and log is not None else None,
            ended=lambda: log is None or log.ended,
        )
        await _read(source, begin, take, until)

    async def _has_log(self, name: str) -> bool:
        """Return whether a child of this name has a log, if only an empty one."""
        if not is_child_name(name):
            return False
        return await _read_disk(os.path.isdir, f"{self._log_dir}/{name}")

    async def _events(self, words: dict[str, Any], send: Send) -> None:
        args = msgspec.convert(words, EventsArgs)
        journal = self._journal
        directory = journal.segments.directory
        partial = b""

        async def take(offset: int, data: bytes, missed: int) -> None:
            nonlocal partial
            if missed:
                partial = b""
                await send({"offset": offset, "missed": missed, "event": None})
            at = offset - len(partial)
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                raw = msgspec.Raw(line)
                await send({"offset": at, "missed": 0, "event": raw})
                at += len(line) + 1

        until = None if args.follow else await _end(directory)
        source = _Source(
            directory,
            end=lambda: journal.segments.end,
            bell=(lambda: journal.changed) if args.follow else None,
            ended=lambda: not journal.is_on,
        )
        begin = await _begin(directory, args.lines, args.offset, until)
        await _read(source, begin, take, until)

    async def _stop(self, words: dict[str, Any], send: Send) -> None:
        """Stop the daemon; report the children that it waits for.

        ``blocking`` are those that had to be killed since the item before; ``overdue``
        counts them all, ``left`` those that have not ended.
        """
        args = msgspec.convert(words, StopArgs)
        self._stop_daemon(args.grace)
        overdue, told = self._overdue, 0
        while True:
            changed = overdue.changed
            new, told = overdue.rows[told:], len(overdue.rows)
            left = len(self._host.children)
            await send({"blocking": new, "left": left, "overdue": overdue.count})
            with trio.move_on_after(PROGRESS_S):
                await changed.wait()


async def _end(directory: str) -> int:
    """Return the offset of a stream's end now."""
    _, end = await _read_disk(extent, directory)
    return end


async def _read_disk(read: Callable[..., T], directory: str, *args: object) -> T:
    """Return the result of a function that reads in a stream's directory.

    Raises:
        OrderError: it cannot be read.
    """
    try:
        return await in_thread(read, directory, *args)
    except OSError as why:
        kind = UnavailableOrderError if why.errno in OUT_OF_RESOURCES else OrderError
        raise kind(f"cannot read {directory}: {why.strerror}") from None


async def _begin(
    directory: str, lines: int | None, offset: int | None, until: int | None
) -> int:
    if offset is not None:
        return offset
    if lines is None:
        first, _ = await _read_disk(extent, directory)
        return first
    return await _read_disk(last_lines, directory, lines, LAST_LINES_BYTES, until)


async def _read(source: _Source, offset: int, take: Take, until: int | None) -> None:
    """Pass a stream's bytes to ``take``: to an end, or for ever if it has a bell.

    Args:
        source: the stream.
        offset: of the first byte.
        take: gets them.
        until: offset of the end, extended to the end of its line; None for the end of
            the stream.
    """
    if until is not None and offset >= until:
        return
    while True:
        event = None if source.bell is None else source.bell()
        is_over = source.ended()
        # Up to there all was written before the read, if it could be.
        last = source.end() if until is None else until
        piece = await _read_disk(read_at, source.directory, offset, PIECE_BYTES)
        data, is_last = _cut(piece, until)
        if data:
            await take(piece.offset, data, piece.missed)
            offset = piece.offset + len(data)
        if is_last:
            return
        if not data and offset < last:
            await take(last, b"", last - offset)
            offset = last
        elif data:
            continue
        if event is None or is_over:
            return
        await event.wait()


def _cut(piece: Piece, until: int | None) -> tuple[bytes, bool]:
    """Return the bytes up to an offset, and whether they are the last of a stream.

    A line that the limit cuts is included to its end, or as far as it is there.
    """
    data = piece.data
    if until is None:
        return data, False
    size = until - piece.offset
    if len(data) < size:
        return data, False
    if data[size - 1 : size] == b"\n" and size > 0:
        return data[:size], True
    if len(data) == size:
        return data, False  # the rest of its line is in the next piece
    return data[: data.find(b"\n", max(0, size)) + 1] or data, True
