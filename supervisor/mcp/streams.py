"""The standard streams of ``sandhost mcp``, and when they end its session.

What stands between descriptors 0 and 1 and the package ``mcp``, which must be there to
import this.

Rules of this file.

1. A thread waits for a stream, and nobody for the thread: a session that is cancelled
   ends although its client neither writes nor reads.
2. A stream that fails ends the session by a cancellation, and ``Streams`` keeps why: an
   exception would come as a group, out of nurseries that are the package's.
3. What was asked before stdin's end is answered; the package by itself would cancel it.
   It ends without if nobody is there to read.
"""

from __future__ import annotations

import json
import os
import re
import select
from collections import Counter
from typing import TYPE_CHECKING

import anyio
import trio
from anyio import AsyncFile, to_thread
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp import types
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from _typeshed import ReadableBuffer
    from mcp.server.lowlevel import Server

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

LOOK_S = 1.0
"""How often it is looked whether somebody still waits for the last answers: no event
tells that a pipe has lost its reader."""


class Streams:
    """Descriptors 0 and 1 for as long as a session lasts.

    Args:
        scope: what is cancelled when a stream fails.

    Attributes:
        fault: what failed, to what, why; empty: nothing, or the reader.
        is_unread: nobody reads stdout any more.
    """

    def __init__(self, scope: trio.CancelScope) -> None:
        self.fault = ""
        self.is_unread = False
        self._scope = scope
        self._unanswered: Counter[str] = Counter()
        self._changed = trio.Event()
        self._writing = trio.Lock()

    async def say(self, data: bytes) -> None:
        """Write to standard output, one message at a time."""
        try:
            async with self._writing:
                await to_thread.run_sync(_write, data, abandon_on_cancel=True)
        except OSError as why:
            self.failed("write to standard output", why)
            await trio.lowlevel.checkpoint()

    async def serve(self, server: Server[dict[str, object]]) -> None:
        """Serve until the client closes stdin and has its answers.

        Cancellation: at once; what is under way is not answered.
        """
        async with stdio_server(_Lines(self), _Output(self)) as (reader, writer):
            options = server.create_initialization_options()
            await server.run(_Asked(self, reader), _Answers(self, writer), options)

    def failed(self, doing: str, why: OSError) -> None:
        """End the session, for a stream cannot be used."""
        if isinstance(why, BrokenPipeError):
            self.is_unread = True
        else:
            self.fault = f"cannot {doing}: {why.strerror}"
        self._scope.cancel()

    def came(self, message: types.JSONRPCMessage) -> None:
        """Count what will be answered."""
        match message:
            case types.JSONRPCRequest():
                self._unanswered[str(message.id)] += 1
            case types.JSONRPCNotification(
                method="notifications/cancelled", params={"requestId": request_id}
            ):
                self._settle(request_id)
            case _:
                pass

    def went(self, message: types.JSONRPCMessage) -> None:
        """Count what was answered."""
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            self._settle(message.id)

    def _settle(self, request_id: object) -> None:
        key = str(request_id)
        if self._unanswered[key] <= 1:
            del self._unanswered[key]
        else:
            self._unanswered[key] -= 1
        self._changed.set()

    async def answered(self) -> None:
        """Wait until everything is answered, or nobody would read it."""
        while self._unanswered and not self.is_unread:
            self._changed = trio.Event()
            with trio.move_on_after(LOOK_S):
                await self._changed.wait()
            if self._unanswered:
                self.is_unread = _has_no_reader(1)


class _Lines(AsyncFile[str]):
    """Standard input, line by line."""

    def __init__(self, streams: Streams) -> None:
        file = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
        super().__init__(file)
        self._streams = streams

    async def __aiter__(self) -> AsyncIterator[str]:
        read = self.wrapped.readline
        try:
            while line := await to_thread.run_sync(read, abandon_on_cancel=True):
                refusal = _refusal(line)
                if refusal:
                    await self._streams.say(refusal)
                else:
                    yield line
        except OSError as why:
            self._streams.failed("read standard input", why)
            await trio.lowlevel.checkpoint()


class _Output(AsyncFile[str]):
    """Standard output."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(os.fdopen(1, "w", encoding="utf-8", closefd=False))
        self._streams = streams

    async def write(self, b: ReadableBuffer | str) -> int:
        data = b.encode() if isinstance(b, str) else bytes(b)
        await self._streams.say(data)
        return len(data)

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()


class _Asked(ObjectReceiveStream[SessionMessage | Exception]):
    """What the client asks; it ends when that is answered."""

    def __init__(
        self,
        streams: Streams,
        reader: ObjectReceiveStream[SessionMessage | Exception],
    ) -> None:
        self._streams = streams
        self._reader = reader

    async def receive(self) -> SessionMessage | Exception:
        try:
            item = await self._reader.receive()
        except anyio.EndOfStream:
            await self._streams.answered()
            raise
        if isinstance(item, SessionMessage):
            self._streams.came(item.message)
        else:  # the package tells nobody
            await self._streams.say(_error(None, -32700, "No JSON-RPC message"))
        return item

    async def aclose(self) -> None:
        await self._reader.aclose()


class _Answers(ObjectSendStream[SessionMessage]):
    """What the client is answered."""

    def __init__(
        self, streams: Streams, writer: ObjectSendStream[SessionMessage]
    ) -> None:
        self._streams = streams
        self._writer = writer

    async def send(self, item: SessionMessage) -> None:
        await self._writer.send(item)
        self._streams.went(item.message)

    async def send_eof(self) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._writer.aclose()


def _refusal(line: str) -> bytes:
    """Return what is answered to a request that the package could not even read.

    A client cuts its texts where it likes, and JSON can say half a character.
    """
    if not _SURROGATE.search(line):
        return b""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return b""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        if isinstance(document, dict) and isinstance(document.get("id"), str | int):
            text = "The request has a lone surrogate, which is no character"
            return _error(document["id"], types.INVALID_PARAMS, text)
    return b""


def _error(request: str | int | None, code: int, text: str) -> bytes:
    """Return an error as JSON-RPC has it."""
    error = {"code": code, "message": text}
    answer = {"jsonrpc": "2.0", "id": request, "error": error}
    return json.dumps(answer).encode() + b"\n"


def _write(data: bytes) -> None:
    """Write everything to standard output, waiting for its reader."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(1, select.POLLOUT)
            poll.poll()


def _has_no_reader(fd: int) -> bool:
    """Tell whether what is written to a pipe or socket reaches nobody."""
    poll = select.poll()
    poll.register(fd, 0)  # POLLERR and POLLHUP come unasked
    return bool(poll.poll(0))
