"""Answers of a hostile provider stay small, and fail (I9, L15)."""

import gc
import json
import tracemalloc
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import trio

from hostlib.redact import Redactor
from hostlib.threads import LARGE_BYTES
from supervisor.llm.answer_reader import AnswerError, AnswerReader
from supervisor.llm.answer_writers import AnswerWriter, ChatWriter, PassedWriter
from supervisor.llm.apis import CHAT, MESSAGES, RESPONSES, Api
from supervisor.llm.deltas import EventRedactor
from tests.helpers.doors import answered, unchunked
from tests.helpers.rounds import some_of
from tests.helpers.stage import eventually
from tests.supervisor.llm.led_provider import (
    EVENTS_HEAD,
    opened_with,
    raw,
    reply,
    request,
    told,
)

KEY = "sk-any-answer-0123456789"
REDACTOR = Redactor([KEY])
MOST_EVENTS = 10_000
"""So many are there to be fed; a hostile provider has twenty times as many in 16 MiB."""
MOST_BYTES = 8 * 1024 * 1024

Event = dict[str, Any]


def chat(number: int, delta: Event) -> Event:
    """Return an event of Chat Completions."""
    return {"choices": [{"index": number, "delta": delta}]}


def called(number: int, call: Event) -> Event:
    """Return an event with a piece of a call."""
    return chat(0, {"tool_calls": [{"index": number, **call}]})


def each(make: Any, *first: Event) -> Iterator[Event]:
    """Yield the first events, and one for each number without end."""
    yield from first
    for number in count():
        yield from make(number)


CREATED: Event = {"type": "response.created", "response": {"id": "r"}}
START: Event = {"type": "message_start", "message": {"id": "m"}}
BLOCK: Event = {
    "type": "content_block_start", "index": 0, "content_block": {"type": "text"},
}  # fmt: skip


def part(number: int) -> Event:
    """Return an event with a piece of a part of Responses."""
    kind = "response.output_text.delta"
    return {"type": kind, "output_index": 0, "content_index": number, "delta": "a"}


def item(number: int) -> Event:
    """Return an event that begins an item of Responses."""
    kind = "response.output_item.added"
    return {"type": kind, "output_index": number, "item": {"type": "message"}}


def block(number: int) -> Iterator[Event]:
    """Yield the events of an empty block of Messages."""
    yield {**BLOCK, "index": number}
    yield {"type": "content_block_stop", "index": number}


def piece(number: int) -> Event:
    """Return an event with a piece of a text that has a name of its own."""
    return {"type": "content_block_delta", "index": 0, "delta": {f"k{number}": "a"}}


ROWS: dict[str, tuple[Api, Any, str]] = {
    "choices": (CHAT, lambda n: [chat(n, {"content": "a"})], "16 choices"),
    "members": (CHAT, lambda n: [chat(0, {f"k{n}": "a"})], "512 texts"),
    "arguments": (CHAT, lambda n: [called(n, {"function": {"arguments": "a"}})], "512"),
    "calls": (CHAT, lambda n: [called(n, {"id": f"{n}"})], "4096 calls"),
    "parts": (RESPONSES, lambda n: [part(n)], "512 texts"),
    "items": (RESPONSES, lambda n: [item(n)], "4096 items"),
    "blocks": (MESSAGES, block, "4096 blocks"),
    "names": (MESSAGES, lambda n: [piece(n)], "512 texts"),
}
FIRST = {"parts": [CREATED], "items": [CREATED], "blocks": [START]}
FIRST["names"] = [START, BLOCK]


def writer_for(api: Api) -> AnswerWriter:
    """Return what writes an answer that is passed on."""
    return (
        ChatWriter(REDACTOR, "m") if api is CHAT else PassedWriter(REDACTOR, "m", api)
    )


def feed(reader: AnswerReader, events: Iterable[Event]) -> Iterator[Event]:
    """Have a reader read events, each as it comes; yield what is passed on."""
    for event in events:
        yield from reader.feed(b"data: %b\n\n" % json.dumps(event).encode())


def write(writer: AnswerWriter, events: Iterable[Event]) -> None:
    """Have a writer write events, and keep nothing of it."""
    for event in events:
        writer.feed(event)


# spec L15, MD3: counted in events and bytes, whatever each of them holds.
@pytest.mark.chaos
@pytest.mark.parametrize("row", some_of(ROWS))
def test_a_stream_of_very_many_things_ends(row: str) -> None:
    api, make, reason = ROWS[row]
    reader, writer = api.reader(), writer_for(api)
    events = islice(each(make, *FIRST.get(row, [])), MOST_EVENTS)
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(AnswerError, match=f"more than {reason}"):
            write(writer, feed(reader, events))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.events < MOST_EVENTS
    assert most_bytes < MOST_BYTES


PLAIN: dict[str, tuple[Api, Event, str]] = {
    "choices": (CHAT, {"choices": [{"message": {"content": "a"}}] * 17}, "16 choices"),
    "calls": (
        CHAT,
        {"choices": [{"message": {"content": None, "tool_calls": [{}] * 5000}}]},
        "4096 calls",
    ),
    "items": (
        RESPONSES,
        {"object": "response", "id": "r", "output": [{"type": "message"}] * 5000},
        "4096 items",
    ),
    "blocks": (
        MESSAGES,
        {"type": "message", "id": "m", "content": [{"type": "text"}] * 5000},
        "4096 blocks",
    ),
}


