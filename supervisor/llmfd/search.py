r"""Finding lines: literal or regular expression, in linear time, resumable.

1. A match is a line: a line with three hits counts once. An expression never matches
   across an LF; ``\C`` (any byte) is refused, since RE2 would.
2. RE2 searches literals, too: its time is linear in the text.
3. Every match is counted; ``max_results`` bounds the answer. Contexts that touch are
   joined.
4. The text is searched without a copy, where it lies. Lines are cut out only where many
   match: a find costs 3 us, a look at a line 0.1.
5. A call of the engine goes through one window or one line: 64 KiB may take a second.
   The engine holds the interpreter only while it compiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, repeat, takewhile
from typing import TYPE_CHECKING

import re2
import stringzilla

from hostlib.threads import stop_if_cancelled
from supervisor.llmfd.errors import INVALID_PARAMETER, FdError
from supervisor.llmfd.index import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.blob import Blob
    from supervisor.llmfd.index import Buffer

MOST_PATTERN_CHARS = 10_000
"""Longest query; its compiled size is bounded too."""

MOST_CLASSES = 100
"""Most Unicode classes (``\\pL``) in a query: each takes a quarter of a millisecond to
compile, with the interpreter held."""

MOST_PROGRAM_BYTES = 2 * 1024 * 1024
"""Most memory of a compiled query and its states: with RE2's own 8 MiB an expression
takes 250 ms to compile."""

WINDOW_BYTES = 64 * 1024
"""Text that is searched at once for an expression, plus the rest of its last line."""

MOST_SHOWN_BYTES = 4 * 1024 * 1024
"""Most text of one answer; the search continues at the rest."""

PROBED_LINES = 64
"""The number of matches that tells whether many follow."""

DENSE_BYTES = PROBED_LINES * 3000
"""Matches closer to each other than that are many."""

CUT_BYTES = 256 * 1024
"""Bytes of text whose lines are cut out at once."""

CUTS = 16
"""Number of such cuts before the density is checked again."""

LOOK_BYTES = 16 * 1024 * 1024
"""Most bytes searched for a line's end at once: it holds the interpreter."""

_WAS_FOUND = (-1).__ne__

_Row = tuple[int, int, int]
"""A matching line: its number, its start, the place of the match."""


@dataclass(frozen=True, slots=True)
class Query:
    """A compiled query.

    Attributes:
        pattern: the compiled expression.
        literal: bytes that exactly the matching lines contain; None if only the pattern
            can tell.
        folds: whether the literal is in lower case, and stands for both.
        window: bytes that are searched at once.
    """

    pattern: re2._Regexp
    literal: bytes | None
    folds: bool
    window: int


@dataclass(frozen=True, slots=True)
class Hit:
    """One answer.

    Attributes:
        line: of the first match in it, from 1.
        column: of the match in that line, in characters from 1.
        first: first shown line.
        last: last shown line.
        span: the shown lines, in bytes.
    """

    line: int
    column: int
    first: int
    last: int
    span: Span


@dataclass(frozen=True, slots=True)
class SearchAnswers:
    """The answers of a search.

    Attributes:
        matches: lines that match, from where the search began.
        hits: the shown ones.
        next_line: the first match that is not shown; None if all are.
    """

    matches: int
    hits: tuple[Hit, ...]
    next_line: int | None


