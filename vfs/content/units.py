"""Parts of a content that mean something: paragraphs, sections, functions, classes.

A paragraph is a run of lines that are not blank.  A section is what stands under a
Markdown heading, its subsections included; in a content without headings it is what
was marked.  Functions and classes are found by the grammar of the language
(``vfs.content.code``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import re2

from vfs.content.pages import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfs.content.table import LlmFd

UNITS = ("paragraph", "section", "function", "class")

_PARAGRAPH = re2.compile(rb"(?:[ \t\r\f\v]*[^\s][^\n]*(?:\n|\z))+")
_HEADING = re2.compile(
    rb"(?m)^(?: {0,3}(```+|~~~+)[^\n]*| {0,3}(#{1,6})[ \t]+([^\n]*?)[ \t]*#*[ \t\r]*)$"
)


class Unit(NamedTuple):
    """One of them.

    Attributes:
        number: among those of its kind, from 1.
        name: what it is called; empty if it is not.
        span: in bytes of the text.
    """

    number: int
    name: str
    span: Span


def find_units(fd: LlmFd, unit: str) -> Iterator[Unit]:
    """Yield the units of one kind in the order of the text.

    Raises:
        FdError: ``invalid_parameter``: the language is not known, or its grammar not
            installed.
    """
    if unit == "paragraph":
        yield from _paragraphs(fd)
    elif unit == "section":
        headed = _sections(fd)
        yield from headed or _marked(fd)
    else:
        from vfs.content.code import find_code  # noqa: PLC0415 - loads grammars

        for number, (name, span) in enumerate(find_code(fd, unit), 1):
            yield Unit(number, name, span)


def _paragraphs(fd: LlmFd) -> Iterator[Unit]:
    data = fd.content.text.data
    position = number = 0
    while True:
        match = _PARAGRAPH.search(data, position)
        if match is None:
            return
        number += 1
        position = match.end()
        yield Unit(number, "", Span(match.start(), position))


def _sections(fd: LlmFd) -> list[Unit]:
    """Return what stands under headings; those inside fenced code are none."""
    data = fd.content.text.data
    size = fd.content.text.size
    heads: list[tuple[int, int, str]] = []
    fence = b""
    position = 0
    while (match := _HEADING.search(data, position)) is not None:
        position = match.end() + 1
        mark, level, title = match.groups()
        if mark is not None:
            if not fence:
                fence = mark
            elif mark.startswith(fence):
                fence = b""
        elif not fence:
            heads.append((len(level), match.start(), title.decode()))
        if position > size:
            break
    return _nested(heads, size)


def _nested(heads: list[tuple[int, int, str]], size: int) -> list[Unit]:
    """Return each heading with what is under it, in linear time."""
    ends = [size] * len(heads)
    open_heads: list[int] = []
    for number, (level, start, _) in enumerate(heads):
        while open_heads and heads[open_heads[-1]][0] >= level:
            ends[open_heads.pop()] = start
        open_heads.append(number)
    return [
        Unit(number, title, Span(start, ends[number - 1]))
        for number, (_, start, title) in enumerate(heads, 1)
    ]


def _marked(fd: LlmFd) -> Iterator[Unit]:
    text = fd.content.text
    rows = sorted((first, last, name) for name, (first, last) in fd.sections.items())
    for number, (first, last, name) in enumerate(rows, 1):
        start = text.index.line_start(text.data, first)
        end = text.index.line_start(text.data, last + 1)
        yield Unit(number, name, Span(start, end))
