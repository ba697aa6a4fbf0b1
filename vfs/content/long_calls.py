"""Which calls take long, and what that means for where they run and when they end.

The Trio thread answers every client of the host, so that no step in it may take longer
than 10 ms; a worker thread costs 0.1 ms, which a short call need not pay.  What may take
seconds or minutes, and leaves nothing to anybody but who called, ends with the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfs.content.errors import FdError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vfs.content.arguments import Tool
    from vfs.content.process import Process
    from vfs.content.table import LlmFd

INLINE_BYTES = 256 * 1024
"""Longest content that is worked on in the Trio thread: a fifth of a millisecond."""

INLINE_ROWS = 20
"""Longest list that is made in the Trio thread: 0.3 ms, or 8 ms where the languages of
contents have to be guessed first."""

INLINE_CHARS_BYTES = 4 * INLINE_BYTES
"""What as many characters take at most."""

ONLY_READ = frozenset({"read_fd", "search_fd"})
"""Calls that show something, of a content of any length."""

NEED_MODEL = frozenset({"fork", "spawn", "summarize_fd"})
"""Calls that are there only where a host has a model."""

SUMMARIZED = frozenset({"wrap_output", "wrap_input"})
"""Calls whose answer may come with a summary, which a model makes."""


def is_for_caller_alone(process: Process, name: str) -> bool:
    """Tell whether a call may take long and is of no use once its caller has gone.

    A model that is asked for nobody would be paid, and would keep what has ended.
    """
    shared = process.shared
    asks = shared.settings.auto_summarize and shared.summarizer is not None
    return name in ONLY_READ | NEED_MODEL or (asks and name in SUMMARIZED)


def is_long(process: Process, tool: Tool, values: Mapping[str, object]) -> bool:
    """Tell whether a call is one for a worker thread.

    Args:
        process: whose call it is.
        tool: what is called.
        values: the parameters, checked.
    """
    if tool.lists:
        return _lists_many(process, values)
    if not tool.is_slow:
        return False
    if tool.name == "read_temp_file":
        return process.shared.temps.size(values["temp_file_id"]) > INLINE_BYTES
    if values.keys() & {"fd", "name"}:
        return _reads_long(process, values)
    return _puts_long(process, values)


def is_long_text(process: Process, text: str) -> bool:
    """Tell whether to keep a text takes long."""
    return len(text) > INLINE_BYTES or _is_tight(process)


def is_long_list(parts: Sequence[object]) -> bool:
    """Tell whether to find what is named takes long; lines of it are copied, too."""
    many = len(parts) > INLINE_ROWS
    return many or any(isinstance(one, dict) for one in parts)


def _is_tight(process: Process) -> bool:
    """Whether to store as much as is short may have to wait for the disk."""
    return process.shared.store.is_tight(INLINE_CHARS_BYTES)


def _lists_many(process: Process, values: Mapping[str, object]) -> bool:
    if max(len(process.table.fds), process.table.sections) > INLINE_ROWS:
        return True
    parts = values.get("fds")
    return isinstance(parts, list) and is_long_list(parts)


def _puts_long(process: Process, values: Mapping[str, object]) -> bool:
    token = values.get("token")
    if isinstance(token, str) and process.begun.size(token) > INLINE_BYTES:
        return True
    return _is_tight(process) or any(
        not isinstance(value, str) or len(value) > INLINE_BYTES
        for value in values.values()
    )


def _reads_long(process: Process, values: Mapping[str, object]) -> bool:
    if "unit" in values or values.get("regex"):
        # To count units takes long in a short text too, and so does an expression of
        # many states.
        return True
    fd, name = values.get("fd"), values.get("name")
    try:
        found = process.table.find(
            fd if isinstance(fd, str) else None,
            name if isinstance(name, str) else None,
        )
    except FdError:
        return False
    if found.content.text.size > INLINE_BYTES:
        return not _is_a_page(found, values)
    return bool(values.get("extract_to_new_fd")) and _is_tight(process)


def _is_a_page(fd: LlmFd, values: Mapping[str, object]) -> bool:
    """Whether only a page of what is in memory is read: as quick at any length."""
    return (
        values.keys() <= {"fd", "name", "page"}
        and fd.page_size <= INLINE_BYTES
        and fd.content.text.in_memory is not None
    )
