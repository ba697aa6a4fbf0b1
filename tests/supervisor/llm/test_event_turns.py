"""Other tasks run between the events of an answer (spec L14)."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from supervisor.llm.answer import Answer
from supervisor.llm.answer_reader import TURN_LINES
from supervisor.llm.apis import CHAT
from supervisor.llm.prompt_size import size_of_body
from tests.helpers.stage import open_model_stage
from tests.supervisor.llm.led_provider import request, server

EVENTS = 40
BODY = {"messages": [{"role": "user", "content": "a"}]}


def events() -> list[bytes]:
    """Return the events of an answer, as they are framed."""
    reasons = [None] * (EVENTS - 1) + ["stop"]
    choices = [
        {"index": 0, "delta": {"content": "word "}, "finish_reason": reason}
        for reason in reasons
    ]
    texts = [json.dumps({"choices": [choice]}).encode() for choice in choices]
    return [b"data: %b\n\n" % text for text in (*texts, b"[DONE]")]


def chunked(pieces: list[bytes]) -> bytes:
    """Return a body of such chunks."""
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (*pieces, b""))


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BURSTS: dict[str, Callable[[], list[bytes]]] = {
    "one chunk": lambda: [b"".join(events())],
    "a chunk each": events,
    "a chunk a byte": lambda: [b"%c" % byte for byte in b"".join(events())],
}


# spec L14, MD3: they are flushed as they come, and no burst keeps the Trio thread.
@pytest.mark.parametrize("burst", BURSTS)
async def test_others_have_a_turn_between_two_events(
    tmp_path: Path, no_leaks: None, burst: str
) -> None:
    del no_leaks

    async def handle(stream: trio.abc.Stream) -> None:
        while await request(stream):
            await stream.send_all(HEAD + chunked(BURSTS[burst]()))

    turns = 0
    seen: list[int] = []

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async def note(event: dict[str, object], is_large: bool) -> None:
        del event, is_large
        seen.append(turns)

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            service = stage.llm
            name = service.models.section.default_model
            call = service.models.call_for_body(
                stage.connect().client,
                name,
                BODY,
                size=size_of_body(BODY),
                max_tokens=None,
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take_turns)
                done = await service.models.gateway.complete(call, note)
                nursery.cancel_scope.cancel()
    assert done.text == "word " * EVENTS
    assert len(seen) == EVENTS
    # In each round of Trio both have one turn, in any order.
    least = len(events()[0]) if burst == "a chunk a byte" else 1
    pairs = zip(seen, seen[2:], strict=False)
    assert all(late - early >= least for early, late in pairs)


SHORT = b'data: {"choices":[]}\n\n'
LONG_BURSTS = {
    "events": SHORT * (65_000 // len(SHORT)),
    "blank lines": SHORT + b"\n" * 65_000,
    "lines of one event": b"data: {}\n" + b"data:\n" * 10_000 + b"\n",
}


# spec L14: counted in lines, for a millisecond is less than a test can tell beside others.
@pytest.mark.parametrize("burst", LONG_BURSTS)
async def test_what_comes_at_once_is_taken_apart_in_turns(
    tmp_path: Path, no_leaks: None, burst: str
) -> None:
    del no_leaks
    data = LONG_BURSTS[burst]
    turns = 0
    taken: Counter[int] = Counter()

    class Counting(Answer):
        """Notes in which turn an event is taken."""

        def _take_event(self, event: dict[str, Any], size_bytes: int) -> list[Any]:
            taken[turns] += 1
            return super()._take_event(event, size_bytes)

    async def handle(stream: trio.abc.Stream) -> None:
        while await request(stream):
            await stream.send_all(HEAD + chunked([data, *events()]))

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    api = replace(CHAT, reader=Counting)
    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url) as stage:
            models = stage.llm.models
            client, name = stage.connect().client, models.section.default_model
            size = size_of_body(BODY)
            call = models.call_for_body(client, name, BODY, size=size, max_tokens=None)
            call = replace(call, api=api, model=replace(call.model, apis=(api,)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take_turns)
                done = await models.gateway.complete(call)
                nursery.cancel_scope.cancel()
    assert done.text == "word " * EVENTS
    assert max(taken.values()) <= TURN_LINES
    assert turns >= data.count(b"\n") / TURN_LINES
