r"""Finding lines: literal or regular expression, in linear time, resumable.

Rules of this file.

1. A match is a line: a line with three hits counts once.  An expression never reaches
   across a line; ``^`` and ``$`` are the ends of a line.  RE2 keeps every expression
   off the LF but ``\C``, any byte: that is refused.
2. The engine is RE2, for literals too (it finds a rare byte of them faster than
   ``bytes.find``): no expression takes more than linear time in the text.
3. Every match is counted; ``max_results`` bounds what is answered.  Contexts that touch
   or overlap are one answer.
4. The text is searched where it lies, mapped or in memory, without a copy.  Lines that
   are only counted are cut out of it where every few of them match: to find one costs
   3 us, to look at a line 0.1.
5. No call of the engine goes through more than a window, or a line if that is longer:
   an expression of many states takes a second for 64 KiB.  The engine lets go of the
   interpreter while it looks, but not while it compiles, which bounds what is compiled.
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
"""Longest query: what it compiles to is bounded too."""

MOST_CLASSES = 100
"""Most classes of Unicode (``\\pL``) in a query: each takes a quarter of a millisecond to
compile, with the interpreter held, whatever becomes of it."""

MOST_PROGRAM_BYTES = 2 * 1024 * 1024
"""What a query compiles to, and the states it is in: with RE2's own 8 MiB an expression
takes 250 ms to compile."""

WINDOW_BYTES = 64 * 1024
"""Text that is searched at once for an expression, and the rest of its last line."""

MOST_SHOWN_BYTES = 4 * 1024 * 1024
"""Text of one answer; what does not fit is where the search goes on."""

PROBED_LINES = 64
"""So many matches tell whether there are many in what follows."""

DENSE_BYTES = PROBED_LINES * 3000
"""Matches closer to each other than that are many."""

CUT_BYTES = 256 * 1024
"""Text whose lines are cut out at once."""

CUTS = 16
"""So many times, before it is asked again whether there are many."""

LOOK_BYTES = 16 * 1024 * 1024
"""Most that is looked through for a line's end at once: it holds the interpreter."""

_WAS_FOUND = (-1).__ne__

_Row = tuple[int, int, int]
"""A line that matches: its number, its start, where the match is."""


@dataclass(frozen=True, slots=True)
class Query:
    """What is looked for.

    Attributes:
        pattern: finds it.
        literal: what every matching line holds as it is, and no other; None if it takes
            the pattern to tell.
        folds: the literal is in lower case, and stands for both.
        window: how much is searched at once.
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


def compile_query(query: str, *, regex: bool, case_sensitive: bool) -> Query:
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
    options.max_mem = MOST_PROGRAM_BYTES
    try:
        pattern = query.encode()
        if not regex:
            compiled = re2.compile(re2.escape(query).encode(), options)
            # Beyond ASCII one letter has forms of different lengths.
            is_plain = case_sensitive or query.isascii()
            literal = pattern if case_sensitive else pattern.lower()
            return Query(
                compiled,
                literal if is_plain else None,
                folds=not case_sensitive,
                window=LOOK_BYTES,
            )
        compiled = _compiled(pattern, options)
        return Query(compiled, None, folds=False, window=WINDOW_BYTES)
    except UnicodeEncodeError:
        raise FdError(INVALID_PARAMETER, "The query has a lone surrogate") from None
    except re2.error as why:
        said = why.args[0] if why.args else ""
        words = (
            said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        )
        raise FdError(INVALID_PARAMETER, f"Invalid pattern: {words}") from None


def _compiled(pattern: bytes, options: re2.Options) -> re2._Regexp:
    if pattern.count(b"\\p") + pattern.count(b"\\P") > MOST_CLASSES:
        text = f"The pattern has more than {MOST_CLASSES} classes of Unicode (\\p)"
        raise FdError(INVALID_PARAMETER, text)
    try:
        compiled = re2.compile(b"(?m)" + pattern, options)
    except re2.error as why:
        if b"(?m)" in why.args[0]:
            re2.compile(pattern, options)  # alone: it is what a fault is told of
        raise
    if _has_any_byte(pattern):
        text = (
            r"\C in the pattern is a byte, the end of a line too; use . for a character"
        )
        raise FdError(INVALID_PARAMETER, text)
    return compiled


def _has_any_byte(pattern: bytes) -> bool:
    r"""Tell whether a valid expression has ``\C``; ``\\C`` and ``\QC\E`` are none."""
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
) -> Found:
    """Find the lines of a text that match.

    Args:
        blob: the text.
        query: from ``compile_query``.
        context: lines to show before and after each.
        max_results: most matching lines to show.
        start_line: where to begin.

    Raises:
        FdError: ``invalid_parameter``: the first match alone is too long to be shown.
    """
    begin = blob.index.line_start(blob.data, start_line)
    matches = 0
    shown: list[_Row] = []
    next_line: int | None = None
    for line_start, position, following in _matching_lines(blob, query, begin):
        matches += 1
        if len(shown) < max_results:
            shown.append((_line_at(blob, line_start), line_start, position))
        else:
            next_line = _line_at(blob, line_start)
            matches += _count(blob, query, following)
            break
    hits = []
    left = MOST_SHOWN_BYTES
    for group in _groups(shown, context):
        fitting, hit = _what_fits(blob, group, context, left)
        if hit is not None:
            hits.append(hit)
            left -= hit.span.end - hit.span.start
        if fitting < len(group):
            next_line = group[fitting][0]
            break
    if matches and not hits:
        raise _too_long(blob, shown[0])
    return Found(matches, tuple(hits), next_line)


def _what_fits(
    blob: Blob, group: list[_Row], context: int, most: int
) -> tuple[int, Hit | None]:
    """Return how many matches of a group are shown in so many bytes, and how."""
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


def _too_long(blob: Blob, row: _Row) -> FdError:
    line, start, at = row
    if _line_end(blob.data, at, blob.size) - start <= MOST_SHOWN_BYTES:
        text = (
            f"Line {line} is too long for one answer with its context: show less of it"
        )
    else:
        text = f"Line {line} is too long for one answer: use read_fd with mode=char"
    return FdError(INVALID_PARAMETER, text)


def _line_at(blob: Blob, offset: int) -> int:
    return blob.index.newlines_before(blob.data, offset) + 1


def _matching_lines(
    blob: Blob, query: Query, position: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the start of each, where the match is, and the start of the next line."""
    data = blob.data
    size = blob.size
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
    """Return where a line starts; none starts before ``floor``."""
    while at > floor:
        begin = max(floor, at - LOOK_BYTES)
        found = data.rfind(b"\n", begin, at)
        if found >= 0:
            return found + 1
        at = begin
    return floor


