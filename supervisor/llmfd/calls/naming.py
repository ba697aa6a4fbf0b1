"""The calls on names: of descriptors, of marked sections, of temporary files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import fdxml
from supervisor.llmfd.calls.reading import content_xml
from supervisor.llmfd.errors import INVALID_PARAMETER, NOT_FOUND, FdError, check_length
from supervisor.llmfd.selection import Selection, line_span
from supervisor.llmfd.table import MOST_NAME_CHARS, MOST_SECTIONS

if TYPE_CHECKING:
    from supervisor.llmfd.arguments import Json
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.process import Process
    from supervisor.llmfd.tempfiles import TempFile


def rename_fd(process: Process, *, fd: str, name: str) -> bytes:
    """Give a descriptor a name; the answer has its old one."""
    found = process.table.find(fd)
    previous = found.name
    process.table.rename(found, name)
    return fdxml.empty(
        "fd_rename", (("fd", found.id), ("name", name), ("previous", previous))
    )


def mark_fd_section(
    process: Process,
    *,
    fd: str,
    ref_id: str,
    start_line: int | None = None,
    end_line: int | None = None,
) -> bytes:
    """Mark lines under an id, in place of an older mark of that id."""
    found = process.table.find(fd)
    if not 0 < len(ref_id) <= MOST_NAME_CHARS or not ref_id.isprintable():
        text = f"Invalid ref_id: write 1-{MOST_NAME_CHARS} printable characters"
        raise FdError(INVALID_PARAMETER, text, fd=found.id)
    line_span(found, start_line, end_line)
    total = found.content.text.index.lines
    first = 1 if start_line is None else start_line
    last = total if end_line is None else min(end_line, total)
    replaced = ref_id in found.sections
    if not replaced and process.table.sections >= MOST_SECTIONS:
        text = f"{MOST_SECTIONS} sections are marked already"
        raise FdError(INVALID_PARAMETER, text, fd=found.id)
    process.table.mark(found, ref_id, (first, last))
    return fdxml.empty(
        "fd_section",
        (
            ("fd", found.id),
            ("ref_id", ref_id),
            ("start_line", first),
            ("end_line", last),
            ("replaced", replaced),
        ),
    )


def get_fd_section(
    process: Process, *, ref_id: str, fd: str | None = None, name: str | None = None
) -> bytes:
    """Show marked lines."""
    found = process.table.find(fd, name)
    lines = found.sections.get(ref_id)
    if lines is None:
        raise FdError(NOT_FOUND, f"Section {ref_id} not found", fd=found.id)
    selection = Selection(line_span(found, *lines), "section")
    return content_xml(process, found, selection, (("ref_id", ref_id),))


def list_fd_sections(
    process: Process, *, fd: str | None = None, name: str | None = None
) -> bytes:
    """List the marks in the order of the text."""
    found = process.table.find(fd, name)
    marks = sorted((*lines, ref_id) for ref_id, lines in found.sections.items())
    rows = (
        fdxml.empty(
            "section", (("ref_id", ref_id), ("start_line", first), ("end_line", last))
        )
        for first, last, ref_id in marks
    )
    return fdxml.listing("fd_sections", (("fd", found.id), ("count", len(marks))), rows)


def delete_fd_section(process: Process, *, fd: str, ref_id: str) -> bytes:
    """Delete a mark."""
    found = process.table.find(fd)
    if ref_id not in found.sections:
        raise FdError(NOT_FOUND, f"Section {ref_id} not found", fd=found.id)
    process.table.unmark(found, ref_id)
    return fdxml.empty("fd_section_deleted", (("fd", found.id), ("ref_id", ref_id)))


def keep_fds(process: Process, *, fds: list[Json]) -> bytes:
    """Give up every descriptor but these for good; selected lines get a new number."""
    process.keep_only(process.find_named(fds))
    return fdxml.empty("fd_list", (("count", len(process.table.fds)),))


# Temporary files


def create_temp_file(process: Process, *, content: str | dict[str, str]) -> bytes:
    """Make a temporary file."""
    return _temp_xml(process.shared.temps.create(take_text(process, content)))


def read_temp_file(process: Process, *, temp_file_id: str) -> bytes:
    """Show a temporary file."""
    file, content = process.shared.temps.hold(temp_file_id)
    attributes: list[tuple[str, str | int]] = [
        ("id", file.id),
        ("version", file.version),
    ]
    if content.raw is not None:
        attributes.append(("encoding", "base64"))
    raw = process.shared.settings.raw
    try:
        check_length(content.text.size, "spawn can preload it")
        data = content.text[:]
        return fdxml.text_element("temp_content", attributes, data, raw=raw)
    finally:
        process.shared.store.drop(content)


def write_temp_file(
    process: Process,
    *,
    temp_file_id: str,
    content: str | dict[str, str],
    version: int | None = None,
) -> bytes:
    """Replace the content of a temporary file, if its version is as expected."""
    new = take_text(process, content)
    return _temp_xml(process.shared.temps.write(temp_file_id, new, version))


def delete_temp_file(process: Process, *, temp_file_id: str) -> bytes:
    """Remove a temporary file."""
    process.shared.temps.delete(temp_file_id)
    return fdxml.empty("temp_deleted", (("id", temp_file_id),))


def _temp_xml(file: TempFile) -> bytes:
    size = file.content.original.size
    attributes = (("id", file.id), ("version", file.version), ("bytes", size))
    return fdxml.empty("temp_file", attributes)


def take_text(process: Process, text: str | dict[str, str]) -> Content:
    """Return the content of a text or a token; the caller holds it."""
    if isinstance(text, dict):
        return process.begun.take(text["token"])
    return process.put_text(text)
