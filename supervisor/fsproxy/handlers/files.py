"""Requests about open files: OPEN, READ, WRITE, CLOSE, SEEK, SYNC, TRUNCATE.

READ and WRITE are the hot path: no logging, no allocation that a profile does not
forgive. A request that would wait becomes a job of the session.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hostlib.threads import in_thread
from protocol import echo, error, invalid, limits
from supervisor.fsproxy.replies import (
    NOT_READABLE,
    NOT_WRITABLE,
    OK,
    denied,
    reason,
    refuse_fenced,
    unavailable,
    unknown,
)
from vfs import names
from vfs.errors import AccessDeniedError, UnavailableError
from vfs.ledger import must_wait
from vfs.mounts import INLINE_WRITE_BYTES

if TYPE_CHECKING:
    from protocol import messages as m
    from supervisor.fsproxy.session import Session
    from vfs.clients import OpenFile

SMALL_READ_BYTES = 65_536
"""Largest READ that is copied through this process; the kernel moves larger ones."""


NEITHER = (b"r", b"r+")
"""The modes that neither create nor empty a file."""


def do_open(session: Session, request: m.Open) -> bytes | None:
    """OPEN (spec O1-O9)."""
    name = request.name
    client = session.client
    policy = client.policy
    if session.check_effect is not None and request.mode not in NEITHER:
        refusal = refuse_fenced(session.check_effect)
        if refusal is not None:
            return refusal
    if policy.is_distant and not (policy.top_level and request.flag):
        session.start(partial(_open_distant, session, request))
        return None
    turn = client.ledger.turn
    if turn is not None and turn.is_taken and request.mode not in NEITHER:
        session.start(partial(_open_in_turn, session, request))
        return None
    try:
        file = session.fs.open(client, name, request.mode, request.flag)
    except (AccessDeniedError, UnavailableError, OSError) as why:
        return _open_error(session, request, why)
    if file.must_empty:
        session.start(partial(_open_waiting, session, file))
        return None
    return b"OK %d\n" % file.fileno


def _open_error(session: Session, request: m.Open, why: Exception) -> bytes:
    name = request.name
    if isinstance(why, AccessDeniedError):
        return denied(session, "OPEN", name)
    if isinstance(why, OSError):
        return error(b"failed to open file '" + echo(name) + b"': " + reason(why))
    return unavailable(session, "OPEN", name, request.flag)


async def _open_distant(session: Session, request: m.Open) -> bytes:
    """Open a file on a file system that may wait for another machine."""
    try:
        await names.wait_reachable(session.client, request.name)
    except OSError as why:  # no thread can be started
        return _open_error(session, request, why)
    return await _open_in_turn(session, request)


async def _open_in_turn(session: Session, request: m.Open) -> bytes:
    """Open when no other client changes the counted bounds (``hostlib.fairness``)."""
    open_waiting = session.fs.open_waiting
    name, mode, claim = request.name, request.mode, request.flag
    try:
        file = await open_waiting(session.client, name, mode, claim)
    except (AccessDeniedError, UnavailableError, OSError) as why:
        return _open_error(session, request, why)
    return b"OK %d\n" % file.fileno


async def _open_waiting(session: Session, file: OpenFile) -> bytes:
    """Finish an OPEN that truncates a long file."""
    try:
        await session.fs.empty_waiting(file)
    except OSError as why:
        name = echo(file.name)
        return error(b"failed to open file '" + name + b"': " + reason(why))
    return b"OK %d\n" % file.fileno


def do_read(  # noqa: PLR0911 - the hot path, in one piece
    session: Session, request: m.Read
) -> bytes | None:
    """READ (spec R1-R3)."""
    file = session.files.get(request.fileno)
    if file is None:
        return invalid("fileno", request.token)
    if not file.mode.reads:
        return error(NOT_READABLE + echo(request.token))
    size = request.size
    if size > SMALL_READ_BYTES:
        return _read_large(session, file, size)
    try:
        data = file.read(size)
    except BlockingIOError:
        session.start(partial(_read_waiting, session, file, size))
        return None
    except OSError as why:
        return error(b"failed to read: " + reason(why))
    if len(data) == size:
        return request.head + data
    return b"OK %d\n" % len(data) + data


async def _read_waiting(session: Session, file: OpenFile, size: int) -> bytes:
    """Read data that is not in memory, in a worker thread."""
    try:
        threads = session.client.ledger.threads
        data = await in_thread(file.read_wait, size, share=threads)
    except OSError as why:
        return error(b"failed to read: " + reason(why))
    return b"OK %d\n" % len(data) + data


def _read_large(session: Session, file: OpenFile, size: int) -> bytes | None:
    """Answer a READ of more than ``SMALL_READ_BYTES``."""
    handle = file.handle
    if handle.mount.is_distant:
        size = min(size, limits.MAX_READ_BYTES)
        session.start(partial(_read_waiting, session, file, size))
        return None
    try:
        size = min(size, limits.MAX_READ_BYTES, handle.size() - file.offset)
        if size <= SMALL_READ_BYTES:
            # Not `size`: files of procfs have size 0 and content.
            return _read_small(session, file, SMALL_READ_BYTES)
        if handle.fd < 0:
            data = file.read(size)
            return b"OK %d\n" % len(data) + data
    except OSError as why:
        return error(b"failed to read: " + reason(why))
    return session.send_file(file, size)


def _read_small(session: Session, file: OpenFile, size: int) -> bytes | None:
    """Answer a large READ with few bytes left."""
    try:
        data = file.read(size)
    except BlockingIOError:
        session.start(partial(_read_waiting, session, file, size))
        return None
    return b"OK %d\n" % len(data) + data


def do_write(session: Session, request: m.Write) -> bytes | None:
    """WRITE (spec W1-W6)."""
    size = request.size
    if size > session.max_write_bytes:
        text = b"%d exceeds limit %d" % (size, session.max_write_bytes)
        return session.inbound.drain(invalid("size", text))
    file = session.files.get(request.fileno)
    if file is None:
        return session.inbound.drain(unknown(request))
    if not file.mode.writes:
        return session.inbound.drain(error(NOT_WRITABLE + echo(request.token)))
    piece = session.conn.take_body()
    if len(piece) < size:
        if file.ledger is not None and not file.handle.mount.is_distant:
            # Reserved from here on, and given back in any case.
            try:
                session.inbound.reserved = file, file.charge_growth(size)
            except OSError as why:
                return session.inbound.drain(error(b"failed to write: " + reason(why)))
        return session.inbound.collect(
            piece, partial(_write_now, session, request, file)
        )
    return _write_now(session, request, file, piece)


def _write_now(
    session: Session, request: m.Write, file: OpenFile, data: bytes | memoryview
) -> bytes | None:
    size = request.size
    handle = file.handle
    if session.check_effect is not None:
        refusal = refuse_fenced(session.check_effect)
        if refusal is not None:
            return refusal
    if session.outbound.zero_copy:
        session.start(partial(_write_after_read, session, file, data))
        return None
    if (
        size > INLINE_WRITE_BYTES
        or file.durability == "write"
        or not file.handle.mount.inline
    ):
        session.start(partial(_write_waiting, session, file, data))
        return None
    try:
        if file.is_plain:
            handle.pwrite(data, file.offset)
            file.offset += size
        elif must_wait(file.ledger):
            session.start(partial(_write_waiting, session, file, data))
            return None
        else:
            session.inbound.release_growth()
            session.fs.write(file, data)
    except OSError as why:
        return error(b"failed to write: " + reason(why))
    return request.head


async def _write_after_read(
    session: Session, file: OpenFile, data: bytes | memoryview
) -> bytes:
    """Write once the client has taken the pages that an earlier READ has lent.

    ``sendfile`` lends pages of the file, not copies: a WRITE sent before the reply was
    read must not change the reply.
    """
    await session.outbound.wait_taken(
        lambda: b"WRITE %d %d\n%b" % (file.fileno, len(data), bytes(data))
    )
    return await _write_waiting(session, file, data)


async def _write_waiting(
    session: Session, file: OpenFile, data: bytes | memoryview
) -> bytes:
    refusal = refuse_fenced(session.check_effect)
    if refusal is not None:
        return refusal
    try:
        # The reservation of its header is charged again before this waits.
        await session.fs.write_waiting(file, data, session.inbound.release_growth)
    except OSError as why:
        return error(b"failed to write: " + reason(why))
    return b"OK %d\n" % len(data)


def do_close(session: Session, request: m.Close) -> bytes | None:
    """CLOSE (spec C1)."""
    file = session.files.get(request.fileno)
    if file is None:
        return unknown(request)
    if session.check_effect is not None:
        refusal = refuse_fenced(session.check_effect)
        if refusal is not None:
            return refusal
    if not file.closes_inline:
        session.start(partial(_close_waiting, session, file))
        return None
    try:
        session.fs.close(file)
    except OSError as why:
        return error(b"failed to close: " + reason(why))
    return OK


async def _close_waiting(session: Session, file: OpenFile) -> bytes:
    try:
        await session.fs.close_waiting(file)
    except OSError as why:
        return error(b"failed to close: " + reason(why))
    return OK


def do_seek(session: Session, request: m.Seek) -> bytes | None:
    """SEEK (spec X1)."""
    file = session.files.get(request.fileno)
    if file is None:
        return unknown(request)
    file.offset = request.size
    return b"OK %d\n" % request.size


def do_sync(session: Session, request: m.Sync) -> bytes | None:
    """SYNC (spec X1)."""
    file = session.files.get(request.fileno)
    if file is None:
        return unknown(request)

    async def sync() -> bytes:
        try:
            await in_thread(file.handle.sync, share=session.client.ledger.threads)
        except OSError as why:
            return error(b"failed to sync: " + reason(why))
        return OK

    session.start(sync)
    return None


def do_truncate(session: Session, request: m.Truncate) -> bytes | None:
    """TRUNCATE (spec X1)."""
    file = session.files.get(request.fileno)
    if file is None:
        return unknown(request)
    if not file.mode.writes:
        return error(NOT_WRITABLE + echo(request.token))

    async def truncate() -> bytes:
        await session.outbound.wait_taken(
            lambda: b"TRUNCATE %d %d\n" % (file.fileno, request.size)
        )
        refusal = refuse_fenced(session.check_effect)
        if refusal is not None:
            return refusal
        try:
            await session.fs.truncate_waiting(file, request.size)
        except OSError as why:
            return error(b"failed to truncate: " + reason(why))
        return OK

    session.start(truncate)
    return None