def _line_end(data: Buffer, at: int, size: int) -> int:
    """Return where the line after this one starts."""
    while at < size:
        end = min(size, at + LOOK_BYTES)
        found = data.find(b"\n", at, end)
        if found >= 0:
            return found + 1
        at = end
    return size


def _count(blob: Blob, query: Query, position: int) -> int:
    """Count the lines that match, from the start of a line on."""
    count = 0
    while position < blob.size:
        begin, probed = position, 0
        lines = _matching_lines(blob, query, begin)
        for _, _, following in islice(lines, PROBED_LINES):
            probed += 1
            position = following
        count += probed
        if probed < PROBED_LINES:
            break
        if query.literal is not None and position - begin < DENSE_BYTES:
            for _ in range(CUTS):
                found, position = _count_cut(blob, query, query.literal, position)
                count += found
    return count


def _count_cut(blob: Blob, query: Query, literal: bytes, begin: int) -> tuple[int, int]:
    """Count those in what follows; also return how far that reaches."""
    data, size = blob.data, blob.size
    end = min(size, begin + CUT_BYTES)
    if end < size:
        cut = data.rfind(b"\n", begin, end) + 1
        if not cut:  # a line that long is not cut out
            lines = _matching_lines(blob, query, begin)
            _, at, following = next(lines, (0, size, size))
            return (1 if at < size else 0), following
        end = cut
    text = data[begin:end]
    if query.folds:
        if not text.isascii():
            lines = _matching_lines(blob, query, begin)
            here = takewhile(lambda row: row[1] < end, lines)
            return sum(1 for _ in here), end
        text = text.lower()
    found = map(stringzilla.find, text.split(b"\n"), repeat(literal))
    return sum(map(_WAS_FOUND, found)), end


def _groups(shown: list[_Row], context: int) -> Iterator[list[_Row]]:
    """Yield matches whose contexts touch or overlap as one."""
    group: list[_Row] = []
    for row in shown:
        if group and (not context or row[0] - group[-1][0] > 2 * context + 1):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _hit(blob: Blob, group: list[_Row], context: int) -> Hit:
    index, data = blob.index, blob.data
    line, line_start, position = group[0]
    first = max(1, line - context)
    last = min(index.lines, group[-1][0] + context)
    span = Span(index.line_start(data, first), index.line_start(data, last + 1))
    before = index.chars_before(data, line_start)
    column = index.chars_before(data, position) - before + 1
    return Hit(line, column, first, last, span)
