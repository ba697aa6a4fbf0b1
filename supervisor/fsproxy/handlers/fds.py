"""Requests about LLM fds: FD_CALL and FD_PUT.

A tool's error is an answer: its ``fd_error`` comes with OK. ERROR is for requests that
are no calls. Long work of a call is a job, and ends with its client if no other client
depends on it (spec L10).
"""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from hostlib.footprint import document_bytes
from hostlib.threads import in_thread
from protocol import echo, error, invalid, limits
from supervisor.fsproxy.ports import INLINE_BYTES, LEAVE_S, ContentError
from supervisor.fsproxy.replies import no_memory_error

if TYPE_CHECKING:
    from protocol import messages as m
    from supervisor.fsproxy.ports import ContentCalls, Contents
    from supervisor.fsproxy.session import Session

FORMS = 2
"""Copies of a call's text beside the decoded one: the received one, and the content
that is made of it."""

MOST_DIGITS = 1000
"""Longest number in a call: far more digits than any parameter needs."""

UNAVAILABLE = error(b"LLM fds not available")


def do_fd_call(session: Session, request: m.FdCall) -> bytes | None:
    """FD_CALL: one call of a tool."""
    service = session.services.fds
    if service is None:
        return session.inbound.drain(UNAVAILABLE)
    if request.size > session.max_write_bytes:
        return session.inbound.drain(_too_large(session, request.size))
    try:
        session.reserved_memory().resize((FORMS + 2) * request.size)
    except OSError as why:
        return session.inbound.drain(no_memory_error(why))
    piece = session.conn.take_body()
    return session.inbound.collect(piece, partial(_begin_call, session, service))


def _too_large(session: Session, size: int) -> bytes:
    return invalid("size", b"%d exceeds limit %d" % (size, session.max_write_bytes))


def _begin_call(
    session: Session, service: Contents, document: bytes | memoryview
) -> None:
    # A view of the payload in a job would keep its memory.
    data = bytes(document) if len(document) <= INLINE_BYTES else None
    session.start(partial(_call, session, service, data))


async def _call(
    session: Session, service: Contents, document: bytes | None
) -> bytes | None:
    threads = session.client.ledger.threads
    try:
        if document is None:
            taken, size = await in_thread(_measure_document, session, share=threads)
            session.inbound.release_payload()
            session.reserved_memory().raise_to(FORMS * len(taken) + size)
            name, arguments = await in_thread(parse_call, taken, share=threads)
            del taken  # its other parts are the arguments
        else:
            session.inbound.release_payload()
            size = document_bytes(document, len(document))
            session.reserved_memory().raise_to(FORMS * len(document) + size)
            name, arguments = parse_call(document)
        process = service.process_of(session.client)
        if not process.is_for_caller_alone(name):
            answer = await process.call(name, **arguments)
        else:
            with session.while_connected(LEAVE_S) as scope:
                # For a client that is gone nothing begins (spec L10).
                await trio.lowlevel.checkpoint_if_cancelled()
                answer = await process.call(name, **arguments)
            if scope.cancelled_caught:
                return None
        session.reserved_memory().add(2 * len(answer))
    except (ContentError, ValueError) as why:
        text = str(why)[: limits.MAX_ECHO_BYTES]  # before it is encoded: attack 43
        return error(b"invalid fd call: " + echo(text.encode(errors="replace")))
    except BlockingIOError as why:  # no thread can be started
        text = f"Cannot work on content: {os.strerror(why.errno or 0)}"
        return error(b"invalid fd call: " + echo(text.encode()))
    except OSError as why:
        if why.errno != errno.ENOMEM:
            raise
        return no_memory_error(why)
    return b"OK %d\n%b" % (len(answer), answer)


def _measure_document(session: Session) -> tuple[bytes, int]:
    """Return the received document, and its size once it is decoded.

    Raises:
        ValueError: it has too many values.
    """
    document = session.inbound.call_with_payload(bytes)
    return document, decoded_size(document)


def decoded_size(document: bytes) -> int:
    """Return the bytes that a call takes once it is decoded."""
    from hostlib.documents import MOST_VALUES, check_values  # noqa: PLC0415 - only for FD_CALL

    check_values(document, "put long content in with FD_PUT")
    return document_bytes(document, MOST_VALUES)


def parse_call(document: bytes) -> tuple[str, dict[str, object]]:
    """Return the name and the arguments of a call.

    Raises:
        ValueError: it is no call; the text has the reason.
    """
    try:
        call = _decode(document)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError as why:
        raise ValueError(f"not JSON: {why}") from None
    match call:
        case {"name": str(name), **rest} if not set(rest) - {"arguments"}:
            arguments = rest.get("arguments")
            if arguments is None:
                return name, {}
            if isinstance(arguments, dict):
                return name, arguments
    raise ValueError('write {"name": TEXT, "arguments": OBJECT}')


def _decode(document: bytes) -> object:
    if len(document) <= INLINE_BYTES:
        return _load(document)
    try:
        return msgspec.json.decode(document)
    except msgspec.DecodeError:
        return _load(document)  # names the fault, and accepts unusual JSON


def _load(document: bytes) -> object:
    return json.loads(document, parse_int=_integer, parse_float=_float)


def _integer(digits: str) -> int:
    return int(_short(digits))


def _float(digits: str) -> float:
    return float(_short(digits))


def _short(digits: str) -> str:
    """Return a number's digits if they are few enough (attack 43)."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"a number of {len(digits)} digits; write {MOST_DIGITS} at most"
        )
    return digits


def do_fd_put(session: Session, request: m.FdPut) -> bytes | None:
    """FD_PUT: a piece of content."""
    service = session.services.fds
    if service is None:
        return session.inbound.drain(UNAVAILABLE)
    if request.size > session.max_write_bytes:
        return session.inbound.drain(_too_large(session, request.size))
    process = service.process_of(session.client)
    token = None if request.token is None else request.token.decode(errors="replace")
    if token is not None and not process.has_begun(token):
        return session.inbound.drain(invalid("token", request.token or b""))
    piece = session.conn.take_body()
    return session.inbound.collect(piece, partial(_begin_put, session, process, token))


def _begin_put(
    session: Session,
    process: ContentCalls,
    token: str | None,
    piece: bytes | memoryview,
) -> None:
    session.start(partial(_put, process, token, piece))


async def _put(
    process: ContentCalls, token: str | None, piece: bytes | memoryview
) -> bytes:
    try:
        token = await process.put(token, piece)
    except ContentError as why:
        return error(b"failed to put: " + echo(str(why).encode()))
    return b"OK %b\n" % token.encode()
