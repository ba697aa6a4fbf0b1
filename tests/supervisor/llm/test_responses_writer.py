"""Answers of Chat Completions in the form of the Responses API."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from hostlib.redact import BLOT, Redactor
from supervisor.llm.deltas import ChoiceRedactor
from supervisor.llm.ids import random_id
from supervisor.llm.responses_request import translate_request
from supervisor.llm.responses_writer import ResponsesWriter
from tests.helpers.canary import KEY

Object = dict[str, Any]

EVENT: pydantic.TypeAdapter[object] = pydantic.TypeAdapter(ResponseStreamEvent)
"""The events that the official client accepts."""

ASKED: Object = {
    "model": "asked-for",
    "input": "hi",
    "instructions": "Be brief.",
    "temperature": 0.5,
    "tools": [
        {"type": "function", "name": "ls", "parameters": {}, "strict": False},
        {"type": "custom", "name": "patch"},
        {
            "type": "namespace",
            "name": "n",
            "description": "",
            "tools": [
                {"type": "function", "name": "x"},
                {"type": "custom", "name": "c"},
            ],
        },
    ],
}
USAGE: Object = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def counted() -> Callable[[str], str]:
    """Return a maker of ids that are the same in every run."""
    numbers: dict[str, Iterator[int]] = {}

    def make(prefix: str) -> str:
        return f"{prefix}_{next(numbers.setdefault(prefix, itertools.count(1)))}"

    return make


def writer(asked: Object = ASKED) -> ResponsesWriter:
    """Return a writer of the answer to a request."""
    return ResponsesWriter(asked, translate_request(asked), "m", 7, counted())


def chunk(delta: object, finish: str | None = None) -> Object:
    """Return an event of Chat Completions."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"object": "chat.completion.chunk", "choices": [choice]}


def piece(index: int, arguments: str = "", name: str = "", call_id: str = "") -> Object:
    """Return a delta with a piece of a call."""
    function: Object = {"arguments": arguments}
    found: Object = {"index": index, "function": function}
    if name:
        function["name"] = name
        found |= {"id": call_id or f"call_{index}", "type": "function"}
    return {"tool_calls": [found]}


def streamed(
    *deltas: object, finish: str = "stop", usage: Object | None = None
) -> list[Object]:
    """Return the events of a stream, which are legal."""
    line = writer()
    events = line.begin()
    for delta in deltas:
        events += line.feed(chunk(delta))
    events += line.feed(chunk({}, finish))
    events += line.feed({"choices": [], "usage": usage})  # as a provider ends
    events += line.finish(usage)
    check(events)
    return events


def output(events: list[Object]) -> list[Object]:
    """Return the items of the response that a stream ends with."""
    found: list[Object] = events[-1]["response"]["output"]
    return found


# Legal events

TEXTS = {
    "response.content_part": "content",
    "response.reasoning_summary_part": "summary",
}
"""The prefixes of the events of parts, and the fields of items with parts."""

ARGUMENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


def check(events: list[Object]) -> None:
    """Raise unless events have the order that the API gives them (spec MD3)."""
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
    first, second, *middle, last = events
    assert first["type"] == "response.created"
    assert second["type"] == "response.in_progress"
    status = last["response"]["status"]
    assert last["type"] == f"response.{status}"
    items: dict[int, list[Object]] = {}
    done: dict[int, Object] = {}
    for event in middle:
        place = event["output_index"]
        if event["type"] == "response.output_item.added":
            assert place == len(items)
            is_text = [p for p, of in items.items() if of[0]["item"]["type"] in OPEN]
            assert not set(is_text) - set(done), "a text goes on beside an item"
            items[place] = []
        else:
            assert (
                event.get("item_id", items[place][0]["item"]["id"])
                == (items[place][0]["item"]["id"])
            )
        assert place not in done
        items[place].append(event)
        if event["type"] == "response.output_item.done":
            done[place] = event["item"]
    assert last["response"]["output"] == [done[place] for place in sorted(done)]
    if status != "failed":
        assert len(done) == len(items)
    for place in done:
        check_item(items[place])
    names = {"response.created", "response.in_progress", f"response.{status}"}
    assert not names & {event["type"] for event in middle}


OPEN = ("message", "reasoning")