# spec L15: in one piece, too.
@pytest.mark.parametrize("row", PLAIN)
def test_an_answer_of_very_many_things_is_none(row: str) -> None:
    api, answer, reason = PLAIN[row]
    reader = api.reader()
    reader.feed(json.dumps(answer).encode())
    with pytest.raises(AnswerError, match=f"more than {reason}"):
        reader.finish()


# spec L15: the last event of Responses names all of its items.
def test_a_last_event_of_very_many_items_ends_the_answer() -> None:
    reader = RESPONSES.reader()
    response = {"id": "r", "output": [{"type": "message"}] * 5000}
    end = {"type": "response.completed", "response": response}
    with pytest.raises(AnswerError, match="more than 4096 items"):
        reader.feed(b"data: %b\n\n" % json.dumps(end).encode())


# attack 42: values that are kept are reserved, wherever in an event they stand.
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"choices": [], f"k{n}": [[]] * 100},
        lambda n: {"choices": [{"index": 0, f"k{n}": [[]] * 100}]},
        lambda n: chat(0, {"parts": [[[]] * 100]}),
        lambda n: chat(0, {"parts": [{f"k{n}": 1} for _ in range(50)]}),
    ],
    ids=["event", "choice", "list", "tables"],
)
def test_what_is_kept_is_counted(make: Any) -> None:
    reader = CHAT.reader()
    gc.collect()
    tracemalloc.start()
    try:
        deque(feed(reader, map(make, range(500))), maxlen=0)
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes <= reader.held_bytes
    events = feed(reader, map(make, range(500, 5000)))
    with pytest.raises(AnswerError, match="more than 250000 values in all pieces"):
        deque(events, maxlen=0)


# attack 42: the lines of an event are held until its end has come.
@pytest.mark.slow
@pytest.mark.parametrize("line", [b"data: " + b"a" * 1_000_000, b"data:ab"])
def test_what_has_come_of_an_event_is_counted(line: bytes) -> None:
    reader = CHAT.reader()
    gc.collect()
    tracemalloc.start()
    try:
        reader.feed(b"\n".join([line] * (2_000_000 // len(line)) + [b""]))
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 500_000 < kept_bytes <= reader.held_bytes
    assert reader.pending_bytes > LARGE_BYTES  # it is taken apart in a worker thread
    with pytest.raises(AnswerError, match="not JSON"):
        reader.feed(b"\n")
    assert reader.pending_bytes == 0


# spec L15: what a provider repeats in each event is kept once.
@pytest.mark.slow
def test_what_is_repeated_is_counted_once() -> None:
    reader = CHAT.reader()
    event = {"id": "a", "filter": [{"hate": {"filtered": False}}] * 50}
    event["choices"] = [{"index": 0, "delta": {"content": ""}, "filter": [1] * 50}]
    data = b"data: %b\n\n" % json.dumps(event).encode()
    reader.feed(data)
    before = reader.kept_bytes
    for _ in range(3000):
        reader.feed(data)
    assert reader.kept_bytes == before


# spec L13: probabilities of a piece whose end is held back spell all of it.
def test_no_probabilities_go_with_what_was_held_back() -> None:
    redactor = EventRedactor(REDACTOR)
    place = {"output_index": 0, "content_index": 0}
    spelled = [{"token": token} for token in (KEY[:9], KEY[9:], "sk-")]
    delta = {"type": "response.output_text.delta", **place, "delta": f"{KEY} sk-"}
    passed = redactor.feed({**delta, "logprobs": spelled})
    passed += redactor.feed({"type": "response.output_text.done", **place, "text": ""})
    assert KEY[9:] not in json.dumps(passed)
    assert "".join(one.get("delta", "") for one in passed) == "[redacted] sk-"


DOORS = (
    ("/v1/chat/completions", "choices"),
    ("/v1/responses", "items"),
    ("/v1/messages", "blocks"),
)


# spec L15, MD3: at each door it is the provider's failure, in the form of the API.
@pytest.mark.slow
@pytest.mark.parametrize("way", ["native", "chat"])
async def test_such_an_answer_is_a_failure_of_the_provider(
    tmp_path: Path, way: str
) -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        data = await request(stream)
        path = data.split()[1].decode()
        row = next(row for door, row in DOORS if door.endswith(path))
        if b'"stream":true' not in data.replace(b" ", b""):
            await stream.send_all(reply(json.dumps(PLAIN[row][1]).encode()))
            return
        _, make, _ = ROWS[row]
        events = islice(each(make, *FIRST.get(row, [])), MOST_EVENTS)
        frames = [b"data: %b\n\n" % json.dumps(one).encode() for one in events]
        await stream.send_all(EVENTS_HEAD + b"".join(frames))

    async with opened_with(tmp_path, handle, way) as (stage, door):
        for path, row in DOORS:
            reason = "16 choices" if way == "chat" else ROWS[row][2]
            asked = "input" if path == "/v1/responses" else "messages"
            body: Event = {asked: [{"role": "user", "content": "a"}]}
            if path == "/v1/messages":
                body["max_tokens"] = 9
            status, _, failed = await told(door, "POST", path, body)
            assert status == 502
            assert f"more than {reason}" in failed["error"]["message"]
            async with await door.connect() as stream:
                await stream.send_all(raw(door, "POST", path, {**body, "stream": True}))
                _, data = await answered(stream)
            last = unchunked(data) if data[:1] != b"{" else data
            assert f"more than {reason}".encode() in last
            assert b"[DONE]" not in last
        await eventually(lambda: not stage.host.budget.request_memory.used)
