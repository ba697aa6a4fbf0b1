"""Selectors of a part of a content: pages, lines, characters, units.

A selector becomes a ``Selection``: a span of bytes and the words of the answer.
Selectors exclude each other; the default is page 1.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from supervisor.llmfd.errors import (
    AMBIGUOUS,
    INVALID_PAGE,
    INVALID_PARAMETER,
    INVALID_RANGE,
    NOT_FOUND,
    FdError,
)
from supervisor.llmfd.index import BLOCK_BYTES, Span
from supervisor.llmfd.units import CODE_UNITS, find_units, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.llmfd.arguments import Json
    from supervisor.llmfd.table import LlmFd
    from supervisor.llmfd.units import Unit

MOST_NAMED = 100
"""Most units of one name whose lines an error lists."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A part of a content.

    Attributes:
        span: in bytes of the text.
        page: the attribute of that name: a number, or the kind of the part.
        extras: more attributes, in order.
    """

    span: Span
    page: str | int
    extras: tuple[tuple[str, str | int], ...] = ()


@dataclass(frozen=True, slots=True)
class Selector:
    """The selectors of a call; see ``read_fd``."""

    page: int | None = None
    read_all: bool | None = None
    start_line: int | None = None
    end_line: int | None = None
    mode: str | None = None
    start: int | None = None
    count: int | None = None
    unit: str | None = None
    index: int | None = None
    name: str | None = None
    language: str | None = None

    def kinds(self) -> list[str]:
        """Return the kinds of the used selectors."""
        used = {
            "page": self.page is not None,
            "read_all": bool(self.read_all),
            "start_line and end_line": _any(self.start_line, self.end_line),
            "mode": _any(self.mode, self.start, self.count),
            "unit": _any(self.unit, self.index, self.name, self.language),
        }
        return [name for name, is_used in used.items() if is_used]


def _any(*values: object) -> bool:
    return any(value is not None for value in values)


def select(fd: LlmFd, wanted: Selector) -> Selection:
    """Return the selected part of a descriptor.

    Raises:
        FdError: ``invalid_page``, ``invalid_range``, ``invalid_parameter``,
            ``not_found``, ``ambiguous``.
    """
    kinds = wanted.kinds()
    if len(kinds) > 1:
        text = "Selectors exclude each other: " + ", ".join(kinds)
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    match kinds:
        case ["read_all"]:
            return Selection(Span(0, fd.content.text.size), "all")
        case ["start_line and end_line"]:
            span = line_span(fd, wanted.start_line, wanted.end_line)
            return Selection(span, "lines")
        case ["mode"]:
            return _select_mode(fd, wanted)
        case ["unit"]:
            return _select_unit(fd, wanted)
        case _:
            return _pages(fd, 1 if wanted.page is None else wanted.page, 1)


def _pages(fd: LlmFd, first: int, count: int) -> Selection:
    table = fd.content.text.pages(fd.page_size)
    last = first + count - 1
    if not 1 <= first <= len(table):
        text = f"Invalid page number. Valid range: 1-{len(table)}"
        raise FdError(INVALID_PAGE, text, fd=fd.id)
    last = min(last, len(table))
    span = Span(table.span(first).start, table.span(last).end)
    return Selection(span, first if first == last else f"{first}-{last}")


def line_span(fd: LlmFd, start: int | None, end: int | None) -> Span:
    """Return the span of lines; a missing start is 1, a missing end the last line.

    Raises:
        FdError: ``invalid_range``.
    """
    text = fd.content.text
    total = text.index.lines
    first = 1 if start is None else start
    last = total if end is None else end
    if first < 1 or last < 1 or first > total or last < first:
        if total:
            words = f"Invalid line range {first}-{last}. Valid range: 1-{total}"
        else:
            words = "Invalid line range: the content has no lines"
        raise FdError(INVALID_RANGE, words, fd=fd.id)
    index = text.index
    end_of_last = index.line_start(text, min(last, total) + 1)
    return Span(index.line_start(text, first), end_of_last)


def part_span(fd: LlmFd, part: Mapping[str, Json]) -> Span | None:
    """Return the lines of ``{"fd": ..., "start_line": ..., "end_line": ...}``.

    Returns:
        None if it has no line: it means the whole descriptor.

    Raises:
        FdError: ``invalid_range``.
    """
    start, end = part.get("start_line"), part.get("end_line")
    if start is None and end is None:
        return None
    return line_span(
        fd,
        start if isinstance(start, int) else None,
        end if isinstance(end, int) else None,
    )


def _select_mode(fd: LlmFd, wanted: Selector) -> Selection:
    if wanted.mode is None:
        text = "Missing parameter: mode (start and count go with it)"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    count = 1 if wanted.count is None else wanted.count
    if count < 1:
        text = f"Invalid count {count}: at least 1 {wanted.mode} is to be read"
        raise FdError(INVALID_RANGE, text, fd=fd.id)
    if wanted.mode == "page":
        return _pages(fd, 1 if wanted.start is None else wanted.start, count)
    if wanted.mode == "line":
        first = 1 if wanted.start is None else wanted.start
        return Selection(line_span(fd, first, first + count - 1), "lines")
    return _characters(fd, wanted.start or 0, wanted.count)


def _characters(fd: LlmFd, start: int, count: int | None) -> Selection:
    text = fd.content.text
    total = text.index.chars
    if count is None:
        count = fd.page_size
    if start < 0 or start >= max(total, 1):
        words = f"Invalid character range. Valid start: 0-{max(total - 1, 0)}"
        raise FdError(INVALID_RANGE, words, fd=fd.id)
    count = min(count, total - start)
    index = text.index
    span = Span(index.char_offset(text, start), index.char_offset(text, start + count))
    return Selection(span, "char", (("start", start), ("count", count)))


def _select_unit(fd: LlmFd, wanted: Selector) -> Selection:
    unit = wanted.unit
    if unit is None:
        text = "Missing parameter: unit (index, name and language go with it)"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    if wanted.language is not None and unit not in CODE_UNITS:
        text = "language goes with unit function or class"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    if wanted.index is not None and wanted.name is not None:
        text = "index and name exclude each other"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    if fd.is_binary:
        text = "Binary content has no units"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    return _choose(fd, wanted, _look_for(fd, unit, wanted))


def _look_for(fd: LlmFd, unit: str, wanted: Selector) -> _Search:
    index = wanted.index
    if index is None and wanted.name is None:
        index = 1
    found: list[Unit] = []
    matching = total = 0
    with closing(find_units(fd, unit, wanted.language)) as units:
        for candidate in units:
            total += 1
            if candidate.number == index or (
                wanted.name is not None and candidate.is_called(wanted.name)
            ):
                matching += 1
                found.append(candidate)
                if len(found) >= 2 * MOST_NAMED:
                    found.sort()
                    del found[MOST_NAMED:]
    if index is not None and not found:
        valid = f"Valid range: 1-{total}" if total else "The content has none"
        text = f"Invalid {unit} index. {valid}"
        raise FdError(INVALID_RANGE, text, fd=fd.id)
    found = sorted(found)[:MOST_NAMED]
    return _Search([whole(fd, unit, one) for one in found], matching, total)


class _Search(NamedTuple):
    """The result of a search for units.

    Attributes:
        found: the matching ones, in the order of the text; the first of them, if there
            are many.
        matching: the number of matching ones.
        total: the number of all.
    """

    found: list[Unit]
    matching: int
    total: int


def _choose(fd: LlmFd, wanted: Selector, looked: _Search) -> Selection:
    unit, name = str(wanted.unit), wanted.name
    found, matching, total = looked
    if not found:
        text = f"{unit.capitalize()} {name} not found"
        raise FdError(NOT_FOUND, text, fd=fd.id)
    if matching > 1:
        text = f"{matching} units of the kind {unit} are called {name}"
        ranges = ", ".join(lines_of(fd, one.span) for one in found)
        raise FdError(AMBIGUOUS, text, f"Lines: {ranges}", fd=fd.id)
    chosen = found[0]
    extras: list[tuple[str, str | int]] = [("unit", unit)]
    if name is None:
        extras.append(("index", chosen.number))
    else:
        extras.append(("name", name))
    extras.append(("units", total))
    return Selection(chosen.span, unit, tuple(extras))


def lines_of(fd: LlmFd, span: Span) -> str:
    """Return the lines of a part as ``first-last``; ``0-0`` in an empty text."""
    text = fd.content.text
    if not text.size:
        return "0-0"
    before = text.index.newlines_before(text, span.start)
    if span.end - span.start <= BLOCK_BYTES:
        piece = text[span.start : span.end]
        after = before + piece.count(b"\n")
    else:
        piece = text[span.end - 1 : span.end]
        after = text.index.newlines_before(text, span.end)
    ends_line = piece.endswith(b"\n")
    return f"{before + 1}-{after + (0 if ends_line else 1)}"


class Excerpt(NamedTuple):
    """A part of a text as an answer shows it.

    Attributes:
        text: its bytes.
        lines: as ``lines_of`` returns them.
        is_continued: it begins inside a line.
        is_truncated: it ends inside a line.
    """

    text: bytes
    lines: str
    is_continued: bool
    is_truncated: bool


def show(fd: LlmFd, span: Span) -> Excerpt:
    """Return a part of a text, which is read once."""
    text = fd.content.text
    before = min(span.start, 1)
    piece = text[span.start - before : span.end]
    shown = piece[before:]
    first = text.index.newlines_before(text, span.start) + 1
    last = first + shown.count(b"\n") - (1 if shown.endswith(b"\n") else 0)
    return Excerpt(
        shown,
        f"{first}-{last}" if text.size else "0-0",
        is_continued=before > 0 and not piece.startswith(b"\n"),
        is_truncated=span.end < text.size and not piece.endswith(b"\n"),
    )
