"""A provider that a test leads by the hand, and requests at a child's door to it."""

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.helpers.doors import Door, answered_with_head, open_door, open_door_stage
from tests.helpers.stage import Stage

NATIVE = {"api": ["chat", "responses", "messages"], "quota": {"max_tokens": 100_000}}
TRANSLATED: dict[str, Any] = {"quota": {"max_tokens": 100_000}}
WAYS = pytest.mark.parametrize("way", [NATIVE, TRANSLATED], ids=["native", "chat"])

Handler = Callable[[trio.abc.Stream], Awaitable[None]]


def reply(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    """Return a whole HTTP response."""
    head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n"
    return head % (status, len(body), more) + body


async def request(stream: trio.abc.Stream) -> bytes:
    """Receive one request; empty at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = await stream.receive_some(65_536)
        if not piece:
            return b""
        data += piece
    head, end, body = data.partition(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < size:
        body += await stream.receive_some(65_536)
    return head + end + body


def hanging_up_first(answer: bytes) -> tuple[Handler, list[bytes]]:
    """Return a handler that answers all requests but the first, and what it has got."""
    got: list[bytes] = []

    async def handle(stream: trio.abc.Stream) -> None:
        while data := await request(stream):
            got.append(data)
            if len(got) == 1:
                return
            await stream.send_all(answer)

    return handle, got


@asynccontextmanager
async def server(
    handle: Handler, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve each connection with a handler; yield the port."""

    async def attend(stream: trio.SocketStream) -> None:
        way: trio.abc.Stream = stream
        if context is not None:
            way = trio.SSLStream(
                stream, context, server_side=True, https_compatible=True
            )
        try:
            async with way:
                await handle(way)
        except (trio.BrokenResourceError, ssl.SSLError):
            return

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, attend, [listener])
        try:
            yield listener.socket.getsockname()[1]
        finally:
            nursery.cancel_scope.cancel()


def raw(
    door: Door, method: str, path: str, body: object = None, **headers: str
) -> bytes:
    """Return a request with the child's token, unless headers show another."""
    data = body if isinstance(body, bytes) else b""
    if body is not None and not isinstance(body, bytes):
        data = json.dumps(body).encode()
    told = {"host": "x", "content-length": str(len(data)), **headers}
    if "x_api_key" not in told and "authorization" not in told:
        told["authorization"] = f"Bearer {door.env['OPENAI_API_KEY']}"
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in told.items()]
    return "\r\n".join((f"{method} {path} HTTP/1.1", *lines, "", "")).encode() + data


async def told(
    door: Door, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[bytes, bytes], Any]:
    """Ask; return status, headers, and the body's JSON if there is one."""
    async with await door.connect() as stream:
        await stream.send_all(raw(door, method, path, body, **headers))
        status, head, text = await answered_with_head(stream)
        return status, head, json.loads(text) if text.startswith(b"{") else text


@asynccontextmanager
async def opened(where: Path, **changes: Any) -> AsyncIterator[tuple[Stage, Door]]:
    """Open a host with one child."""
    async with open_door_stage(where, max_tokens=None, **changes) as stage:
        yield stage, await open_door(stage)


EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
)
"""How a provider begins a stream."""


@asynccontextmanager
async def opened_with(
    where: Path, handle: Handler, way: str
) -> AsyncIterator[tuple[Stage, Door]]:
    """Open a host with one child, no quota, and a provider that a test controls.

    Args:
        where: for its files.
        handle: serves a connection of the provider.
        way: ``native`` for a provider of all three APIs, ``chat`` for one of Chat alone.
    """
    apis = NATIVE["api"] if way == "native" else ["chat"]
    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}"
        async with open_door_stage(where, base_url=url, api=apis, quota={}) as stage:
            yield stage, await open_door(stage)