def compile_query(query: str, *, regex: bool, case_sensitive: bool) -> Query:
    """Return a compiled query.

    Raises:
        FdError: ``invalid_parameter``: it is invalid, with the reason.
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
    options.max_mem = MOST_PROGRAM_BYTES
    try:
        pattern = query.encode()
        if not regex:
            compiled = re2.compile(re2.escape(query).encode(), options)
            # Beyond ASCII one letter may have forms of different lengths.
            is_plain = case_sensitive or query.isascii()
            literal = pattern if case_sensitive else pattern.lower()
            return Query(
                compiled,
                literal if is_plain else None,
                folds=not case_sensitive,
                window=LOOK_BYTES,
            )
        compiled = _compile(pattern, options)
        return Query(compiled, None, folds=False, window=WINDOW_BYTES)
    except UnicodeEncodeError:
        raise FdError(INVALID_PARAMETER, "The query has a lone surrogate") from None
    except re2.error as why:
        said = why.args[0] if why.args else ""
        words = (
            said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        )
        raise FdError(INVALID_PARAMETER, f"Invalid pattern: {words}") from None


def _compile(pattern: bytes, options: re2.Options) -> re2._Regexp:
    if pattern.count(b"\\p") + pattern.count(b"\\P") > MOST_CLASSES:
        text = f"The pattern has more than {MOST_CLASSES} classes of Unicode (\\p)"
        raise FdError(INVALID_PARAMETER, text)
    try:
        compiled = re2.compile(b"(?m)" + pattern, options)
    except re2.error as why:
        if b"(?m)" in why.args[0]:
            re2.compile(pattern, options)  # alone: the error is about this part
        raise
    if _has_any_byte(pattern):
        text = (
            r"\C in the pattern is a byte, the end of a line too; use . for a character"
        )
        raise FdError(INVALID_PARAMETER, text)
    return compiled


def _has_any_byte(pattern: bytes) -> bool:
    r"""Return whether an expression has ``\C``; ``\\C`` and ``\QC\E`` do not count."""
    at = 0
    while (at := pattern.find(b"\\", at)) >= 0:
        escaped = pattern[at + 1 : at + 2]
        if escaped == b"C":
            return True
        at += 2
        if escaped == b"Q":
            end = pattern.find(b"\\E", at)
            if end < 0:
                return False
            at = end + 2
    return False


def search(
    blob: Blob,
    query: Query,
    *,
    context: int,
    max_results: int,
    start_line: int = 1,
) -> SearchAnswers:
    """Return the matching lines of a text.

    Args:
        blob: the text.
        query: from ``compile_query``.
        context: lines to show before and after each.
        max_results: most matching lines to show.
        start_line: the first searched line.

    Raises:
        FdError: ``invalid_parameter``: the first match alone is too long to show.
    """
    begin = blob.index.line_start(blob, start_line)
    matches = 0
    shown: list[_Row] = []
    next_line: int | None = None
    data = blob.data
    for line_start, position, following in _matching_lines(data, query, begin):
        matches += 1
        if len(shown) < max_results:
            shown.append((_line_at(blob, line_start), line_start, position))
        else:
            next_line = _line_at(blob, line_start)
            matches += _count(data, query, following)
            break
    hits = []
    left = MOST_SHOWN_BYTES
    for group in _groups(shown, context):
        fitting, hit = _fit(blob, group, context, left)
        if hit is not None:
            hits.append(hit)
            left -= hit.span.end - hit.span.start
        if fitting < len(group):
            next_line = group[fitting][0]
            break
    if matches and not hits:
        raise _too_long(data, shown[0])
    return SearchAnswers(matches, tuple(hits), next_line)


def _fit(
    blob: Blob, group: list[_Row], context: int, most: int
) -> tuple[int, Hit | None]:
    """Return the number of matches of a group that fit into an answer, and the answer."""
    hit = _hit(blob, group, context)
    if hit.span.end - hit.span.start <= most:
        return len(group), hit
    shown: Hit | None = None
    fitting, too_many = 0, len(group)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        hit = _hit(blob, group[:middle], context)
        if hit.span.end - hit.span.start <= most:
            fitting, shown = middle, hit
        else:
            too_many = middle
    return fitting, shown


def _too_long(data: Buffer, row: _Row) -> FdError:
    line, start, at = row
    if _line_end(data, at, len(data)) - start <= MOST_SHOWN_BYTES:
        text = (
            f"Line {line} is too long for one answer with its context: show less of it"
        )
    else:
        text = f"Line {line} is too long for one answer: use read_fd with mode=char"
    return FdError(INVALID_PARAMETER, text)


def _line_at(blob: Blob, offset: int) -> int:
    return blob.index.newlines_before(blob, offset) + 1


def _matching_lines(
    data: Buffer, query: Query, position: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the start of each line, the place of the match, and the next line's start."""
    size = len(data)
    look = query.pattern.search
    floor = end = position
    while position < size:
        if position >= end:
            stop_if_cancelled()
            end = _line_end(data, min(position + query.window, size) - 1, size)
        match = look(data, position, end)
        at = end if match is None else match.start()
        if at >= end:  # or an empty match behind the last line
            position = floor = end
            continue
        start = _line_start(data, floor, at)
        position = floor = _line_end(data, at, size)
        yield start, at, position


def _line_start(data: Buffer, floor: int, at: int) -> int:
    """Return the start of a line, which is not before ``floor``."""
    while at > floor:
        begin = max(floor, at - LOOK_BYTES)
        found = data.rfind(b"\n", begin, at)
        if found >= 0:
            return found + 1
        at = begin
    return floor


def _line_end(data: Buffer, at: int, size: int) -> int:
    """Return the start of the next line."""
    while at < size:
        end = min(size, at + LOOK_BYTES)
        found = data.find(b"\n", at, end)
        if found >= 0:
            return found + 1
        at = end
    return size


def _count(data: Buffer, query: Query, position: int) -> int:
    """Return the number of matching lines from the start of a line on."""
    count = 0
    while position < len(data):
        begin, probed = position, 0
        lines = _matching_lines(data, query, begin)
        for _, _, following in islice(lines, PROBED_LINES):
            probed += 1
            position = following
        count += probed
        if probed < PROBED_LINES:
            break
        if query.literal is not None and position - begin < DENSE_BYTES:
            for _ in range(CUTS):
                found, position = _count_cut(data, query, query.literal, position)
                count += found
    return count


def _count_cut(
    data: Buffer, query: Query, literal: bytes, begin: int
) -> tuple[int, int]:
    """Return the number of matching lines in the next cuts, and their end."""
    size = len(data)
    end = min(size, begin + CUT_BYTES)
    if end < size:
        cut = data.rfind(b"\n", begin, end) + 1
        if not cut:  # a line that long is not cut out
            lines = _matching_lines(data, query, begin)
            _, at, following = next(lines, (0, size, size))
            return (1 if at < size else 0), following
        end = cut
    text = data[begin:end]
    if query.folds:
        if not text.isascii():
            lines = _matching_lines(data, query, begin)
            here = takewhile(lambda row: row[1] < end, lines)
            return sum(1 for _ in here), end
        text = text.lower()
    found = map(stringzilla.find, text.split(b"\n"), repeat(literal))
    return sum(map(_WAS_FOUND, found)), end


def _groups(shown: list[_Row], context: int) -> Iterator[list[_Row]]:
    """Yield groups of matches whose contexts touch or overlap."""
    group: list[_Row] = []
    for row in shown:
        if group and (not context or row[0] - group[-1][0] > 2 * context + 1):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _hit(blob: Blob, group: list[_Row], context: int) -> Hit:
    index = blob.index
    line, line_start, position = group[0]
    first = max(1, line - context)
    last = min(index.lines, group[-1][0] + context)
    span = Span(index.line_start(blob, first), index.line_start(blob, last + 1))
    before = index.chars_before(blob, line_start)
    column = index.chars_before(blob, position) - before + 1
    return Hit(line, column, first, last, span)
