"""Answers of any order and shape: read or refused, never a fault (MD3)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.redact import Redactor
from supervisor.llm.answer_reader import AnswerError, AnswerReader, ProviderError
from supervisor.llm.answer_writers import AnswerWriter, ChatWriter, PassedWriter
from supervisor.llm.apis import CHAT, EMBEDDINGS, MESSAGES, RESPONSES, Api
from supervisor.llm.gateway import Completion
from supervisor.llm.quota import Usage

KEY = "sk-any-answer-0123456789"
REDACTOR = Redactor([KEY])
APIS = pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES, EMBEDDINGS])

WORDS = st.sampled_from(
    ["", "a", "sk-any", "-answer-0123456789", KEY, "text_delta", "message", "response"]
)
PLAIN = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(0, 9) | WORDS
NAMES = st.sampled_from(
    [
        "type", "index", "delta", "text", "thinking", "partial_json", "message", "id",
        "usage", "input_tokens", "output_tokens", "content_block", "content", "error",
        "response", "output", "output_index", "content_index", "item", "choices", "code",
        "input_tokens_details", "object", "status", "finish_reason", "model", "logprobs",
        "tool_calls", "function", "arguments", "prompt_tokens", "role", "data",
    ]
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=12,
)
TYPES = st.sampled_from(
    [
        "message_start", "content_block_start", "content_block_delta", "ping",
        "content_block_stop", "message_delta", "message_stop", "error", "keepalive",
        "response.created", "response.in_progress", "response.output_item.added",
        "response.output_text.delta", "response.output_text.done", "response.failed",
        "response.output_item.done", "response.completed", "response.incomplete",
        "response.function_call_arguments.delta", "new_event", "response.new.delta",
    ]
)  # fmt: skip
EVENTS = st.lists(
    st.builds(
        lambda event, kind: {**event, "type": kind} if kind else event,
        st.dictionaries(NAMES, VALUES, max_size=5),
        st.none() | TYPES,
    ),
    max_size=8,
)


def writer_for(api: Api) -> AnswerWriter:
    """Return what writes an answer that is passed on."""
    return (
        ChatWriter(REDACTOR, "m") if api is CHAT else PassedWriter(REDACTOR, "m", api)
    )


def take(api: Api, data: bytes, cut: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Read an answer and write it; return what a child gets."""
    reader: AnswerReader = api.reader()
    writer = writer_for(api)
    frames: list[bytes] = []
    try:
        for piece in cut(data):
            for event in reader.feed(piece):
                frames += writer.feed(event)
        found = reader.finish()
        usage = reader.usage() or reader.estimate(1, None)
        assert isinstance(usage, Usage)
        whole = Completion(json.dumps(found).encode(), found)
        if found.get("choices") or api is not CHAT:
            frames += writer.finish(whole)
    except (AnswerError, ProviderError):
        return frames
    assert reader.held_bytes >= 0
    return frames


def in_two(place: int) -> Callable[[bytes], list[bytes]]:
    """Return a way to cut bytes at a place."""
    return lambda data: [
        data[: place % (len(data) + 1)],
        data[place % (len(data) + 1) :],
    ]


# spec MD3: another API's events, out of order, twice, of any shape.
@pytest.mark.slow
@APIS
@given(events=EVENTS, place=st.integers(0, 2000))
def test_any_events_are_read_or_refused(
    api: Api, events: list[dict[str, Any]], place: int
) -> None:
    data = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events)
    frames = take(api, data, in_two(place))
    assert KEY.encode() not in b"".join(frames)


# spec MD3: an answer in one piece of any shape.
@pytest.mark.slow
@APIS
@given(value=st.dictionaries(NAMES, VALUES, max_size=6), place=st.integers(0, 2000))
def test_any_answer_in_one_piece_is_read_or_refused(
    api: Api, value: dict[str, Any], place: int
) -> None:
    take(api, json.dumps(value).encode(), in_two(place))


MESSAGE: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 9}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]


def pieces_of(words: list[str]) -> list[dict[str, Any]]:
    """Return the events of a message that says these pieces."""
    deltas = [
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "t", "text": word},
        }
        for word in words
    ]
    return [*MESSAGE[:2], *deltas, *MESSAGE[2:]]


# spec L13, MD3: whatever the pieces, their text is the same, and no key is in it.
@given(st.lists(WORDS | st.sampled_from(["s", "k", "-", KEY[:9], KEY[9:]]), max_size=9))
def test_the_text_of_a_stream_stays_and_the_key_does_not(words: list[str]) -> None:
    events = pieces_of(words)
    data = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events)
    frames = take(MESSAGES, data, lambda one: [one])
    got = [json.loads(frame.partition(b"data: ")[2]) for frame in frames]
    text = "".join(
        event["delta"]["text"] for event in got if "text" in event.get("delta", {})
    )
    assert text == REDACTOR.text("".join(words))
    kinds = [event["type"] for event in got if event["type"] != "content_block_delta"]
    assert kinds == [event["type"] for event in MESSAGE]
