"""What each request does: one straight function a command, and the table of them.

Rules of this file.

1. A handler looks up, checks, does, and returns the whole reply; or hands the rest to
   the session (``collect``, ``drain``, ``start``) and returns None.
2. Checks run in the contract's order; a payload is always taken off the line before an
   error is answered (spec W4).
3. READ and WRITE are the hot path: no logging, no allocation that a profile does not
   forgive.  Everything else may be plain.
4. No reply holds text of a peer, a file name or the system that ``echo`` has not seen
   (spec F6).
"""

from __future__ import annotations

import errno
import os
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from protocol import COMMANDS, echo, error, invalid, limits
from protocol import messages as m
from vfs.errors import AccessDeniedError, RightsError, UnavailableError
from vfs.hostio import INLINE_WRITE_BYTES, in_thread

if TYPE_CHECKING:
    from supervisor.session import Session
    from vfs.openfile import OpenFile

Handler = Callable[["Session", Any], bytes | None]
"""Takes the request class it stands under in ``HANDLERS``."""

SMALL_READ_BYTES = 65_536
"""Up to here a READ is copied through this process; above it the kernel moves it."""

MAX_LIST_ENTRIES = 100_000
"""Most entries that one LIST answers: about 6 MiB of JSON."""

_OK = b"OK\n"
_EMPTY_BODY = b"OK 0\n"
_NOT_READABLE = b"file not open for reading: "
_NOT_WRITABLE = b"file not open for writing: "


def _reason(why: OSError) -> bytes:
    """Return the system's text of an error, never a path (spec F6)."""
    return echo(os.strerror(why.errno or errno.EIO).encode())


def _unknown(request: m.FileRequest) -> bytes:
    return invalid("fileno", request.token)


# Files


def do_open(session: Session, request: m.Open) -> bytes | None:
    """OPEN (spec O1-O9)."""
    name = request.name
    try:
        file = session.fs.open(session.client, name, request.mode, request.flag)
    except AccessDeniedError:
        return _denied(session, "OPEN", name)
    except UnavailableError:
        return error(b"VFS not available")
    except OSError as why:
        return error(b"failed to open file '" + echo(name) + b"': " + _reason(why))
    return b"OK %d\n" % file.fileno


def _denied(session: Session, what: str, name: bytes) -> bytes:
    on_denied = session.fs.on_denied
    if on_denied is not None:
        on_denied(session.client, what, name)
    return error(b"VFS access denied: '" + echo(name) + b"'")


def do_read(session: Session, request: m.Read) -> bytes | None:
    """READ (spec R1-R3)."""
    file = session.files.get(request.fileno)
    if file is None:
        return invalid("fileno", request.token)
    if not file.mode.reads:
        return error(_NOT_READABLE + echo(request.token))
    size = request.size
    if size > SMALL_READ_BYTES:
        return _read_large(session, file, size)
    try:
        data = file.read(size)
    except BlockingIOError:
        session.start(partial(_read_waiting, session, file, size))
        return None
    except OSError as why:
        return error(b"failed to read: " + _reason(why))
    got = len(data)
    if got != size:
        return b"OK %d\n%b" % (got, data)
    if request is not session.last_request:
        session.last_request = request
    elif file.handle.fd >= 0:
        session.prepare_read(request, _read_again(session, file, request))
    return request.head + data


def _read_again(
    session: Session, file: OpenFile, request: m.Read
) -> Callable[[], bytes | None]:
    """Return what answers this READ again while its file stays open."""
    size, head = request.size, request.head
    pread, fd = file.handle.mount.read, file.handle.fd

    def again() -> bytes | None:
        offset = file.offset
        try:
            data = pread(fd, size, offset)
        except OSError:
            return do_read(session, request)
        if len(data) != size:
            return do_read(session, request)
        file.offset = offset + size
        return head + data

    return again


async def _read_waiting(session: Session, file: OpenFile, size: int) -> bytes:
    """Read data that is not in memory, in a worker thread."""
    try:
        data = await in_thread(file.read_wait, size)
    except OSError as why:
        return error(b"failed to read: " + _reason(why))
    return b"OK %d\n%b" % (len(data), data)


