"""The standard streams of ``sandhost mcp``, and when they end its session.

They stand between descriptors 0 and 1 and the package ``mcp``, an extra.

1. A thread waits for a stream and is never waited for: a cancelled session ends
   although its client neither writes nor reads.
2. A failed stream cancels the session, and ``Streams`` keeps the reason: an exception
   would leave the package's nurseries in a group.
3. Requests before stdin's end are answered; the package alone would cancel them. The
   session ends without answers if stdout has no reader.
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
"""Time between two looks whether stdout has a reader: no event tells that a pipe has
lost its reader."""


class Streams:
    """Descriptors 0 and 1 for as long as a session lasts.

    Args:
        scope: cancelled when a stream fails.

    Attributes:
        fault: the reason of a failure; empty for none or a lost reader.
        is_unread: whether stdout has lost its reader.
    """

    def __init__(self, scope: trio.CancelScope) -> None:
        self.fault = ""
        self.is_unread = False
        self._scope = scope
        self._unanswered: Counter[str] = Counter()
        self._changed = trio.Event()
        self._writing = trio.Lock()

    async def write(self, data: bytes) -> None:
        """Write a message to standard output, after the one before."""
        try:
            async with self._writing:
                await to_thread.run_sync(_write, data, abandon_on_cancel=True)
        except OSError as why:
            self.end_for("write to standard output", why)
            await trio.lowlevel.checkpoint()

    async def serve(self, server: Server[dict[str, object]]) -> None:
        """Serve until the client closes stdin and has its answers.

        Cancellation: at once; open requests are not answered.
        """
        async with stdio_server(_Lines(self), _Output(self)) as (reader, writer):
            options = server.create_initialization_options()
            await server.run(
                _RequestStream(self, reader), _Answers(self, writer), options
            )

    def end_for(self, doing: str, why: OSError) -> None:
        """End the session because of a failed stream."""
        if isinstance(why, BrokenPipeError):
            self.is_unread = True
        else:
            self.fault = f"cannot {doing}: {why.strerror}"
        self._scope.cancel()

    def count_request(self, message: types.JSONRPCMessage) -> None:
        """Count a request that will be answered."""
        match message:
            case types.JSONRPCRequest():
                self._unanswered[str(message.id)] += 1
            case types.JSONRPCNotification(
                method="notifications/cancelled", params={"requestId": request_id}
            ):
                self._settle(request_id)
            case _:
                pass

    def count_answer(self, message: types.JSONRPCMessage) -> None:
        """Count an answer."""
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            self._settle(message.id)

    def _settle(self, request_id: object) -> None:
        key = str(request_id)
        if self._unanswered[key] <= 1:
            del self._unanswered[key]
        else:
            self._unanswered[key] -= 1
        self._changed.set()

    async def wait_answered(self) -> None:
        """Wait until all requests are answered, or stdout has no reader."""
        while self._unanswered and not self.is_unread:
            self._changed = trio.Event()
            with trio.move_on_after(LOOK_S):
                await self._changed.wait()
            if self._unanswered:
                self.is_unread = has_no_reader(1)


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
                    await self._streams.write(refusal)
                else:
                    yield line
        except OSError as why:
            self._streams.end_for("read standard input", why)
            await trio.lowlevel.checkpoint()


class _Output(AsyncFile[str]):
    """Standard output."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(os.fdopen(1, "w", encoding="utf-8", closefd=False))
        self._streams = streams

    async def write(self, b: ReadableBuffer | str) -> int:
        data = b.encode() if isinstance(b, str) else bytes(b)
        await self._streams.write(data)
        return len(data)

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()


class _RequestStream(ObjectReceiveStream[SessionMessage | Exception]):
    """The client's requests; ends when all are answered."""

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
            await self._streams.wait_answered()
            raise
        if isinstance(item, SessionMessage):
            self._streams.count_request(item.message)
        else:  # the package drops it silently
            await self._streams.write(_error(None, -32700, "No JSON-RPC message"))
        return item

    async def aclose(self) -> None:
        await self._reader.aclose()


class _Answers(ObjectSendStream[SessionMessage]):
    """The answers to the client."""

    def __init__(
        self, streams: Streams, writer: ObjectSendStream[SessionMessage]
    ) -> None:
        self._streams = streams
        self._writer = writer

    async def send(self, item: SessionMessage) -> None:
        await self._writer.send(item)
        self._streams.count_answer(item.message)

    async def send_eof(self) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._writer.aclose()


def _refusal(line: str) -> bytes:
    """Return the answer to a request that the package cannot parse.

    A client may cut a text anywhere, and JSON can encode half a character.
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
    """Write all bytes to standard output, waiting for its reader."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(1, select.POLLOUT)
            poll.poll()


def has_no_reader(fd: int) -> bool:
    """Return whether a pipe or socket has lost its reader."""
    poll = select.poll()
    poll.register(fd, 0)  # POLLERR and POLLHUP are always reported
    return bool(poll.poll(0))
