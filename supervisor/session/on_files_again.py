"""READ and WRITE once more: what answers a line that came before (ADR 15, 55).

Two things are made for such a line. ``again`` answers it once. ``row`` answers it for
as long as the same one comes, with nothing between the calls into the kernel that is
not needed for the next: that is how files are read and written, piece by piece.

Rule of this file: only what goes well is done here. Whatever else there is to say (the
end of the file, a disk to wait for, an error) the ordinary handler says.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from protocol import error
from supervisor.session.base import RECEIVE_BYTES
from supervisor.session.replies import reason
from vfs.hostio import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol import messages as m
    from supervisor.session.base import Row
    from supervisor.session.session import Session
    from vfs.filesystem import OpenFile

_read = os.read
_write = os.write
_yield_core = os.sched_yield


def read_again(
    session: Session,
    file: OpenFile,
    request: m.Read,
    otherwise: Callable[[Session, m.Read], bytes | None],
) -> Callable[[], bytes | None]:
    """Return what answers this READ again while its file stays open."""
    size, head = request.size, request.head
    pread, fd = file.handle.mount.read, file.handle.fd

    def again() -> bytes | None:
        offset = file.offset
        try:
            data = pread(fd, size, offset)
        except OSError:
            return otherwise(session, request)
        if len(data) != size:
            return otherwise(session, request)
        file.offset = offset + size
        return head + data

    return again


def read_row(  # noqa: C901 - the hot path, in one piece
    session: Session, file: OpenFile, request: m.Read, line: bytes
) -> Row:
    """Return what answers this READ for as long as its line comes (``Row``)."""
    size, head = request.size, request.head
    whole = len(head) + size
    pread, fd = file.handle.mount.read, file.handle.fd
    read_fd, write_fd = session.read_fd, session.write_fd

    def row(data: bytes, rounds: int) -> tuple[bytes | None, int]:
        offset, left = file.offset, rounds
        try:
            while data == line:
                try:
                    piece = pread(fd, size, offset)
                except OSError:
                    return data, left
                if len(piece) != size:
                    return data, left
                offset += size
                try:
                    sent = _write(write_fd, head + piece)
                except BlockingIOError:
                    sent = 0
                if sent != whole:
                    session.send_rest(line, head + piece, sent)
                    return None, left
                left -= 1
                if not left:
                    return None, 0
                _yield_core()
                try:
                    data = _read(read_fd, RECEIVE_BYTES)
                except BlockingIOError:
                    _yield_core()
                    data = _read(read_fd, RECEIVE_BYTES)
            return data, left
        finally:
            file.offset = offset
            session.count_row(line, rounds - left, len(line), whole)

    return row


def write_again(
    session: Session,
    file: OpenFile,
    request: m.Write,
    otherwise: Callable[[Session, m.Write, OpenFile, bytes], bytes | None],
) -> Callable[[bytes], bytes | None]:
    """Return what takes this WRITE's payload again while its file stays open."""
    size, head = request.size, request.head
    write, fd = file.handle.mount.write_page, file.handle.fd
    last_start = PAGE_BYTES - size

    def by_page(data: bytes) -> bytes | None:
        offset = file.offset
        if offset % PAGE_BYTES > last_start:
            return otherwise(session, request, file, data)
        try:
            done = write(fd, data, offset)  # type: ignore[misc]
        except OSError as why:
            return error(b"failed to write: " + reason(why))
        if done != size:
            return otherwise(session, request, file, data)
        file.offset = offset + size
        return head

    def by_handler(data: bytes) -> bytes | None:
        return otherwise(session, request, file, data)

    return by_handler if write is None or last_start < 0 else by_page


def write_row(  # noqa: C901 - the hot path, in one piece
    session: Session, file: OpenFile, request: m.Write
) -> Row | None:
    """Return what takes this WRITE for as long as its line comes (``Row``).

    Returns:
        None where ``write_again`` leaves it to the handler.
    """
    size, reply = request.size, request.head
    write, fd = file.handle.mount.write_page, file.handle.fd
    last_start = PAGE_BYTES - size
    if write is None or last_start < 0:
        return None
    line, whole = session.write_line, session.write_size
    read_fd, write_fd = session.read_fd, session.write_fd
    reply_size = len(reply)

    def row(  # noqa: C901 - see above
        data: bytes, rounds: int
    ) -> tuple[bytes | None, int]:
        offset, left = file.offset, rounds
        try:
            # Not `startswith` and a slice: they cost twice as much.
            while (
                len(data) == whole and len(payload := data.removeprefix(line)) == size
            ):
                if offset % PAGE_BYTES > last_start:
                    return data, left
                try:
                    done = write(fd, payload, offset)
                except OSError:
                    return data, left
                if done != size:
                    return data, left
                offset += size
                try:
                    sent = _write(write_fd, reply)
                except BlockingIOError:
                    sent = 0
                if sent != reply_size:
                    session.send_rest(data, reply, sent)
                    return None, left
                left -= 1
                if not left:
                    return None, 0
                _yield_core()
                try:
                    data = _read(read_fd, RECEIVE_BYTES)
                except BlockingIOError:
                    _yield_core()
                    data = _read(read_fd, RECEIVE_BYTES)
            return data, left
        finally:
            file.offset = offset
            session.count_row(line, rounds - left, whole, reply_size)

    return row
