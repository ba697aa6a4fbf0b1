"""The calls that show content: read_fd, search_fd, get_fd_section and others."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from protocol import fdxml
from supervisor.llmfd.arguments import chat_schema
from supervisor.llmfd.errors import (
    INVALID_PARAMETER,
    INVALID_RANGE,
    FdError,
    check_length,
)
from supervisor.llmfd.search import compile_query, search
from supervisor.llmfd.selection import (
    Selection,
    Selector,
    select,
    show,
)
from supervisor.llmfd.source_code import guess

if TYPE_CHECKING:
    from supervisor.llmfd.process import Process
    from supervisor.llmfd.search import Hit
    from supervisor.llmfd.table import LlmFd

DEFAULT_MAX_RESULTS = 20
MOST_RESULTS = 10_000
DEFAULT_CONTEXT = 2
MOST_CONTEXT = 1000


def read_fd(  # noqa: PLR0913 - the parameters of the call
    process: Process,
    *,
    fd: str | None = None,
    page: int | None = None,
    read_all: bool | None = None,
    start_line: int | None = None,
    end_line: int | None = None,
    mode: str | None = None,
    start: int | None = None,
    count: int | None = None,
    unit: str | None = None,
    index: int | None = None,
    name: str | None = None,
    language: str | None = None,
    extract_to_new_fd: bool | None = None,
) -> bytes:
    """Show a part of a content, or keep it as a content."""
    of_unit = unit is not None or index is not None or language is not None
    if of_unit and fd is None:
        text = "Missing parameter: fd (with unit, name is the name of the unit)"
        raise FdError(INVALID_PARAMETER, text)
    found = process.table.find(fd, None if of_unit else name)
    selector = Selector(
        page=page,
        read_all=read_all,
        start_line=start_line,
        end_line=end_line,
        mode=mode,
        start=start,
        count=count,
        unit=unit,
        index=index,
        name=name if of_unit else None,
        language=language,
    )
    selection = select(found, selector)
    if extract_to_new_fd:
        kind = mode or unit or (selector.kinds() or ["page"])[0].split()[0]
        return _extract(process, found, selection, _MODES.get(kind, kind))
    return content_xml(process, found, selection)


_MODES = {"start_line": "line", "read_all": "all"}


def content_xml(
    process: Process,
    fd: LlmFd,
    selection: Selection,
    extras: tuple[tuple[str, str | int], ...] = (),
) -> bytes:
    """Return a part of a content as ``fd_content``."""
    text = fd.content.text
    span = selection.span
    check_length(span.end - span.start, "read pages, or use fd_to_file", fd.id)
    shown = show(fd, span)
    attributes: list[tuple[str, str | int | bool]] = [
        ("fd", fd.id),
        ("page", selection.page),
        ("pages", len(text.pages(fd.page_size))),
        ("continued", shown.is_continued),
        ("truncated", shown.is_truncated),
        ("lines", shown.lines),
        ("total_lines", text.index.lines),
    ]
    if fd.is_binary:
        attributes.append(("encoding", "base64"))
    attributes += [*selection.extras, *extras]
    return fdxml.text_element(
        "fd_content", attributes, shown.text, raw=process.shared.settings.raw
    )


def _extract(process: Process, fd: LlmFd, selection: Selection, mode: str) -> bytes:
    new = process.add_part(fd.content.text, selection.span, f"extract:{fd.id}")
    return fdxml.empty(
        "fd_extraction",
        (
            ("source_fd", fd.id),
            ("new_fd", new.id),
            ("mode", mode),
            ("content_size", new.content.text.index.chars),
        ),
    )


def search_fd(  # noqa: PLR0913 - the parameters of the call
    process: Process,
    *,
    query: str,
    fd: str | None = None,
    name: str | None = None,
    case_sensitive: bool = True,
    regex: bool = False,
    context: int = DEFAULT_CONTEXT,
    max_results: int = DEFAULT_MAX_RESULTS,
    start_line: int = 1,
) -> bytes:
    """Show the lines that match a query."""
    found = process.table.find(fd, name)
    if found.is_binary:
        text = "Binary content cannot be searched"
        raise FdError(INVALID_PARAMETER, text, fd=found.id)
    for word, value, least, most in (
        ("context", context, 0, MOST_CONTEXT),
        ("max_results", max_results, 1, MOST_RESULTS),
    ):
        if not least <= value <= most:
            message = f"Parameter {word} must be from {least} to {most}"
            raise FdError(INVALID_PARAMETER, message, fd=found.id)
    blob = found.content.text
    total = blob.index.lines
    if not 1 <= start_line <= max(total, 1):
        message = f"Invalid start line {start_line}. Valid range: 1-{total}"
        raise FdError(INVALID_RANGE, message, fd=found.id)
    try:
        pattern = compile_query(query, regex=regex, case_sensitive=case_sensitive)
        result = search(
            blob,
            pattern,
            context=context,
            max_results=max_results,
            start_line=start_line,
        )
    except FdError as why:
        why.fd = found.id
        raise
    attributes: list[tuple[str, str | int | bool]] = [
        ("fd", found.id),
        ("query", query),
        ("matches", result.matches),
        ("returned", len(result.hits)),
        ("truncated", result.next_line is not None),
        ("total_lines", total),
    ]
    if result.next_line is not None:
        attributes.append(("next_line", result.next_line))
    raw = process.shared.settings.raw
    rows = (_match_xml(found, hit, raw=raw) for hit in result.hits)
    return fdxml.listing("fd_search", attributes, rows)


def _match_xml(fd: LlmFd, hit: Hit, *, raw: bool) -> bytes:
    attributes = (
        ("line", hit.line),
        ("col", hit.column),
        ("lines", f"{hit.first}-{hit.last}"),
    )
    piece = fd.content.text[hit.span.start : hit.span.end]
    return fdxml.text_element("match", attributes, piece, raw=raw)


def fd_info(
    process: Process, *, fd: str | None = None, name: str | None = None
) -> bytes:
    """Describe a descriptor."""
    return fdxml.empty("fd_info", _facts(process.table.find(fd, name)))


def list_fds(process: Process) -> bytes:
    """List the descriptors."""
    fds = process.table.fds.values()
    rows = (fdxml.empty("fd", _facts(fd)) for fd in fds)
    return fdxml.listing("fd_list", (("count", len(fds)),), rows)


def tool_schemas(process: Process) -> bytes:
    """Return the tools of a model in the form of the chat API: JSON."""
    return json.dumps([chat_schema(tool) for tool in process.offered_tools()]).encode()


def _facts(fd: LlmFd) -> tuple[tuple[str, str | int], ...]:
    text = fd.content.text
    return (
        ("fd", fd.id),
        ("source", fd.source),
        ("creation_time", timestamp(fd.created)),
        ("type", type_of(fd)),
        ("page_size", fd.page_size),
        ("pages", len(text.pages(fd.page_size))),
        ("total_lines", text.index.lines),
        ("name", fd.name),
    )


def timestamp(seconds: float) -> str:
    """Return seconds since the epoch as RFC 3339 in UTC."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")


def type_of(fd: LlmFd) -> str:
    """Return ``binary``, ``text`` or the language of a text."""
    return "binary" if fd.is_binary else guess(fd)