def check_item(events: list[Object]) -> None:
    """Raise unless the events of an item are those of its type, and agree."""
    added, *middle, done = events
    empty, item = added["item"], done["item"]
    assert added["type"] == "response.output_item.added"
    assert {name: empty[name] for name in ("id", "type")} == {
        name: item[name] for name in ("id", "type")
    }
    if item["type"] in ARGUMENTS:
        assert {**empty, **changes(item)} == item
        begin, field = ARGUMENTS[item["type"]]
        *deltas, whole = middle
        assert whole["type"] == f"{begin}.done"
        assert whole[field] == item[field] == joined(deltas, f"{begin}.delta")
        return
    parts: list[Object] = []
    while middle:
        opened = middle[0]
        begin = opened["type"].removesuffix(".added")
        end = [event["type"] for event in middle].index(f"{begin}.done")
        _, *deltas, whole, closed = middle[: end + 1]
        text = whole["type"].removesuffix(".done")
        place = "content_index" if TEXTS[begin] == "content" else "summary_index"
        assert {event[place] for event in middle[: end + 1]} == {len(parts)}
        field = "refusal" if text == "response.refusal" else "text"
        assert deltas
        assert whole[field] == closed["part"][field]
        assert whole[field] == joined(deltas, f"{text}.delta")
        assert opened["part"] == {**closed["part"], field: ""}
        parts.append(closed["part"])
        assert item[TEXTS[begin]][: len(parts)] == parts
        middle = middle[end + 1 :]
    assert parts == item.get("content", item.get("summary"))


def changes(item: Object) -> Object:
    """Return what an item has got since it was added."""
    return {
        name: item[name] for name in ("status", "arguments", "input") if name in item
    }


def joined(deltas: list[Object], kind: str) -> str:
    """Return the text of deltas, which are all of one type."""
    assert {event["type"] for event in deltas} <= {kind}
    return "".join(event["delta"] for event in deltas)


# spec MD3: to the letter.
def test_a_text_in_pieces() -> None:
    events = streamed(
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"},
        usage=USAGE,
    )  # fmt: skip
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant"}
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    made = {**part, "text": "Hello"}
    assert [
        {k: v for k, v in event.items() if k not in ("sequence_number", "response")}
        for event in events
    ] == [
        {"type": "response.created"},
        {"type": "response.in_progress"},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **at, "part": part},
        {"type": "response.output_text.delta", **at, "delta": "Hel", "logprobs": []},
        {"type": "response.output_text.delta", **at, "delta": "lo", "logprobs": []},
        {"type": "response.output_text.done", **at, "text": "Hello", "logprobs": []},
        {"type": "response.content_part.done", **at, "part": made},
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": {**item, "status": "completed", "content": [made]},
        },
        {"type": "response.completed"},
    ]
    begun = {
        "id": "resp_1",
        "object": "response",
        "created_at": 7,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "metadata": {},
        "model": "m",
        "output": [],
        "previous_response_id": None,
        "store": False,
        "usage": None,
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": ASKED["tools"],
        "top_p": None,
        "truncation": "disabled",
        "user": None,
    }
    assert events[0]["response"] == begun
    assert events[1]["response"] == begun
    assert events[-1]["response"] == {
        **begun,
        "status": "completed",
        "output": [events[-2]["item"]],
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 15,
        },
    }


# spec MD3: a text is closed when a call begins; calls in turns are open beside each other.
def test_reasoning_text_and_calls_in_turns() -> None:
    events = streamed(
        {"reasoning_content": "Hm"}, {"content": "So"}, piece(0, "", "ls"),
        piece(0, '{"a":'), piece(1, "", "n__x"), piece(0, "1}"), piece(1, "{}"),
        finish="tool_calls",
    )  # fmt: skip
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[2:-1] == [
        "output_item.added", "reasoning_summary_part.added",
        "reasoning_summary_text.delta", "reasoning_summary_text.done",
        "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    reasoning, said, first, second = output(events)
    assert reasoning == {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "Hm"}],
    }
    assert said["content"][0]["text"] == "So"
    assert first == {
        "id": "fc_1",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "ls",
        "arguments": '{"a":1}',
    }
    # spec MD2: the namespace is put back.
    assert second == {
        "id": "fc_2",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "namespace": "n",
        "name": "x",
        "arguments": "{}",
    }


