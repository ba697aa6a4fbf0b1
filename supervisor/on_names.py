"""Requests about names: STAT, LIST, MKDIR, REMOVE, RENAME (spec X1)."""

from __future__ import annotations

import errno
import os
from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from protocol import echo, error, limits
from supervisor.replies import OK, UNAVAILABLE, Handler, denied, reason
from vfs.errors import AccessDeniedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol import messages as m
    from supervisor.session import Session

MAX_LIST_ENTRIES = 100_000
"""Most entries that one LIST answers: about 6 MiB of JSON."""


def named(
    word: str, verb: str, call: Callable[[Session, m.NameRequest], bytes]
) -> Handler:
    """Make the handler of a command about one name, with the contract's errors."""

    def handler(session: Session, request: m.NameRequest) -> bytes | None:
        try:
            return call(session, request)
        except AccessDeniedError:
            return denied(session, word, request.name)
        except UnavailableError:
            return UNAVAILABLE
        except OSError as why:
            name = echo(request.name)
            return error(b"failed to %b '%b': %b" % (verb.encode(), name, reason(why)))

    return handler


def body(document: object) -> bytes:
    """Return a reply whose body is a JSON document."""
    data = msgspec.json.encode(document)
    return b"OK %d\n%b" % (len(data), data)


def _stat(session: Session, request: m.NameRequest) -> bytes:
    status = session.fs.stat(session.client, request.name, claim=request.flag)
    return body({"size": status.size, "mtime_ns": status.mtime_ns, "kind": status.kind})


def do_list(session: Session, request: m.ListDir) -> bytes | None:
    """LIST (spec X1): a directory may be long, so it is read in a worker thread."""

    async def list_directory() -> bytes:
        try:
            entries = await session.fs.list_waiting(
                session.client,
                request.name,
                claim=request.flag,
                limit=MAX_LIST_ENTRIES,
            )
        except AccessDeniedError:
            return denied(session, "LIST", request.name)
        except UnavailableError:
            return UNAVAILABLE
        except OSError as why:
            name = echo(request.name)
            return error(b"failed to list '" + name + b"': " + reason(why))
        return body([{**_name_field(name), "kind": kind} for name, kind in entries])

    session.start(list_directory)
    return None


def _name_field(name: bytes) -> dict[str, str]:
    """Return a name for JSON: as text where it is UTF-8, else base64 (spec X1)."""
    try:
        return {"name": name.decode()}
    except UnicodeDecodeError:
        return {"name_b64": b64encode(name).decode()}


def _make(session: Session, request: m.NameRequest) -> bytes:
    session.fs.make_directory(session.client, request.name, claim=request.flag)
    return OK


def _remove(session: Session, request: m.NameRequest) -> bytes:
    session.fs.remove(session.client, request.name, claim=request.flag)
    return OK


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
        return denied(session, "RENAME", old)
    except UnavailableError:
        return UNAVAILABLE
    except OSError as why:
        return error(b"failed to rename '" + echo(old) + b"': " + reason(why))
    return OK


do_stat = named("STAT", "stat", _stat)
do_make = named("MKDIR", "make", _make)
do_remove = named("REMOVE", "remove", _remove)