def _read_large(session: Session, file: OpenFile, size: int) -> bytes | None:
    """Answer a READ of more than ``SMALL_READ_BYTES``."""
    handle = file.handle
    try:
        size = min(size, limits.MAX_READ_BYTES, handle.size() - file.offset)
        if size <= SMALL_READ_BYTES:
            return do_read_small(session, file, max(size, 0))
        if handle.fd < 0:
            data = file.read(size)
            return b"OK %d\n%b" % (len(data), data)
    except OSError as why:
        return error(b"failed to read: " + _reason(why))
    return session.send_file(file, size)


def do_read_small(session: Session, file: OpenFile, size: int) -> bytes | None:
    """Answer a large READ of which little is left."""
    try:
        data = file.read(size)
    except BlockingIOError:
        session.start(partial(_read_waiting, session, file, size))
        return None
    return b"OK %d\n%b" % (len(data), data)


def do_write(session: Session, request: m.Write) -> bytes | None:
    """WRITE (spec W1-W6)."""
    size = request.size
    if size > session.max_write_bytes:
        text = b"%d exceeds limit %d" % (size, session.max_write_bytes)
        return session.drain(invalid("size", text))
    file = session.files.get(request.fileno)
    if file is None:
        return session.drain(_unknown(request))
    if not file.mode.writes:
        return session.drain(error(_NOT_WRITABLE + echo(request.token)))
    piece = session.conn.take_body()
    if len(piece) < size:
        return session.collect(piece, partial(_write_now, session, request, file))
    return _write_now(session, request, file, piece)


def _write_now(
    session: Session, request: m.Write, file: OpenFile, data: bytes | memoryview
) -> bytes | None:
    size = request.size
    handle = file.handle
    if session.zero_copy:
        session.start(partial(_write_after_read, session, file, data))
        return None
    if size > INLINE_WRITE_BYTES or file.durability == "write" or not file.handle.mount.inline:
        session.start(partial(_write_waiting, session, file, data))
        return None
    try:
        if file.is_plain:
            handle.pwrite(data, file.offset)
            file.offset += size
        else:
            session.fs.write(file, data)
    except OSError as why:
        return error(b"failed to write: " + _reason(why))
    if request is not session.last_request:
        session.last_request = request
    elif file.is_plain and handle.fd >= 0:
        session.prepare_write(request, _write_again(session, file, request))
    return request.head


def _write_again(
    session: Session, file: OpenFile, request: m.Write
) -> Callable[[bytes], bytes | None]:
    """Return what takes this WRITE's payload again while its file stays open."""
    size, head = request.size, request.head
    pwrite, mount = file.handle.pwrite, file.handle.mount

    def again(data: bytes) -> bytes | None:
        if session.zero_copy or not mount.inline:
            return _write_now(session, request, file, data)
        offset = file.offset
        try:
            pwrite(data, offset)
        except OSError as why:
            return error(b"failed to write: " + _reason(why))
        file.offset = offset + size
        return head

    return again


async def _write_after_read(
    session: Session, file: OpenFile, data: bytes | memoryview
) -> bytes:
    """Write once the client has taken what an earlier READ lent it.

    ``sendfile`` lends pages of the file, not copies: a WRITE that the client sent before
    it read that reply must not change what it will read.
    """
    await session.wait_taken()
    return await _write_waiting(session, file, data)


async def _write_waiting(
    session: Session, file: OpenFile, data: bytes | memoryview
) -> bytes:
    try:
        await session.fs.write_waiting(file, data)
    except OSError as why:
        return error(b"failed to write: " + _reason(why))
    return b"OK %d\n" % len(data)


def do_close(session: Session, request: m.Close) -> bytes | None:
    """CLOSE (spec C1)."""
    file = session.files.get(request.fileno)
    if file is None:
        return _unknown(request)
    session.forget_prepared()
    if not file.is_plain and not file.closes_inline:
        session.start(partial(_close_waiting, session, file))
        return None
    try:
        session.fs.close(file)
    except OSError as why:
        return error(b"failed to close: " + _reason(why))
    return _OK