# spec MD2: the function's one argument is the input; anything else is told as it came.
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input":"a\\"\\n"}', 'a"\n'),
        ('{"input":""}', ""),
        ('{"input":7}', '{"input":7}'),
        ('{"inp', '{"inp'),
        ("*** Begin Patch", "*** Begin Patch"),
        ("[" * 100_000, "[" * 100_000),
        ("", ""),
    ],
)
def test_a_custom_tool_gets_its_input(arguments: str, text: str) -> None:
    events = streamed(piece(0, arguments[:3], "patch"), piece(0, arguments[3:]))
    names = [event["type"].removeprefix("response.") for event in events[2:-1]]
    deltas = ["custom_tool_call_input.delta"] if text else []
    assert names == [
        "output_item.added",
        *deltas,
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert output(events) == [
        {
            "id": "ctc_1",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_0",
            "name": "patch",
            "input": text,
        }
    ]
    (item,) = output(streamed(piece(0, '{"input":"a"}', "n__c")))
    assert (item["namespace"], item["name"], item["input"]) == ("n", "c", "a")


# spec MD3
def test_a_refusal_is_a_part_of_the_message() -> None:
    events = streamed({"content": "a"}, {"refusal": "no"}, {"content": "b"})
    (item,) = output(events)
    assert [part.get("text", part.get("refusal")) for part in item["content"]] == [
        "a",
        "no",
        "b",
    ]
    assert item["content"][1] == {"type": "refusal", "refusal": "no"}


# spec MD3: only the item that the model was in is incomplete.
@pytest.mark.parametrize(
    ("finish", "reason"),
    [("length", "max_output_tokens"), ("content_filter", "content_filter")],
)
def test_an_answer_that_was_cut_is_incomplete(finish: str, reason: str) -> None:
    events = streamed(
        {"content": "a"}, piece(0, "{}", "ls"), piece(1, "{", "ls"), finish=finish
    )
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": reason}
    assert [item["status"] for item in response["output"]] == [
        "completed",
        "completed",
        "incomplete",
    ]


# spec MD3: what was done is told, what was open is not closed.
def test_a_stream_that_breaks_off_fails() -> None:
    line = writer()
    events = line.begin() + line.feed(chunk({"reasoning": "a"}))
    events += line.feed(chunk({"content": "b"}))
    (failed,) = line.fail("insufficient_quota", "used up")
    check([*events, failed])
    response = failed["response"]
    assert failed["type"] == "response.failed"
    assert (response["id"], response["status"]) == ("resp_1", "failed")
    assert response["error"] == {"code": "insufficient_quota", "message": "used up"}
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    assert response["usage"] is None


# spec MD3: a result names its call by an id, and the official client counts on that.
def test_every_call_has_an_id_of_its_own() -> None:
    events = streamed(
        piece(0, "1", "ls", "same"), piece(1, "2", "ls", "same"),
        {"tool_calls": [{"index": 2, "function": {"name": "ls", "arguments": "3"}}]},
        {"tool_calls": [{"index": 3, "id": "nameless", "function": {"arguments": "4"}}]},
    )  # fmt: skip
    assert [(item["call_id"], item["arguments"]) for item in output(events)] == [
        ("same", "1"),
        ("call_1", "2"),
        ("call_2", "3"),
        ("nameless", "4"),
    ]


# spec MD3: one answer was asked for; its text may come in parts.
def test_shapes_of_some_providers() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    line = writer()
    line.begin()
    line.feed({"choices": [{"index": 1, "delta": {"content": "x"}}]})
    line.feed({"choices": [{"delta": {"content": parts}}]})
    (item,) = output(line.finish(None))
    assert item["content"][0]["text"] == "ab"
    # Both names of the same; calls without an index.
    events = streamed(
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"tool_calls": [{"id": "c", "function": {"name": "ls", "arguments": "{}"}}]},
    )
    reasoning, called = output(events)
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert called["call_id"] == "c"


# spec MD3: an id, even where the provider gave none; no two are the same.
def test_ids_are_random() -> None:
    assert random_id("resp").startswith("resp_")
    assert random_id("resp") != random_id("resp")
    translation = translate_request(ASKED)
    assert ResponsesWriter(ASKED, translation, "m", 7).begin()[0]["response"]["id"]


