"""The daemon of a node, as its node actor asks it: by the control socket, in Trio."""

from __future__ import annotations

import json
import socket
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from hostlib.readiness import wait_readable
from hostlib.unix_names import short_name
from supervisor.control.client import VERSION
from supervisor.control.lines import LineReader, LineTooLongError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

SILENT_S = 8.0
"""A daemon that is silent for so long does not answer: it sends a sign of life each 3 s."""

_RECEIVE_BYTES = 65_536


class DaemonError(Exception):
    """The daemon refuses, or does not answer; the text says which."""


class UnavailableDaemonError(DaemonError):
    """The daemon does not answer, or cannot do it now; the same may be asked again."""


class _Answer(msgspec.Struct):
    """One line of the control socket: an answer, an item or the end of a stream."""

    ok: bool | None = None
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    unavailable: bool = False
    item: msgspec.Raw = msgspec.Raw(b"")
    end: bool = False


@asynccontextmanager
async def connected(path: str) -> AsyncIterator[trio.SocketStream]:
    """Yield a connection to a control socket.

    Raises:
        DaemonError: no daemon listens there, or this process may have no more sockets.
    """
    try:
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as why:
        raise UnavailableDaemonError(
            f"cannot ask the daemon at {path!r}: {why.strerror}; raise the number of open"
            " files (ulimit -n) for Ray here"
        ) from None
    with sock:
        try:
            with short_name(path) as name:
                await sock.connect(name)
        except OSError as why:
            raise UnavailableDaemonError(
                f"no daemon at {path!r}: {why.strerror or why}; start sandhost serve"
            ) from None
        yield trio.SocketStream(sock)


async def ask(path: str, do: str, args: dict[str, Any]) -> msgspec.Raw:
    """Ask a question or give an order, and return the result as JSON.

    Raises:
        DaemonError: it is refused, or the daemon ends or is silent.
    """
    async with connected(path) as stream:
        async with aclosing(_answers(stream, path, do, args)) as answers:
            async for answer in answers:
                if answer.ok:
                    return answer.result
                raise _refusal(answer)
    raise _end_of(path)


async def items(
    path: str, do: str, args: dict[str, Any]
) -> AsyncGenerator[msgspec.Raw, None]:
    """Yield the items of a stream until it ends.

    Raises:
        DaemonError: it is refused, or the daemon ends or is silent.
    """
    async with connected(path) as stream:
        async with aclosing(_answers(stream, path, do, args)) as answers:
            async for answer in answers:
                if answer.ok is False:
                    raise _refusal(answer)
                if answer.end:
                    return
                if bytes(answer.item):
                    yield answer.item
    raise _end_of(path)


def _refusal(answer: _Answer) -> DaemonError:
    kind = UnavailableDaemonError if answer.unavailable else DaemonError
    return kind(answer.error)


def _end_of(path: str) -> UnavailableDaemonError:
    return UnavailableDaemonError(
        f"the daemon at {path!r} has ended, or was replaced; start it again if there is"
        " none"
    )


async def _answers(
    stream: trio.SocketStream, path: str, do: str, args: dict[str, Any]
) -> AsyncGenerator[_Answer, None]:
    question = {"v": VERSION, "do": do, "args": args}
    reader = LineReader()
    try:
        with trio.fail_after(SILENT_S):
            await stream.send_all(json.dumps(question).encode() + b"\n")
        while data := await _receive_soon(stream):
            for line in reader.feed(data):
                yield msgspec.json.decode(line, type=_Answer)
    except trio.BrokenResourceError:
        return
    except trio.TooSlowError:
        raise UnavailableDaemonError(
            f"the daemon at {path!r} does not answer within {SILENT_S:g} s: it is stopped"
            " or very busy; try again, or start it again"
        ) from None
    except (msgspec.DecodeError, LineTooLongError) as why:
        raise DaemonError(f"cannot read the daemon's answer: {why}") from None


async def _receive_soon(stream: trio.SocketStream) -> bytes:
    with trio.fail_after(SILENT_S):
        return await receive(stream)


async def receive(stream: trio.SocketStream) -> bytes:
    """Return what has come, or nothing at the end."""
    await wait_readable(stream.socket)
    return bytes(await stream.receive_some(_RECEIVE_BYTES))