async def _close_waiting(session: Session, file: OpenFile) -> bytes:
    try:
        await session.fs.close_waiting(file)
    except OSError as why:
        return error(b"failed to close: " + _reason(why))
    return _OK


def do_seek(session: Session, request: m.Seek) -> bytes | None:
    """SEEK (spec X1)."""
    file = session.files.get(request.fileno)
    if file is None:
        return _unknown(request)
    file.offset = request.size
    return b"OK %d\n" % request.size


def do_sync(session: Session, request: m.Sync) -> bytes | None:
    """SYNC (spec X1)."""
    file = session.files.get(request.fileno)
    if file is None:
        return _unknown(request)

    async def sync() -> bytes:
        try:
            await in_thread(file.handle.sync)
        except OSError as why:
            return error(b"failed to sync: " + _reason(why))
        return _OK

    session.start(sync)
    return None


def do_truncate(session: Session, request: m.Truncate) -> bytes | None:
    """TRUNCATE (spec X1)."""
    file = session.files.get(request.fileno)
    if file is None:
        return _unknown(request)
    if not file.mode.writes:
        return error(_NOT_WRITABLE + echo(request.token))

    async def truncate() -> bytes:
        await session.wait_taken()
        try:
            session.fs.truncate(file, request.size)
        except OSError as why:
            return error(b"failed to truncate: " + _reason(why))
        return _OK

    session.start(truncate)
    return None


# Names


def _named(
    word: str, verb: str, call: Callable[[Session, m.NameRequest], bytes]
) -> Handler:
    """Make the handler of a command about one name, with the contract's errors."""

    def handler(session: Session, request: m.NameRequest) -> bytes | None:
        try:
            return call(session, request)
        except AccessDeniedError:
            return _denied(session, word, request.name)
        except UnavailableError:
            return error(b"VFS not available")
        except OSError as why:
            name = echo(request.name)
            return error(b"failed to %b '%b': %b" % (verb.encode(), name, _reason(why)))

    return handler


def _body(document: object) -> bytes:
    data = msgspec.json.encode(document)
    return b"OK %d\n%b" % (len(data), data)


def _stat(session: Session, request: m.NameRequest) -> bytes:
    status = session.fs.stat(session.client, request.name, claim=request.flag)
    return _body(
        {"size": status.size, "mtime_ns": status.mtime_ns, "kind": status.kind}
    )


def _list(session: Session, request: m.NameRequest) -> bytes:
    entries = session.fs.list(session.client, request.name, claim=request.flag)
    if len(entries) > MAX_LIST_ENTRIES:
        raise OSError(errno.EOVERFLOW, os.strerror(errno.EOVERFLOW))
    return _body([{**_name_field(name), "kind": kind} for name, kind in entries])


def _name_field(name: bytes) -> dict[str, str]:
    """Return a name for JSON: as text where it is UTF-8, else base64 (spec X1)."""
    try:
        return {"name": name.decode()}
    except UnicodeDecodeError:
        return {"name_b64": b64encode(name).decode()}


def _make(session: Session, request: m.NameRequest) -> bytes:
    session.fs.make_directory(session.client, request.name, claim=request.flag)
    return _OK


def _remove(session: Session, request: m.NameRequest) -> bytes:
    session.fs.remove(session.client, request.name, claim=request.flag)
    return _OK


def do_rename(session: Session, request: m.Rename) -> bytes | None:
    """RENAME (spec X1)."""
    if request.body > limits.MAX_NAMES_BYTES:
        reason = os.strerror(errno.ENAMETOOLONG).encode()
        return session.drain(error(b"failed to rename: " + reason))
    return session.collect(
        session.conn.take_body(), partial(_rename_now, session, request)
    )


def _rename_now(
    session: Session, request: m.Rename, names: bytes | memoryview
) -> bytes | None:
    old = bytes(names[: request.old_length])
    new = bytes(names[request.old_length :])
    if not old or not new:
        return error(b"RENAME requires two names")
    try:
        session.fs.rename(session.client, old, new, claim=request.flag)
    except AccessDeniedError:
        return _denied(session, "RENAME", old)
    except UnavailableError:
        return error(b"VFS not available")
    except OSError as why:
        return error(b"failed to rename '" + echo(old) + b"': " + _reason(why))
    return _OK


