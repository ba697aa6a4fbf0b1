"""Requests about LLM fds: FD_CALL and FD_PUT.

A tool that reports an error has answered all the same: its ``fd_error`` comes with OK.
ERROR is for what is no call at all.  What a call takes long for happens in a job, and
ends with its client where nobody else has anything of it (spec L10).
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from protocol import echo, error, invalid
from supervisor.session.on_llm import LEAVE_S

if TYPE_CHECKING:
    from protocol import messages as m
    from supervisor.fds.service import FdService
    from supervisor.session.session import Session
    from vfs.content import Process

UNAVAILABLE = error(b"LLM fds not available")

INLINE_BYTES = 64 * 1024
"""Longest document or piece that is taken apart in the Trio thread."""


def do_fd_call(session: Session, request: m.FdCall) -> bytes | None:
    """FD_CALL: one call of a tool."""
    service = session.services.fds
    if service is None:
        return session.drain(UNAVAILABLE)
    if request.size > session.max_write_bytes:
        return session.drain(_too_large(session, request.size))
    piece = session.conn.take_body()
    return session.collect(piece, partial(_begin_call, session, service))


def _too_large(session: Session, size: int) -> bytes:
    return invalid("size", b"%d exceeds limit %d" % (size, session.max_write_bytes))


def _begin_call(
    session: Session, service: FdService, document: bytes | memoryview
) -> None:
    session.start(partial(_call, session, service, bytes(document)))


async def _call(session: Session, service: FdService, document: bytes) -> bytes | None:
    # Here, so that a host without LLM fds loads nothing of them.
    from vfs.content import FdError, UnknownCallError  # noqa: PLC0415
    from vfs.content.long_calls import is_for_caller_alone  # noqa: PLC0415
    from vfs.content.threads import in_thread  # noqa: PLC0415

    threads = session.client.ledger.threads
    try:
        if len(document) > INLINE_BYTES:
            name, arguments = await in_thread(_parse, document, share=threads)
        else:
            name, arguments = _parse(document)
        process = service.process_of(session.client)
        if not is_for_caller_alone(process, name):
            answer = await process.call(name, **arguments)
        else:
            with session.while_connected(LEAVE_S) as scope:
                # For who is gone nothing begins (spec L10).
                await trio.lowlevel.checkpoint_if_cancelled()
                answer = await process.call(name, **arguments)
            if scope.cancelled_caught:
                return None
    except (UnknownCallError, ValueError, FdError) as why:
        return error(b"invalid fd call: " + echo(str(why).encode(errors="replace")))
    return b"OK %d\n%b" % (len(answer), answer)


def _parse(document: bytes) -> tuple[str, dict[str, object]]:
    """Return the name and the arguments of a call.

    Raises:
        ValueError: it is none; the text says why.
    """
    try:
        call = _decoded(document)
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


def _decoded(document: bytes) -> object:
    if len(document) <= INLINE_BYTES:
        return json.loads(document)
    from supervisor.documents import check_values  # noqa: PLC0415 - see _call

    check_values(document, "put long content in with FD_PUT")
    try:
        return msgspec.json.decode(document)
    except msgspec.DecodeError:
        return json.loads(document)  # says what is wrong, and takes what is odd


def do_fd_put(session: Session, request: m.FdPut) -> bytes | None:
    """FD_PUT: a piece of content."""
    service = session.services.fds
    if service is None:
        return session.drain(UNAVAILABLE)
    if request.size > session.max_write_bytes:
        return session.drain(_too_large(session, request.size))
    process = service.process_of(session.client)
    token = None if request.token is None else request.token.decode(errors="replace")
    if token is not None and token not in process.begun:
        return session.drain(invalid("token", request.token or b""))
    piece = session.conn.take_body()
    return session.collect(piece, partial(_begin_put, session, process, token))


def _begin_put(
    session: Session, process: Process, token: str | None, piece: bytes | memoryview
) -> None:
    session.start(partial(_put, session, process, token, piece))


async def _put(
    session: Session, process: Process, token: str | None, piece: bytes | memoryview
) -> bytes:
    from vfs.content import FdError  # noqa: PLC0415 - see _call
    from vfs.content.threads import in_thread  # noqa: PLC0415 - likewise

    threads = session.client.ledger.threads
    try:
        token = await in_thread(_take, process, token, piece, share=threads)
    except FdError as why:
        return error(b"failed to put: " + echo(why.message.encode()))
    return b"OK %b\n" % token.encode()


def _take(process: Process, token: str | None, piece: bytes | memoryview) -> str:
    return process.begun.put(token, bytes(piece))
