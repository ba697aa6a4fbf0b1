"""Preloads of a spawned process, and their text in its system prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from protocol import fdxml
from supervisor.llm.conversations import MOST_KEPT_CHARS
from supervisor.llmfd import FdError
from supervisor.llmfd.errors import FILE_OPERATION, INVALID_PARAMETER
from supervisor.llmfd.selection import lines_of
from supervisor.llmfd.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.llmfd import Content, Json, LlmFd, Process
    from supervisor.llmfd.index import Span

PRELOAD_CHARS = 200_000
"""Most characters of a preload in a system prompt; the rest stays readable."""


class Preloads:
    """The preloads of a spawned process.

    Args:
        process: has them.
        child: gets them.

    Attributes:
        shown: their parts of the prompt.
    """

    def __init__(self, process: Process, child: Process) -> None:
        self.shown: list[str] = []
        self._process = process
        self._child = child
        self._left_chars = MOST_KEPT_CHARS

    async def add_fds(self, parts: Sequence[Json]) -> None:
        """Give descriptors under their numbers, and selected lines under new ones.

        Raises:
            FdError: there is no such descriptor or line, or it is too long to show.
        """
        process, table = self._process, self._child.table
        named = await in_thread(process.find_named, parts, share=process.threads)
        # All taken numbers are known before a new one is given.
        for fd, span in named:
            if span is None:
                table.next_number = max(table.next_number, fd.number + 1)
        for fd, span in named:
            if span is not None:
                await self._add_lines(fd, span)
            elif fd.number not in table.fds:  # one that is named twice is given once
                held = process.shared.store.hold(fd.content)
                table.enter(replace(fd, content=held, sections=dict(fd.sections)))
                await self._show(fd)

    async def _add_lines(self, fd: LlmFd, span: Span) -> None:
        add = self._child.add_lines
        new = await in_thread(add, fd, span, share=self._process.threads)
        await self._show(new, ("from", fd.id), ("lines", lines_of(fd, span)))

    async def add_temp_files(self, ids: Sequence[str]) -> None:
        """Give temporary files.

        Raises:
            FdError: there is no such file, or it is too long to show.
        """
        for temp_id in ids:
            _, held = self._process.shared.temps.hold(temp_id)
            new = await self._child.add_waiting(held, temp_id)
            await self._show(new, ("temp_file", temp_id))

    async def add_files(self, paths: Sequence[str]) -> None:
        """Give files that the process may read.

        Raises:
            FdError: one cannot be read, or is too long to show.
        """
        for path in paths:
            held = await _file(self._process, path)
            new = await self._child.add_waiting(held, f"file:{path}")
            await self._show(new, ("file", path))

    async def _show(self, fd: LlmFd, *more: tuple[str, str]) -> None:
        """Show a descriptor, up to `PRELOAD_CHARS`.

        Raises:
            FdError: all preloads together are longer than a conversation may be.
        """
        blob = fd.content.text
        chars = min(blob.index.chars, PRELOAD_CHARS)
        self._left_chars -= chars
        if self._left_chars < 0:
            text = f"The preloads show more than {MOST_KEPT_CHARS} characters"
            raise FdError(INVALID_PARAMETER, text, fd=fd.id)
        end = blob.index.char_offset(blob, chars)
        attributes: list[tuple[str, str | int | bool]] = [("fd", fd.id), *more]
        if fd.is_binary:
            attributes.append(("encoding", "base64"))
        if end < blob.size:
            attributes.append(("truncated", True))
        self.shown.append(
            fdxml.text_element("preload", attributes, blob[:end]).decode()
        )
        await trio.lowlevel.checkpoint()  # there may be many


async def _file(process: Process, path: str) -> Content:
    """Return the content of a file that the process may read; the caller holds it."""
    if process.files is None:
        raise FdError(FILE_OPERATION, "Cannot read file: no file system is there")
    writer = process.shared.store.writer()
    try:
        await process.files.read(path, writer.add)
        return await in_thread(writer.finish, share=process.threads)
    except (OSError, ValueError) as why:
        reason = getattr(why, "strerror", None) or str(why)
        details = f"Operation: read, Path: {path}"
        text = f"Cannot read file: {reason}"
        raise FdError(FILE_OPERATION, text, details) from None
    finally:
        writer.close()