# spec L13, MD3: what a redactor holds back of a text comes before the text is closed.
def test_a_redacted_text_is_one_message() -> None:
    line, redactor = writer(), ChoiceRedactor(Redactor([KEY]))
    events = line.begin()
    key = piece(0, f'{{"a":"{KEY}"}}', "ls")
    for delta in ({"content": f"{KEY} is in file"}, {"content": "s"}, key):
        one = chunk(delta)
        (choice,) = one["choices"]
        events += line.feed(chunk(redactor.take_ended(choice)))
        redactor.feed(choice)
        events += line.feed(one)
    events += line.feed(chunk(redactor.rest(), "stop")) + line.finish(None)
    check(events)
    said, called = output(events)
    assert said["content"][0]["text"] == f"{BLOT} is in files"
    assert called["arguments"] == f'{{"a":"{BLOT}"}}'
    assert KEY not in json.dumps(events)


# spec MD5: what was not counted is not made up.
@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4}, (3, 4, 7)),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, (3, 0, 3)),
        ({"prompt_tokens": "x", "completion_tokens_details": 7}, (0, 0, 0)),
    ],
)
def test_usage_of_providers_that_count_less(
    usage: Object, tokens: tuple[int, int, int]
) -> None:
    found = streamed({"content": "a"}, usage=usage)[-1]["response"]["usage"]
    counts = (found["input_tokens"], found["output_tokens"], found["total_tokens"])
    assert counts == tokens
    assert streamed({"content": "a"})[-1]["response"]["usage"] is None


# With the official client

MESSAGE: Object = {
    "role": "assistant",
    "reasoning_content": "Hm",
    "content": "Hello",
    "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "ls", "arguments": "{}"}},
        {"id": "call_1", "type": "function", "function": {"name": "n__x", "arguments": "{}"}},
        {"id": "call_2", "type": "function", "function": {"name": "patch", "arguments": '{"input":"p"}'}},
    ],
}  # fmt: skip
PIECES = [
    {"role": "assistant", "content": ""}, {"reasoning_content": "Hm"},
    {"content": "Hel"}, {"content": "lo"}, piece(0, "", "ls"), piece(1, "{", "n__x"),
    piece(0, "{}"), piece(1, "}"), piece(2, '{"input":', "patch"), piece(2, '"p"}'),
]  # fmt: skip


def completion(message: Object, finish: str = "stop") -> Object:
    """Return an answer of Chat Completions in one piece."""
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"object": "chat.completion", "choices": [choice], "usage": USAGE}


def client(answer: Object | list[Object]) -> openai.OpenAI:
    """Return the official client of a server with one answer."""
    if isinstance(answer, dict):
        served = httpx2.Response(200, json=answer)
    else:
        lines = (f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in answer)
        kind = {"content-type": "text/event-stream"}
        served = httpx2.Response(200, text="".join(lines), headers=kind)
    transport = httpx2.MockTransport(lambda _request: served)
    return openai.OpenAI(
        api_key="k",
        base_url="http://host/v1",
        http_client=httpx2.Client(transport=transport),
        max_retries=0,
    )


def kinds(response: Response) -> list[str]:
    """Return the types of a response's items."""
    return [item.type for item in response.output]


ITEMS = ["reasoning", "message", "function_call", "function_call", "custom_tool_call"]


# spec MD2, MD3: a whole answer and a stream of the same are one response.
@pytest.mark.slow
def test_the_official_client_takes_it_all() -> None:
    events = streamed(*PIECES, finish="tool_calls", usage=USAGE)
    for event in events:
        EVENT.validate_python(event)
    whole = writer().whole(completion(MESSAGE, "tool_calls"))
    assert whole == events[-1]["response"]
    asked: Object = {"model": "m", "input": "hi"}
    with client(whole) as plain:
        response = plain.responses.create(**asked)
    assert kinds(response) == ITEMS
    assert response.output_text == "Hello"
    with client(events) as raw, raw.responses.create(**asked, stream=True) as stream:
        assert [event.type for event in stream] == [event["type"] for event in events]
    with client(events) as made, made.responses.stream(**asked) as sdk_stream:
        final = sdk_stream.get_final_response()
    assert kinds(final) == ITEMS
    assert (final.id, final.output_text) == ("resp_1", "Hello")
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens == 4


# spec MD3
def test_the_official_client_hears_of_a_failure() -> None:
    line = writer()
    events = line.begin() + line.feed(chunk({"content": "a"}))
    events += line.fail("server_error", "gone")
    for event in events:
        EVENT.validate_python(event)
    with client(events) as raw, raw.responses.stream(model="m", input="x") as stream:
        last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "gone"