# The connection itself


def do_ping(session: Session, request: m.Request) -> bytes | None:
    """PING (spec X1)."""
    del session, request
    return _OK


def do_caps(session: Session, request: m.Request) -> bytes | None:
    """CAPS (spec X1)."""
    del request
    policy = session.client.policy
    grants = [
        {
            "name": os.fsdecode(place.prefixes[0]),
            "read": place.read,
            "write": place.write,
        }
        for place in policy.places
        if place.prefixes and place is not policy.root
    ]
    rights = {"top_level": policy.top_level, "grants": grants}
    bounds = {
        "line": limits.MAX_LINE_BYTES,
        "read": limits.MAX_READ_BYTES,
        "write": session.max_write_bytes,
    }
    return _body(
        {
            "version": 2,
            "commands": sorted(word.decode() for word in COMMANDS),
            "limits": bounds,
            "rights": rights,
        }
    )


def do_attach(session: Session, request: m.Request) -> bytes | None:
    """ATTACH (spec N4)."""
    del request
    if session.on_attach is None:
        return error(b"ATTACH not available")
    session.start(partial(session.on_attach, session))
    return None


def do_narrow(session: Session, request: m.Request) -> bytes | None:
    """NARROW (spec A5)."""
    if request.body > limits.MAX_NARROW_BYTES:
        text = b"%d exceeds limit %d" % (request.body, limits.MAX_NARROW_BYTES)
        return session.drain(invalid("size", text))
    return session.collect(session.conn.take_body(), partial(_narrow_now, session))


def _narrow_now(session: Session, document: bytes | memoryview) -> bytes | None:
    try:
        session.narrow(bytes(document))
    except RightsError as why:
        return error(b"invalid rights: " + echo(str(why).encode()))
    return _OK


# The model


def do_chat(session: Session, request: m.Chat) -> bytes | None:
    """LLM_CHAT on a host without an LLM section (spec L12)."""
    return session.collect(
        session.conn.take_body(), partial(_chat_without_model, session, request)
    )


def _chat_without_model(
    session: Session, request: m.Chat, body: bytes | memoryview
) -> bytes | None:
    first = request.inputs
    second = first + request.outputs + 1
    third = second + request.prompt + 1
    # Three separators that the counts leave out are tolerated exactly so (spec L1).
    if request.preset >= 3 and all(body[i] == 10 for i in (first, second, third)):
        session.conn.extend_body(3)
    return session.drain(error(b"LLM not available"))


def _answer(text: bytes) -> Handler:
    line = error(text)

    def handler(session: Session, request: m.Request) -> bytes | None:
        return session.drain(line) if request.body else line

    return handler


def do_refuse(session: Session, request: m.Refusal) -> bytes | None:
    """A line that did not parse: its error, after what must come first."""
    token = request.token
    reply = request.reply
    if token is not None and int(token) not in session.files:
        reply = invalid("fileno", token)
    return session.drain(reply) if request.body else reply


HANDLERS: dict[type[m.Request], Handler] = {
    m.Open: do_open,
    m.Read: do_read,
    m.Write: do_write,
    m.Close: do_close,
    m.Seek: do_seek,
    m.Sync: do_sync,
    m.Truncate: do_truncate,
    m.Stat: _named("STAT", "stat", _stat),
    m.ListDir: _named("LIST", "list", _list),
    m.MakeDir: _named("MKDIR", "make", _make),
    m.Remove: _named("REMOVE", "remove", _remove),
    m.Rename: do_rename,
    m.Ping: do_ping,
    m.Caps: do_caps,
    m.Attach: do_attach,
    m.Narrow: do_narrow,
    m.Chat: do_chat,
    m.Quota: _answer(b"LLM quota not available"),
    m.Config: _answer(b"LLM config not available"),
    m.FdCall: _answer(b"LLM fds not available"),
    m.FdPut: _answer(b"LLM fds not available"),
    m.Refusal: do_refuse,
}
"""The table: request class to handler."""

POSTHUMOUS = frozenset({m.Open, m.Read, m.Write, m.Close, m.Sync})
"""What is still done for a process that has ended (spec S2)."""
