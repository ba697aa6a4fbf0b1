"""Units of a content: paragraphs, sections, functions, classes.

A paragraph is a run of lines that are not blank. A section is the text under a Markdown
heading, subsections included; in a content without headings, the marked sections count.
Functions and classes are found by the grammar of the language
(``supervisor.llmfd.source_code``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import re2

from hostlib.threads import stop_if_cancelled
from supervisor.llmfd.index import Span

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from supervisor.llmfd.source_code import Scope
    from supervisor.llmfd.table import LlmFd

CODE_UNITS = ("function", "class")
"""Found by a grammar."""

UNITS = ("paragraph", "section", *CODE_UNITS)

MOST_TITLE_BYTES = 4096
"""Longest name of a section; longer ones are cut."""

_PARAGRAPH = re2.compile(rb"(?:[ \t\r\f\v]*[^\s][^\n]*(?:\n|\z))+")
_HEADING = re2.compile(
    rb"(?m)^(?: {0,3}(```+|~~~+)[^\n]*| {0,3}(#{1,6})[ \t]+([^\n]*?)[ \t]*#*[ \t\r]*)$"
)


class Unit(NamedTuple):
    """A unit of a content.

    Attributes:
        number: among those of its kind, from 1.
        name: its name; empty for none.
        span: in bytes of the text; of functions and classes see ``whole``.
        scope: the function or class that it is defined in.
    """

    number: int
    name: str
    span: Span
    scope: Scope | None = None

    def is_called(self, name: str) -> bool:
        """Return whether a name is its own, or its own with scopes before it: ``A.g``."""
        if self.name == name:
            return True
        *outer, last = name.split(".")
        if not outer or last != self.name:
            return False
        scope = self.scope
        for word in reversed(outer):
            if scope is None or scope.name != word:
                return False
            scope = scope.outer
        return True


def find_units(
    fd: LlmFd, unit: str, language: str | None = None
) -> Generator[Unit, None, None]:
    """Yield the units of one kind, each when its end is known.

    A caller that stops early closes the generator: it may hold a tree.

    Args:
        fd: the content.
        unit: their kind.
        language: of functions and classes; None to guess it.

    Raises:
        FdError: ``invalid_parameter``: the language is not known, its grammar not
            installed, or the content too long to parse.
    """
    if unit == "paragraph":
        yield from _paragraphs(fd)
    elif unit == "section":
        sections = _sections(fd)
        first = next(sections, None)
        if first is None:
            yield from _marked_sections(fd)
        else:
            yield first
            yield from sections
    else:
        from supervisor.llmfd.source_code import find_code  # noqa: PLC0415 - loads grammars

        for number, code in enumerate(find_code(fd, unit, language), 1):
            yield Unit(number, *code)


def whole(fd: LlmFd, unit: str, found: Unit) -> Unit:
    """Return a unit with its lines as they are shown.

    Finding their ends takes time, and most units are not shown.
    """
    if unit not in CODE_UNITS:
        return found
    from supervisor.llmfd.source_code import whole_lines  # noqa: PLC0415 - loads grammars

    return found._replace(span=whole_lines(fd, found.span))


def _paragraphs(fd: LlmFd) -> Iterator[Unit]:
    data = fd.content.text.data
    position = number = 0
    while True:
        stop_if_cancelled()
        match = _PARAGRAPH.search(data, position)
        if match is None:
            return
        number += 1
        position = match.end()
        yield Unit(number, "", Span(match.start(), position))


def _sections(fd: LlmFd) -> Iterator[Unit]:
    """Yield the text under each heading, with all subsections.

    No more of them are open at once than there are levels.
    """
    under: list[tuple[int, int, str, int]] = []  # level, number, title, start
    for count, (level, title, start) in enumerate(_headings(fd), 1):
        while under and under[-1][0] >= level:
            _, number, name, begin = under.pop()
            yield Unit(number, name, Span(begin, start))
        under.append((level, count, title, start))
    while under:
        _, number, name, begin = under.pop()
        yield Unit(number, name, Span(begin, fd.content.text.size))


def _headings(fd: LlmFd) -> Iterator[tuple[int, str, int]]:
    """Yield level, title and start of each heading outside of fenced code."""
    data = fd.content.text.data
    size = fd.content.text.size
    fence: tuple[bytes, int] | None = None  # its character, how many
    position = 0
    while position <= size:
        stop_if_cancelled()
        match = _HEADING.search(data, position)
        if match is None:
            return
        position = match.end() + 1
        begin, end = match.span(1)
        if begin >= 0:
            mark = data[begin : begin + 1]
            if fence is None:
                fence = (mark, end - begin)
            elif mark == fence[0] and end - begin >= fence[1]:
                fence = None
        elif fence is None:
            begin, end = match.span(3)
            title = data[begin : min(end, begin + MOST_TITLE_BYTES)]
            first, last = match.span(2)
            yield last - first, title.decode("utf-8", "replace"), match.start()


def _marked_sections(fd: LlmFd) -> Iterator[Unit]:
    text = fd.content.text
    rows = sorted((first, last, name) for name, (first, last) in fd.sections.items())
    for number, (first, last, name) in enumerate(rows, 1):
        start = text.index.line_start(text, first)
        end = text.index.line_start(text, last + 1)
        yield Unit(number, name, Span(start, end))