# spec MD3: truncation is no failure, and the client tells it apart.
def test_the_official_client_hears_of_an_incomplete_answer() -> None:
    events = streamed({"content": "a"}, finish="length")
    for event in events:
        EVENT.validate_python(event)
    with client(events) as raw, raw.responses.stream(model="m", input="x") as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"


# Any stream

TEXT = st.text('ab{"\\', max_size=6)
SAID = st.one_of(
    st.tuples(st.sampled_from(["reasoning_content", "content", "refusal"]), TEXT),
    st.tuples(st.integers(0, 3), TEXT),
)
FINISH = st.sampled_from(["stop", "length", "tool_calls"])


def deltas_of(said: list[tuple[Any, str]]) -> list[Object]:
    """Return deltas with texts, and with pieces of calls, each with its head first."""
    names = ("ls", "n__x", "patch", "n__c")
    begun: set[int] = set()
    found = []
    for key, text in said:
        if isinstance(key, str):
            found.append({key: text})
            continue
        found.append(piece(key, text, "" if key in begun else names[key]))
        begun.add(key)
    return found


def parts_of(delta: Object, size: int) -> list[Object]:
    """Return a delta cut into several, of so much text each."""
    (key, value), *_ = delta.items()
    if isinstance(value, str):
        return [{key: value[at : at + size]} for at in range(0, len(value), size)]
    head = value[0]
    text = head["function"]["arguments"]
    first = {**head, "function": {**head["function"], "arguments": text[:size]}}
    rest = [
        piece(head["index"], text[at : at + size])
        for at in range(size, len(text), size)
    ]
    return [{"tool_calls": [first]}, *rest]


# spec MD3: however the provider cuts it.
@pytest.mark.slow
@settings(max_examples=60)
@given(said=st.lists(SAID, max_size=12), size=st.integers(1, 3), finish=FINISH)
def test_a_stream_cut_otherwise_is_the_same_response(
    said: list[tuple[Any, str]], size: int, finish: str
) -> None:
    deltas = deltas_of(said)
    cut: list[Object] = []
    for delta in deltas:
        cut += [{}, *parts_of(delta, size), {"content": ""}]
    at_once = streamed(*deltas, finish=finish)[-1]["response"]
    assert streamed(*cut, finish=finish)[-1]["response"] == at_once


# spec MD3: the text of an answer comes before its calls, in a message of one piece too.
@settings(max_examples=40)
@given(texts=st.lists(TEXT, min_size=3, max_size=7), finish=FINISH)
def test_a_whole_answer_is_the_same_as_a_stream(texts: list[str], finish: str) -> None:
    names = ["reasoning_content", "content", "refusal"]
    deltas = deltas_of(list(zip([*names, 0, 1, 2, 3], texts, strict=False)))
    message: Object = {"tool_calls": []}
    for delta in deltas:
        message["tool_calls"] += delta.pop("tool_calls", [])
        message |= delta
    for call in message["tool_calls"]:
        del call["index"]
    deltas = deltas_of(list(zip([*names, 0, 1, 2, 3], texts, strict=False)))
    events = streamed(*deltas, finish=finish, usage=USAGE)
    assert writer().whole(completion(message, finish)) == events[-1]["response"]


VALUES = st.sampled_from(
    [None, True, 0, 1, -1, "", "ls", "patch", [], {}, [None], ["a"], {"text": "a"},
     [{"text": "a"}, {"text": 7}], {"name": "ls"}, {"name": 7, "arguments": "a"},
     {"name": "patch", "arguments": 7}]
)  # fmt: skip
CALLS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"index": VALUES, "id": VALUES, "function": VALUES}
    )
    | VALUES,
    max_size=2,
)
DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "content": VALUES,
        "reasoning": VALUES,
        "refusal": VALUES,
        "tool_calls": CALLS | VALUES,
    },
)
CHUNKS = st.one_of(
    st.builds(chunk, DELTAS | VALUES, VALUES),
    st.builds(lambda value: {"choices": value}, VALUES),
)


# spec MD3: whatever comes is passed over or translated, and the order is legal.
@pytest.mark.slow
@settings(max_examples=100)
@given(chunks=st.lists(CHUNKS, max_size=5), ends_well=st.booleans())
def test_any_json_makes_legal_events(chunks: list[Object], *, ends_well: bool) -> None:
    line = writer()
    events = line.begin()
    for event in chunks:
        events += line.feed(event)
    check(events + (line.finish(None) if ends_well else line.fail("c", "m")))
