"""Requests about names: STAT, LIST, MKDIR, REMOVE, RENAME (spec X1).

Slow work is done in a worker thread: reading a long directory, and freeing the blocks
of a long file, which REMOVE and RENAME may do.
"""

from __future__ import annotations

import errno
import os
from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hostlib.threads import in_thread
from protocol import echo, error, limits
from supervisor.fsproxy.replies import (
    OK,
    denied,
    reason,
    refuse_fenced,
    unavailable,
)
from vfs import names
from vfs.errors import AccessDeniedError, TargetDeniedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from protocol import messages as m
    from supervisor.fsproxy.session import Handler, Session
    from vfs.backends import FileStatus


LISTED_BYTES = 500
"""Memory for a listed directory entry: its name, twice, as an object and as JSON
(attack 42)."""


def name_handler(
    word: str, verb: str, call: Callable[[Session, m.NameRequest], Awaitable[bytes]]
) -> Handler:
    """Return the handler of a command about one name that is a job."""

    async def work(session: Session, request: m.NameRequest) -> bytes:
        try:
            return await call(session, request)
        except (AccessDeniedError, UnavailableError, OSError) as why:
            return _failure(session, (word, verb, request.name, request.flag), why)

    def handler(session: Session, request: m.NameRequest) -> bytes | None:
        session.start(partial(work, session, request))
        return None

    return handler


def _failure(
    session: Session, asked: tuple[str, str, bytes, bool], why: Exception
) -> bytes:
    """Return the error.

    Args:
        session: got the request.
        asked: (the command, its verb, the name, the claim).
        why: the exception.
    """
    word, verb, name, claim = asked
    if isinstance(why, AccessDeniedError):
        return denied(session, word, name)
    if isinstance(why, OSError):
        text = (verb.encode(), echo(name), reason(why))
        return error(b"failed to %b '%b': %b" % text)
    return unavailable(session, word, name, claim)


def body(document: object) -> bytes:
    """Return a reply whose body is a JSON document."""
    data = msgspec.json.encode(document)
    return b"OK %d\n%b" % (len(data), data)


def do_stat(session: Session, request: m.Stat) -> bytes | None:
    """STAT (spec X1); a job only where a place is distant."""
    if session.client.policy.is_distant:
        return _stat_waiting(session, request)
    try:
        status = names.stat(session.client, request.name, claim=request.flag)
    except (AccessDeniedError, UnavailableError, OSError) as why:
        return _failure(session, ("STAT", "stat", request.name, request.flag), why)
    return _status(status)


async def _stat(session: Session, request: m.NameRequest) -> bytes:
    status = await names.stat_waiting(session.client, request.name, claim=request.flag)
    return _status(status)


def _status(status: FileStatus) -> bytes:
    return body(status._asdict())


async def _list(session: Session, request: m.NameRequest) -> bytes:
    most = limits.MAX_LIST_ENTRIES
    entries = await names.list_waiting(
        session.client, request.name, claim=request.flag, limit=most
    )
    session.reserved_memory().add(LISTED_BYTES * len(entries))
    # Freed here: that takes 10 ms for as many as there may be.
    held = [entries]
    del entries
    return await in_thread(_listing, held, share=session.client.ledger.threads)


def _listing(held: list[list[tuple[bytes, str]]]) -> bytes:
    entries = held.pop()
    return body([{**name_field(name), "kind": kind} for name, kind in entries])


def name_field(name: bytes) -> dict[str, str]:
    """Return a name for JSON: as text where it is UTF-8, else base64 (spec X1)."""
    try:
        return {"name": name.decode()}
    except UnicodeDecodeError:
        return {"name_b64": b64encode(name).decode()}


async def _make(session: Session, request: m.NameRequest) -> bytes:
    refusal = refuse_fenced(session.check_effect)
    if refusal is not None:
        return refusal
    await names.make_directory_waiting(session.client, request.name, claim=request.flag)
    return OK


async def _remove(session: Session, request: m.NameRequest) -> bytes:
    refusal = refuse_fenced(session.check_effect)
    if refusal is not None:
        return refusal
    await names.remove_waiting(session.client, request.name, claim=request.flag)
    return OK


def do_rename(session: Session, request: m.Rename) -> bytes | None:
    """RENAME (spec X1)."""
    if request.body > limits.MAX_NAMES_BYTES:
        reason = os.strerror(errno.ENAMETOOLONG).encode()
        return session.inbound.drain(error(b"failed to rename: " + reason))
    return session.inbound.collect(
        session.conn.take_body(), partial(_rename_now, session, request)
    )


def _rename_now(
    session: Session, request: m.Rename, names: bytes | memoryview
) -> bytes | None:
    old = bytes(names[: request.old_length])
    new = bytes(names[request.old_length :])
    if not old or not new:
        return error(b"RENAME requires two names")
    session.start(partial(_rename_waiting, session, old, new, request.flag))
    return None


async def _rename_waiting(
    session: Session, old: bytes, new: bytes, claim: bool
) -> bytes:
    refusal = refuse_fenced(session.check_effect)
    if refusal is not None:
        return refusal
    try:
        await names.rename_waiting(session.client, old, new, claim=claim)
    except (AccessDeniedError, UnavailableError, OSError) as why:
        name = new if isinstance(why, TargetDeniedError) else old
        return _failure(session, ("RENAME", "rename", name, claim), why)
    return OK


_stat_waiting = name_handler("STAT", "stat", _stat)
do_list = name_handler("LIST", "list", _list)
do_make = name_handler("MKDIR", "make", _make)
do_remove = name_handler("REMOVE", "remove", _remove)
