"""A child's way to the model's endpoint, used by the test in the child's place.

async with open_door_stage(tmp_path) as stage:
door = await open_door(stage)
status, body = await door.ask(ask("hello"))
"""

import json
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from tests.helpers.stage import Puppet, Stage, open_stage

NAMES = (
    "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN",
    "SANDHOST_LLM_SOCKET",
)  # fmt: skip


PATIENCE_S = 120.0
"""Longest wait for a reply, on a machine where much else runs."""


@dataclass
class Door:
    """A child's endpoint, used by the test in the child's place."""

    stage: Stage
    puppet: Puppet
    env: dict[str, str]

    async def connect(self) -> trio.SocketStream:
        """Connect to the port of all."""
        port = int(self.env["OPENAI_BASE_URL"].rsplit(":", 1)[1].split("/")[0])
        return await trio.open_tcp_stream("127.0.0.1", port)

    def request(self, body: object, token: str | None = None) -> bytes:
        """Return a POST; a body that is bytes goes as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + (self.env["OPENAI_API_KEY"] if token is None else token).encode()
            + b"\r\nContent-Length: %d\r\n\r\n" % len(data)
            + data
        )

    async def ask(self, body: object, token: str | None = None) -> tuple[int, bytes]:
        """Ask on a connection of its own; return status and body."""
        async with await self.connect() as stream:
            await stream.send_all(self.request(body, token))
            return await answered(stream)


async def answered(stream: trio.SocketStream) -> tuple[int, bytes]:
    """Receive one reply, of a known length or in chunks; return status and body."""
    status, _, body = await answered_with_head(stream)
    return status, body


async def answered_with_head(
    stream: trio.SocketStream,
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Receive one reply; return status, headers in lower case, and body."""
    data = b""
    with trio.fail_after(PATIENCE_S):
        while b"\r\n\r\n" not in data:
            piece = await stream.receive_some()
            if not piece:
                return 0, {}, data
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = lines.get(b"content-length")
        while (len(body) < int(size)) if size else not body.endswith(b"0\r\n\r\n"):
            piece = await stream.receive_some()
            if not piece:
                break
            body += piece
    return int(head.split()[1]), lines, body


def unchunked(body: bytes) -> bytes:
    """Return a reply's body without the sizes of its chunks."""
    pieces, at = [], 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(pieces)


def ask(text: str, **more: object) -> dict[str, object]:
    """Return a request's body."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def open_door_stage(where: Path, **changes: Any) -> AbstractAsyncContextManager[Stage]:
    """Open a host with an endpoint and a quota; `changes` are of `[llm]`."""
    model = {
        "endpoint": True,
        "max_tokens": 50,
        "quota": {"max_tokens": 10_000},
        **changes,
    }
    return open_stage(where, model=model)


async def open_door(stage: Stage, **changes: Any) -> Door:
    """Start a child; return its way to the endpoint."""
    run_dir = stage.where / f"run{len(os.listdir(stage.where))}"
    run_dir.mkdir()
    child = await stage.puppet(run_dir=str(run_dir), **changes)
    env = {name: await child.do(f"os.environ.get({name!r})") for name in NAMES}
    return Door(stage, child, env)
