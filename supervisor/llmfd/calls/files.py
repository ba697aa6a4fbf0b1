"""``fd_to_file``: content into a file of the child's, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from typing import TYPE_CHECKING

from hostlib.threads import in_background, in_thread
from protocol import fdxml
from supervisor.llmfd.errors import FILE_OPERATION, INVALID_PARAMETER, FdError
from supervisor.llmfd.selection import Selector, select
from vfs.backends import UnflushedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trio

    from supervisor.llmfd.allowance import Allowance
    from supervisor.llmfd.blob import Blob
    from supervisor.llmfd.client_files import Files
    from supervisor.llmfd.process import Process
    from supervisor.llmfd.table import LlmFd

MODES = ("write", "append", "insert")
STEP_BYTES = 1024 * 1024
"""Bytes of one write of an export."""

OLD_IN_MEMORY_BYTES = 8 * 1024 * 1024
"""Memory for a file that is inserted into; the rest is in a temporary file."""


async def fd_to_file(  # noqa: PLR0913 - the parameters of the call
    process: Process,
    *,
    fd: str | None = None,
    file_path: str,
    mode: str = "write",
    page: int | None = None,
    start_line: int | None = None,
    end_line: int | None = None,
    insert_at_line: int | None = None,
    create: bool = True,
    exist_ok: bool = True,
    name: str | None = None,
) -> bytes:
    """Write a content, a page or lines of it to a file."""
    found = process.table.find(fd, name)
    part = _part(found, Selector(page=page, start_line=start_line, end_line=end_line))
    if (insert_at_line is not None) != (mode == "insert"):
        text = "insert_at_line goes with mode insert, and only with it"
        raise FdError(INVALID_PARAMETER, text, fd=found.id)
    files = process.files
    if files is None:
        text = "Cannot write to file: no file system is there"
        raise FdError(FILE_OPERATION, text, fd=found.id)
    try:
        await _check(files, file_path, create=create, exist_ok=exist_ok)
        # Counting reads the content, which may fail: first, so that nothing is written.
        lines = await part.count_lines(process.threads)
        if mode == "insert":
            line = insert_at_line or 0
            room = process.shared.allowance
            size = await _insert(files, file_path, part, line, room)
        else:
            if create:
                _check_is_no_directory(file_path)
                await files.make_parents(file_path)
            put = files.replace if mode == "write" else files.append
            await put(file_path, part.pieces())
            size = part.size
    except OSError as why:
        raise _make_error(why, mode, file_path, found.id) from None
    except FdError as why:
        why.fd = found.id
        raise
    message = f"Content from {found.id} successfully written to {file_path}"
    attributes = (
        ("fd", found.id),
        ("file_path", file_path),
        ("success", True),
        ("mode", mode),
    )
    return fdxml.export_result(attributes, message, size, lines)


def _make_error(why: OSError, mode: str, path: str, fd: str) -> FdError:
    reason = os.strerror(why.errno) if why.errno else str(why)
    details = f"Operation: {mode}, Path: {path}"
    if isinstance(why, UnflushedError):
        details += (
            ". The new content stands there, whole, but the directory could not be put"
            " on the disk: after a crash of the machine the old one may be there again"
        )
    return FdError(FILE_OPERATION, f"Cannot write to file: {reason}", details, fd)


async def _check(files: Files, path: str, *, create: bool, exist_ok: bool) -> None:
    if "\0" in path or not path:
        raise FileNotFoundError(2, os.strerror(2))
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise FileNotFoundError(2, os.strerror(2)) from None
    if create and exist_ok:
        return
    there = await files.exists(path)
    if there and not exist_ok:
        raise FileExistsError(17, os.strerror(17))
    if not there and not create:
        raise FileNotFoundError(2, os.strerror(2))


def _check_is_no_directory(path: str) -> None:
    """Refuse a name that can only be a directory's, before its parents are made."""
    if os.path.basename(path) in ("", ".", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


class _Part:
    """The part of a content that is written."""

    def __init__(self, blob: Blob, start: int, end: int) -> None:
        self._blob = blob
        self._start = start
        self._end = end
        self.size = end - start
        self.ends_line = blob[end - 1 : end] == b"\n" if self.size else True

    async def count_lines(self, threads: trio.CapacityLimiter | None) -> int:
        """Return its number of lines; the last one counts also without an LF."""
        blob = self._blob
        if not blob.is_text:  # not counted yet
            count = await in_thread(
                _count_newlines, blob, self._start, self._end, share=threads
            )
        else:
            before = blob.index.newlines_before(blob, self._start)
            count = blob.index.newlines_before(blob, self._end) - before
        return count + (0 if self.ends_line else 1)

    def pieces(self) -> Iterator[bytes]:
        """Yield the part in pieces."""
        return self._blob.pieces(self._start, self._end, STEP_BYTES)


def _count_newlines(blob: Blob, start: int, end: int) -> int:
    return sum(piece.count(b"\n") for piece in blob.pieces(start, end, STEP_BYTES))


def _part(fd: LlmFd, wanted: Selector) -> _Part:
    if not wanted.kinds():
        blob = fd.content.original
        return _Part(blob, 0, blob.size)
    if fd.is_binary:
        text = "Binary content is written whole, without page or lines"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    span = select(fd, wanted).span
    return _Part(fd.content.text, span.start, span.end)


class _Finder:
    """Finds the start of a line in pieces of a file."""

    def __init__(self, line: int) -> None:
        self._left = line - 1
        self.size = 0
        self._last = b""
        self._lines = 0
        self.offset = 0 if line == 1 else -1

    def take(self, piece: bytes) -> None:
        """Search the next piece."""
        count = piece.count(b"\n")
        if self.offset < 0 and count >= self._left:
            at = -1
            for _ in range(self._left):
                at = piece.find(b"\n", at + 1)
            self.offset = self.size + at + 1
        else:
            self._left -= count
        self._lines += count
        self.size += len(piece)
        self._last = piece[-1:]

    def line_start(self, line: int) -> tuple[int, bool]:
        """Return the start of the line, and whether an LF is missing before it.

        Raises:
            FdError: ``invalid_parameter``: there is no such line.
        """
        unended = self._last not in {b"", b"\n"}
        total = self._lines + (1 if unended else 0)
        if not 1 <= line <= total + 1:
            text = f"Invalid insert_at_line. Valid range: 1-{total + 1}"
            raise FdError(INVALID_PARAMETER, text)
        if line == total + 1:
            return self.size, unended
        return self.offset, False


async def _insert(
    files: Files, path: str, part: _Part, line: int, allowance: Allowance | None
) -> int:
    """Insert a content before a line, with an LF that is missing between them.

    Returns:
        The number of its bytes, with an LF that is missing at its end.

    Raises:
        FdError: there is no such line, or the child has no room for a copy of the file.
    """
    finder = _Finder(max(line, 1))
    old = tempfile.SpooledTemporaryFile(OLD_IN_MEMORY_BYTES)  # noqa: SIM115 - see below

    def take(piece: bytes) -> None:
        if allowance is not None:
            allowance.take(len(piece))
        finder.take(piece)
        old.write(piece)

    try:
        await files.read(path, take)
        offset, adds_before = finder.line_start(line)
        size = finder.size
        adds_after = offset < size and not part.ends_line

        def pieces() -> Iterator[bytes]:
            old.seek(0)
            yield from _read(old, offset)
            if adds_before:
                yield b"\n"
            yield from part.pieces()
            if adds_after:
                yield b"\n"
            yield from _read(old, size - offset)

        await files.replace(path, pieces())
    finally:
        if allowance is not None:
            allowance.give_back(finder.size)
        if finder.size > OLD_IN_MEMORY_BYTES:
            in_background(_close, old)  # freeing a GiB takes 50 to 100 ms
        else:
            old.close()
    return part.size + (1 if adds_after else 0)


def _close(file: tempfile.SpooledTemporaryFile[bytes]) -> None:
    with contextlib.suppress(OSError):  # a full disk refuses the rest once more
        file.close()


def _read(file: tempfile.SpooledTemporaryFile[bytes], size: int) -> Iterator[bytes]:
    while size:
        piece = file.read(min(STEP_BYTES, size))
        yield piece
        size -= len(piece)
