"""Finding lines: literal or regular expression, in linear time, resumable.

Rules of this file.

1. A match is a line: a line with three hits counts once.  An expression never reaches
   across a line; ``^`` and ``$`` are the ends of a line.
2. The engine is RE2, for literals too (it finds a rare byte of them faster than
   ``bytes.find``): no expression takes more than linear time in the text.
3. Every match is counted; ``max_results`` bounds what is answered.  Contexts that touch
   or overlap are one answer.
4. The text is searched where it lies, mapped or in memory, without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import re2

from vfs.content.errors import INVALID_PARAMETER, FdError
from vfs.content.pages import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfs.content.blob import Blob

MOST_PATTERN_CHARS = 10_000
"""Longest query: what it compiles to is bounded too, by RE2's 8 MiB."""

MOST_SHOWN_BYTES = 4 * 1024 * 1024
"""Text of one answer; what does not fit is where the search goes on."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One answer.

    Attributes:
        line: of the first match in it, from 1.
        column: of the match in that line, in characters from 1.
        first: first line that is shown.
        last: last line that is shown.
        span: these lines, in bytes.
    """

    line: int
    column: int
    first: int
    last: int
    span: Span


@dataclass(frozen=True, slots=True)
class Found:
    """The answers.

    Attributes:
        matches: lines that match, from where the search began.
        hits: what is shown of them.
        next_line: the first match that is not shown; None if all are.
    """

    matches: int
    hits: tuple[Hit, ...]
    next_line: int | None


def compile_query(query: str, *, regex: bool, case_sensitive: bool) -> re2._Regexp:
    """Return what finds a query.

    Raises:
        FdError: ``invalid_parameter``: it is none, and why.
    """
    if not query:
        raise FdError(INVALID_PARAMETER, "The query is empty")
    if len(query) > MOST_PATTERN_CHARS:
        text = f"The query is longer than {MOST_PATTERN_CHARS} characters"
        raise FdError(INVALID_PARAMETER, text)
    if not regex and "\n" in query:
        text = "The query has a line break; a match is within one line"
        raise FdError(INVALID_PARAMETER, text)
    options = re2.Options()
    options.log_errors = False
    options.never_nl = True
    options.case_sensitive = case_sensitive
    options.never_capture = True
    try:
        pattern = query.encode()
        if not regex:
            return re2.compile(re2.escape(query).encode(), options)
        re2.compile(pattern, options)  # alone first: `a)(b` must not become valid
        return re2.compile(b"(?m:%b)" % pattern, options)
    except UnicodeEncodeError:
        raise FdError(INVALID_PARAMETER, "The query has a lone surrogate") from None
    except re2.error as why:
        said = why.args[0] if why.args else ""
        words = (
            said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        )
        raise FdError(INVALID_PARAMETER, f"Invalid pattern: {words}") from None


def search(
    blob: Blob,
    pattern: re2._Regexp,
    *,
    context: int,
    max_results: int,
    start_line: int = 1,
) -> Found:
    """Find the lines of a text that match.

    Args:
        blob: the text.
        pattern: from ``compile_query``.
        context: lines to show before and after each.
        max_results: most matching lines to show.
        start_line: where to begin.

    Raises:
        FdError: ``invalid_parameter``: the first match alone is too long to be shown.
    """
    begin = blob.index.line_start(blob.data, start_line)
    matches = 0
    shown: list[tuple[int, int, int]] = []  # line, its start, where the match is
    next_line: int | None = None
    for line_start, position in _matching_lines(blob, pattern, begin):
        matches += 1
        if len(shown) < max_results:
            shown.append((_line_at(blob, line_start), line_start, position))
        elif next_line is None:
            next_line = _line_at(blob, line_start)
    hits = []
    left = MOST_SHOWN_BYTES
    for hit in _merged(blob, shown, context):
        left -= hit.span.end - hit.span.start
        if left < 0:
            next_line = hit.line
            break
        hits.append(hit)
    if matches and not hits:
        text = (
            f"Line {next_line} is too long for one answer: use read_fd with mode=char"
        )
        raise FdError(INVALID_PARAMETER, text)
    return Found(matches, tuple(hits), next_line)


def _line_at(blob: Blob, offset: int) -> int:
    return blob.index.newlines_before(blob.data, offset) + 1


def _matching_lines(
    blob: Blob, pattern: re2._Regexp, position: int
) -> Iterator[tuple[int, int]]:
    data = blob.data
    size = blob.size
    find = data.find
    rfind = data.rfind
    look = pattern.search
    floor = position
    while position < size:
        match = look(data, position)
        if match is None:
            return
        at = match.start()
        if at >= size:
            return  # an empty match behind the last line
        start = rfind(b"\n", floor, at) + 1
        yield (start or floor), at
        end = find(b"\n", at)
        if end < 0:
            return
        position = floor = end + 1


def _merged(
    blob: Blob, shown: list[tuple[int, int, int]], context: int
) -> Iterator[Hit]:
    group: list[tuple[int, int, int]] = []
    for row in shown:
        if group and (not context or row[0] - group[-1][0] > 2 * context + 1):
            yield _hit(blob, group, context)
            group = []
        group.append(row)
    if group:
        yield _hit(blob, group, context)


def _hit(blob: Blob, group: list[tuple[int, int, int]], context: int) -> Hit:
    index, data = blob.index, blob.data
    line, line_start, position = group[0]
    first = max(1, line - context)
    last = min(index.lines, group[-1][0] + context)
    span = Span(index.line_start(data, first), index.line_start(data, last + 1))
    before = index.chars_before(data, line_start)
    column = index.chars_before(data, position) - before + 1
    return Hit(line, column, first, last, span)
