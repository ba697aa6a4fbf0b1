"""Long bodies of the endpoint are handled in worker threads (spec MD8, attack 43).

Milliseconds are less than a test can tell beside others, so where each step is done is looked
at. The fuzzer holds that what is done in the Trio thread has few bytes and values.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostlib.threads import LARGE_BYTES
from supervisor.llm import (
    endpoint_call,
    gateway,
    messages_request,
    models,
    native_request,
)
from supervisor.llm.answer_writers import ChatWriter
from supervisor.llm.json_request import INLINE_BYTES, INLINE_VALUES
from tests.helpers.doors import Door, answered, open_door, open_door_stage

NATIVE = {"api": ["chat", "responses", "messages"]}
TRANSLATED: dict[str, object] = {}
QUOTA = {"max_tokens": 100_000_000}

STEPS: list[tuple[Any, str]] = [
    (endpoint_call, "document_bytes"),
    (endpoint_call, "read_request"),
    (endpoint_call, "check_request"),
    (messages_request, "count_tokens_estimate"),
    (endpoint_call, "size_of_request"),
    (endpoint_call, "size_of_body"),
    (endpoint_call, "translate"),
]
"""Functions that go through a body."""

ENCODERS: list[tuple[Any, str]] = [
    (models, "encode_chat"),
    (native_request, "encode_native"),
]
"""Those that make the provider's request of it; a text of 256 KiB takes them a moment."""

TEXTS = {
    "short": ["a"],
    "many bytes": ["a" * INLINE_BYTES],
    "many values": ["a"] * INLINE_VALUES,
    "longer": ["a" * LARGE_BYTES],
}

BODIES: dict[str, Callable[[list[str]], dict[str, object]]] = {
    "chat/completions": lambda texts: {"messages": said(texts, "text")},
    "responses": lambda texts: {"input": said(texts, "input_text")},
    "messages": lambda texts: {"max_tokens": 9, "messages": said(texts, "text")},
    "messages/count_tokens": lambda texts: {"messages": said(texts, "text")},
    "embeddings": lambda texts: {"input": texts},
}


def said(texts: list[str], kind: str) -> list[dict[str, object]]:
    """Return a user's message of some texts."""
    return [{"role": "user", "content": [{"type": kind, "text": one} for one in texts]}]


async def ask(door: Door, path: str, texts: list[str]) -> int:
    """Ask by a door; return the status."""
    body = {"model": "m", **BODIES[path](texts)}
    data = door.request(body).replace(
        b"/v1/chat/completions", b"/v1/%b" % path.encode()
    )
    async with await door.connect() as stream:
        await stream.send_all(data)
        status, _ = await answered(stream)
        return status


# spec MD8
@pytest.mark.parametrize("way", [NATIVE, TRANSLATED], ids=["native", "translated"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_long_body_is_gone_through_in_worker_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, object], path: str
) -> None:
    seen: list[tuple[str, bool]] = []

    def watch(owner: Any, name: str) -> None:
        step = getattr(owner, name)

        def watched(*args: Any, **more: Any) -> Any:
            is_inline = threading.current_thread() is threading.main_thread()
            seen.append((name, is_inline))
            return step(*args, **more)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (*STEPS, *ENCODERS):
        watch(owner, name)
    names = {name for _, name in STEPS}
    async with open_door_stage(tmp_path, max_tokens=9, quota=QUOTA, **way) as stage:
        door = await open_door(stage)
        for length, texts in TEXTS.items():
            seen.clear()
            assert await ask(door, path, texts) == 200
            steps = {is_inline for name, is_inline in seen if name in names}
            assert steps == {length == "short"}, (length, seen)
            made = {is_inline for name, is_inline in seen if name not in names}
            assert made <= {length != "longer"}, (length, seen)
            assert made or path == "messages/count_tokens"


# spec MD8: an event of a provider that is long, and an answer that came in one piece.
@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_answer_is_gone_through_in_worker_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    seen: list[tuple[str, bool]] = []

    def watch(owner: Any, name: str) -> None:
        step = getattr(owner, name)

        def watched(self: Any, *args: Any) -> Any:
            is_inline = threading.current_thread() is threading.main_thread()
            seen.append((name, is_inline))
            return step(self, *args)

        monkeypatch.setattr(owner, name, watched)

    for name in ("finish", "whole"):
        watch(ChatWriter, name)
    watch(gateway.Gateway, "redact_completion")
    async with open_door_stage(tmp_path, max_tokens=None, quota=QUOTA) as stage:
        door = await open_door(stage)
        for order, is_inline in (("!words=2", True), ("!words=50000 !plain", False)):
            seen.clear()
            content = [{"role": "user", "content": order}]
            body = {"model": "m", "stream": stream, "messages": content}
            status, text = await door.ask(json.dumps(body).encode())
            assert status == 200
            assert (len(text) > LARGE_BYTES) is not is_inline
            assert {inline for _, inline in seen} == {is_inline}, seen
