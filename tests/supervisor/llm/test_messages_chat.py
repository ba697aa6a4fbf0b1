"""The Messages API as Chat Completions: requests (MD2), answers (MD2, MD3)."""

import contextlib
import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.documents import Object
from supervisor.llm import messages_writer
from supervisor.llm.answer_reader import parse_object
from supervisor.llm.messages_request import count_tokens_estimate, translate_request
from supervisor.llm.messages_writer import MessagesWriter
from supervisor.llm.prompt_size import IMAGE_TOKENS
from supervisor.llm.translation import Translation, UntranslatableError

CACHED = {"type": "ephemeral"}
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"},
}
IMAGE_PART = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64,iVBORw0K"},
}


def asking(*messages: Object, **fields: object) -> Object:
    """Return a request with these messages."""
    return {"model": "m", "max_tokens": 5, "messages": list(messages), **fields}


def user(*content: object) -> Object:
    return {"role": "user", "content": list(content)}


def assistant(*content: object) -> Object:
    return {"role": "assistant", "content": list(content)}


def text(said: str) -> Object:
    return {"type": "text", "text": said}


def tool_use(call: str, given: object, name: str = "Bash") -> Object:
    return {"type": "tool_use", "id": call, "name": name, "input": given}


def tool_result(call: str, content: object, **fields: object) -> Object:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **fields}


def tool_call(call: str, arguments: str, name: str = "Bash") -> Object:
    function = {"name": name, "arguments": arguments}
    return {"id": call, "type": "function", "function": function}


def messages_of(*messages: Object) -> object:
    return translate_request(asking(*messages)).body["messages"]


def body_of(**fields: object) -> Object:
    return translate_request(asking(user(text("hi")), **fields)).body


SCHEMA = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
TOOL = {"name": "Bash", "description": "Runs a command", "input_schema": SCHEMA}


def claude_code() -> Object:
    """Return a second request of Claude Code 2.1.197, with less text and fewer tools."""
    request: Object = {
        "model": "claude-opus-4-8",
        "messages": [
            user(text("<system-reminder>"), text("hi")),
            {"role": "system", "content": "Available agent types"},
            assistant(
                {"type": "thinking", "thinking": "hmm", "signature": ""},
                tool_use("call_1", {"command": "cat x"}),
                tool_use("call_2", {"file_path": "one.png"}, "Read"),
            ),
            user(
                {"tool_use_id": "call_2", "type": "tool_result", "content": [IMAGE]},
                tool_result("call_1", "No such file", is_error=True)
                | {"cache_control": CACHED},
            ),
        ],
        "system": [
            text("x-anthropic-billing-header: cc_version=2.1.197;"),
            text("You are a Claude agent") | {"cache_control": CACHED},
        ],
        "tools": [TOOL, {**TOOL, "name": "Read", "cache_control": CACHED}],
        "metadata": {"user_id": "{}"},
        "max_tokens": 32_000,
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {
            "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
        },
        "output_config": {"effort": "high"},
        "stream": True,
    }
    return copy.deepcopy(request)  # tests change it


# Requests


# spec MD2: what a real agent sends in each request, and what is left out of it.
def test_a_request_of_claude_code_is_translated() -> None:
    found = translate_request(claude_code())
    function = {"name": "Bash", "description": "Runs a command", "parameters": SCHEMA}
    system = "x-anthropic-billing-header: cc_version=2.1.197;\n\nYou are a Claude agent"
    calls = [
        tool_call("call_1", '{"command":"cat x"}'),
        tool_call("call_2", '{"file_path":"one.png"}', "Read"),
    ]
    assert found.body == {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "<system-reminder>\n\nhi"},
            {"role": "system", "content": "Available agent types"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {
                "role": "tool",
                "tool_call_id": "call_2",
                "content": "[Image 1 follows from the user.]",
            },
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": "The tool failed.\n\nNo such file",
            },
            {
                "role": "user",
                "content": [text("Shown by the result of call_2:"), IMAGE_PART],
            },
        ],
        "tools": [
            {"type": "function", "function": function},
            {"type": "function", "function": {**function, "name": "Read"}},
        ],
        "reasoning_effort": "high",
    }
    assert found.max_tokens == 32_000
    assert set(found.dropped) == {
        *("cache_control", "metadata", "context_management"),
        *("messages.thinking", "output_config.effort"),
    }


# spec MD2
def test_what_the_user_shows_becomes_parts() -> None:
    link = {"type": "image", "source": {"type": "url", "url": "https://a.example/b"}}
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "source": source, "title": "T", "context": None}
    assert messages_of(user(text("a"), IMAGE, link, document)) == [
        {
            "role": "user",
            "content": [
                text("a"),
                IMAGE_PART,
                {"type": "image_url", "image_url": {"url": "https://a.example/b"}},
                text("T\n\nbody"),
            ],
        }
    ]
    plain = {"role": "user", "content": "a\n\nbody"}
    assert messages_of(user(text("a"), {"type": "document", "source": source})) == [
        plain
    ]


# spec MD2: Chat wants the results directly behind the calls, whatever came in between.
def test_results_stand_directly_behind_their_calls() -> None:
    assert messages_of(
        user(text("go")),
        assistant(text("first")),
        assistant(tool_use("a", {})),
        assistant(tool_use("b", {"n": 1}), text("and")),
        user(text("early"), tool_result("b", [text("1"), text("2")])),
        {"role": "system", "content": [text("note")]},
        user(tool_result("a", None), text("late")),
        user(IMAGE),
        assistant(text("done")),
        {"role": "user", "content": "thanks"},
    ) == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "first\n\nand",
            "tool_calls": [tool_call("a", "{}"), tool_call("b", '{"n":1}')],
        },
        {"role": "tool", "tool_call_id": "b", "content": "1\n\n2"},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": "early"},
        {"role": "system", "content": "note"},
        {"role": "user", "content": [text("late"), IMAGE_PART]},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]


# spec MD2: Claude Code gives back as `input` what a model wrote instead of an object.
def test_an_input_that_is_no_object_goes_back_as_it_came() -> None:
    found: Any = messages_of(
        user(text("go")), assistant(tool_use("a", "x")), user(tool_result("a", "no"))
    )
    assert found[1]["tool_calls"] == [tool_call("a", '"x"')]


# spec MD2: null, and what the API does without the field, ask for nothing.
def test_a_field_that_asks_for_nothing_is_absent() -> None:
    block = {**text("hi"), "citations": None, "cache_control": None}
    found = translate_request(
        asking(
            user(block),
            system="",
            tools=[{**TOOL, "type": "custom", "eager_input_streaming": True}],
            stop_sequences=[],
            service_tier="auto",
            thinking=None,
            top_k=None,
            output_config={"format": None},
        )
    )
    assert found.body.keys() == {"messages", "tools"}
    assert found.body["messages"] == [{"role": "user", "content": "hi"}]
    assert found.dropped == ()


# spec MD2
def test_fields_that_chat_has_are_passed_on() -> None:
    found = body_of(
        system="be brief",
        temperature=0.5,
        top_p=1,
        stop_sequences=["END"],
        tools=[{**TOOL, "strict": True}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert found["messages"][0] == {"role": "system", "content": "be brief"}
    assert (found["temperature"], found["top_p"], found["stop"]) == (0.5, 1, ["END"])
    assert found["tools"][0]["function"]["strict"] is True
    assert found["response_format"]["json_schema"]["schema"] == SCHEMA


# spec MD2
@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        (
            {"type": "tool", "name": "Bash"},
            {"type": "function", "function": {"name": "Bash"}},
        ),
    ],
)
def test_a_choice_of_tools_is_translated(asked: Object, choice: object) -> None:
    found = body_of(tools=[TOOL], tool_choice=asked)
    assert found["tool_choice"] == choice
    assert "parallel_tool_calls" not in found
    single = {**asked, "disable_parallel_tool_use": True}
    found = body_of(tools=[TOOL], tool_choice=single)
    assert found["parallel_tool_calls"] is False


# spec MD2: providers refuse both fields where there are no tools.
def test_a_choice_without_tools_is_absent() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert body_of(tool_choice=choice).keys() == {"messages"}


def thinking(budget: int) -> Object:
    return {"type": "enabled", "budget_tokens": budget}


# spec MD2
@pytest.mark.parametrize(
    ("asked", "level", "effort", "dropped"),
    [
        (thinking(1024), None, "low", ()),
        (thinking(2048), None, "low", ()),
        (thinking(2049), None, "medium", ()),
        (thinking(16_000), None, "medium", ()),
        (thinking(16_001), "low", "high", ("output_config.effort",)),
        ({"type": "adaptive", "display": "summarized"}, None, "medium", ()),
        ({"type": "adaptive"}, "max", "high", ()),
        ({"type": "disabled"}, "max", "none", ("output_config.effort",)),
        (None, "low", "low", ()),
        (None, None, None, ()),
    ],
)
def test_thinking_becomes_an_effort(
    asked: object, level: object, effort: object, dropped: tuple[str, ...]
) -> None:
    request = asking(user(text("hi")), thinking=asked, output_config={"effort": level})
    found = translate_request(request)
    assert found.body.get("reasoning_effort") == effort
    assert found.dropped == dropped
    found = translate_request(request, has_reasoning=False)
    assert "reasoning_effort" not in found.body
    assert found.dropped == (
        *(["thinking"] if asked else []),
        *(["output_config.effort"] if level else []),
    )


def replaced(place: str, value: object) -> Object:
    """Return the request of Claude Code with another value at a place."""
    request = claude_code()
    at: Any = request
    *steps, last = [
        int(step) if step.isdigit() else step
        for step in place.replace("[", ".").replace("]", "").split(".")
    ]
    for step in steps:
        at = at[step]
    at[last] = value
    return request


# spec MD2: nothing is dropped in silence; the field is named.
@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("top_k", 5, "top_k"),
        ("service_tier", "standard_only", "service_tier"),
        ("mcp_servers", [{}], "mcp_servers"),
        ("n", 2, "n"),
        ("previous_response_id", "a", "previous_response_id"),
        ("background", True, "background"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", None, "max_tokens"),
        ("temperature", "hot", "temperature"),
        ("stop_sequences", ["a", 1], "stop_sequences[1]"),
        ("system", [IMAGE], "system[0].type"),
        ("system", False, "system"),
        ("messages", [], "messages"),
        ("messages[0].role", "tool", "messages[0].role"),
        ("messages[0].name", "a", "messages[0].name"),
        ("messages[0].content", None, "messages[0].content"),
        ("messages[0].content[0]", "a", "messages[0].content[0]"),
        ("messages[0].content[0].text", None, "messages[0].content[0].text"),
        ("messages[0].content[0].citations", [{}], "messages[0].content[0].citations"),
        (
            "messages[3].content[0].content[0].source.type",
            "file",
            "messages[3].content[0].content[0].source.type",
        ),
        ("messages[3].content[1].is_error", 1, "messages[3].content[1].is_error"),
        ("messages[2].content[1].id", None, "messages[2].content[1].id"),
        (
            "messages[3].content[0].content[0].source",
            {"type": "url", "url": "file:///etc/passwd"},
            "messages[3].content[0].content[0].source.url",
        ),
        ("messages[2].content[1].input", None, "messages[2].content[1].input"),
        (
            "messages[2].content[0].type",
            "server_tool_use",
            "messages[2].content[0].type",
        ),
        ("messages[0].content[0].type", "tool_use", "messages[0].content[0].type"),
        ("tools[1].type", "web_search_20250305", "tools[1].type"),
        ("tools[1].defer_loading", True, "tools[1].defer_loading"),
        ("tools[1].eager_input_streaming", False, "tools[1].eager_input_streaming"),
        ("tools[1].input_examples", [{}], "tools[1].input_examples"),
        ("tools[0].input_schema", None, "tools[0].input_schema"),
        ("tools", {}, "tools"),
        ("tool_choice", {"type": "some"}, "tool_choice.type"),
        ("thinking", {"type": "between_tools"}, "thinking.type"),
        ("thinking.budget_tokens", -1, "thinking.budget_tokens"),
        ("thinking.display", "some", "thinking.display"),
        ("output_config.effort", "huge", "output_config.effort"),
        ("output_config.task_budget", {"total": 1}, "output_config.task_budget"),
        ("output_config.format", {"type": "xml"}, "output_config.format.type"),
    ],
)
def test_what_has_no_form_is_refused_by_its_name(
    place: str, value: object, named: str
) -> None:
    with pytest.raises(UntranslatableError) as refused:
        translate_request(replaced(place, value))
    assert refused.value.field == named


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
PDF_PART = {
    "type": "file",
    "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="},
}


# spec MD2: Claude Code shows the model a PDF as a document, and sends it on from then on.
def test_a_pdf_becomes_a_file() -> None:
    document = {"type": "document", "source": PDF, "title": "a.pdf"}
    assert messages_of(user(text("look"), document)) == [
        {"role": "user", "content": [text("look"), PDF_PART]}
    ]
    untitled: Any = messages_of(user({"type": "document", "source": PDF}))
    assert untitled[0]["content"][0]["file"]["filename"] == "document.pdf"


# spec MD2: with most providers a result holds text alone.
def test_a_pdf_of_a_result_follows_from_the_user() -> None:
    document = {"type": "document", "source": PDF, "title": "a.pdf"}
    found: Any = messages_of(
        user(text("a")),
        assistant(tool_use("1", {})),
        user(tool_result("1", [IMAGE, document])),
    )
    said = "[Image 1 follows from the user.]\n\n[Document 2 follows from the user.]"
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "1", "content": said},
        {
            "role": "user",
            "content": [text("Shown by the result of 1:"), IMAGE_PART, PDF_PART],
        },
    ]


# spec MD2
@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"type": "url", "url": "https://a.example/b.pdf"}, "type"),
        ({"type": "file", "file_id": "file_1"}, "type"),
        ({"type": "content", "content": []}, "type"),
        ({**PDF, "media_type": "application/zip"}, "media_type"),
        ({**PDF, "data": None}, "data"),
    ],
)
def test_a_document_without_a_form_is_refused(
    source: dict[str, object], field: str
) -> None:
    with pytest.raises(UntranslatableError) as refused:
        messages_of(user({"type": "document", "source": source}))
    assert refused.value.field == f"messages[0].content[0].source.{field}"


# spec MD2: Chat would begin a new answer instead.
def test_a_text_that_the_model_shall_continue_is_refused() -> None:
    with pytest.raises(UntranslatableError) as refused:
        messages_of(user(text("JSON, please")), assistant(text("{")))
    assert refused.value.field == "messages[1].role"


# spec MD2
def test_a_request_in_which_nothing_is_said_is_refused() -> None:
    with pytest.raises(UntranslatableError) as refused:
        messages_of(user(), {"role": "user", "content": ""})
    assert refused.value.field == "messages"


# spec MD2
def test_a_forced_choice_without_tools_is_refused() -> None:
    with pytest.raises(UntranslatableError):
        body_of(tool_choice={"type": "any"})


# spec MD2
def test_a_refusal_is_short_whatever_was_asked() -> None:
    for place, value in (("k" * 5000, 1), ("tools[0].type", "k" * 5000)):
        with pytest.raises(UntranslatableError) as refused:
            translate_request(replaced(place, value))
        assert len(str(refused.value)) <= 160


# spec MD2
def test_an_input_that_is_too_deep_is_refused() -> None:
    given: Object = {}
    for _ in range(100_000):
        given = {"a": given}
    with pytest.raises(UntranslatableError) as refused:
        messages_of(user(text("go")), assistant(tool_use("a", given)))
    assert refused.value.field == "messages[1].content[0].input"
    while given:  # from within: to free it at one go needs as much of the stack
        given = given.pop("a")


WORDS = st.sampled_from(
    [
        *("type", "text", "image", "document", "tool_use", "tool_result", "base64"),
        *("url", "role", "user", "assistant", "content", "source", "data", "input"),
        *("id", "name", "media_type", "title", "any", "tool", "enabled", "custom"),
    ]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


def places_of(value: object) -> list[tuple[str | int, ...]]:
    """Return the way to each value within another."""
    steps: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        steps = list(value.items())
    elif isinstance(value, list):
        steps = list(enumerate(value))
    deeper = [(step, *way) for step, inner in steps for way in places_of(inner)]
    return [*((step,) for step, _ in steps), *deeper]


PLACES = places_of(claude_code())


# spec MD2: any JSON is translated or refused; a translation is JSON again.
@pytest.mark.slow
@given(place=st.sampled_from(PLACES), value=JSON, has_reasoning=st.booleans())
def test_any_request_is_translated_or_refused(
    place: tuple[str | int, ...], value: object, has_reasoning: bool
) -> None:
    request: Any = claude_code()
    at = request
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    before = copy.deepcopy(request)
    with contextlib.suppress(UntranslatableError):
        json.dumps(translate_request(request, has_reasoning=has_reasoning).body)
    assert request == before


# spec MD2
@pytest.mark.slow
@given(
    request=st.dictionaries(WORDS, JSON, max_size=4),
    messages=st.lists(JSON, max_size=3),
)
def test_any_json_is_translated_or_refused(request: Object, messages: object) -> None:
    for asked in (request, asking(), {**request, "messages": messages}):
        with contextlib.suppress(UntranslatableError):
            translate_request(asked)


# spec MD5: a third of the bytes; an image as an image.
def test_the_tokens_of_a_request_are_estimated() -> None:
    assert count_tokens_estimate({}) == 1
    request = asking(user(text("é" * 300)))
    size = len(json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode())
    assert count_tokens_estimate(request) == -(-size // 3)
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 3_000_000}
    result = tool_result("a", [{"type": "image", "source": source}])
    request = asking(user({"type": "image", "source": source}, result))
    assert 2 * IMAGE_TOKENS < count_tokens_estimate(request) < 2 * IMAGE_TOKENS + 200


# Answers


def writer(**fields: object) -> MessagesWriter:
    """Return the writer of an answer to a request with these fields; ids count up."""
    asked = asking(user(text("hi")), thinking={"type": "adaptive"}, **fields)
    ids = itertools.count(1)
    return MessagesWriter(
        asked,
        translate_request(asked),
        "claude-x",
        lambda prefix: f"{prefix}_{next(ids)}",
    )


def chunk(finish_reason: object = None, /, **delta: object) -> Object:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"object": "chat.completion.chunk", "choices": [choice]}


def piece(index: int, arguments: object = None, **fields: object) -> Object:
    """Return a chunk with a piece of a call; ``name`` is its function's."""
    function: Object = {"arguments": arguments}
    if "name" in fields:
        function["name"] = fields.pop("name")
    return chunk(tool_calls=[{"index": index, **fields, "function": function}])


def events_of(writing: MessagesWriter, *chunks: Object) -> list[Object]:
    """Return all events of an answer."""
    events = writing.begin()
    for each in chunks:
        events += writing.feed(each)
    return events + writing.finish(USAGE)


USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 7},
}
TOLD_USAGE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 7,
    "output_tokens": 4,
}
NO_USAGE = dict.fromkeys(TOLD_USAGE, 0)

TEXTS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "input_json_delta": ("tool_use", "partial_json"),
}


def message_of(events: list[Object]) -> Object:
    """Return the message that events make, as a client reads them; check their order."""
    first, ping, *between, last, end = events
    assert (first["type"], ping, end) == (
        "message_start",
        {"type": "ping"},
        {"type": "message_stop"},
    )
    assert last["type"] == "message_delta"
    message = copy.deepcopy(first["message"])
    assert (message["content"], message["stop_reason"]) == ([], None)
    blocks: list[Object] = []
    pieces: list[str] | None = None
    for event in between:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert pieces is None, "a block is open"
            blocks.append(copy.deepcopy(event["content_block"]))
            pieces = []
        assert pieces is not None, "no block is open"
        assert event["index"] == len(blocks) - 1
        if kind == "delta":
            of, key = TEXTS[event["delta"]["type"]]
            assert blocks[-1]["type"] == of
            pieces.append(event["delta"][key])
            assert pieces[-1]
        elif kind == "stop":
            whole = "".join(pieces)
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(whole) if whole.strip() else {}
            else:
                blocks[-1][blocks[-1]["type"]] += whole
            pieces = None
        else:
            assert kind == "start"
    assert pieces is None, "a block is not closed"
    usage = {**message["usage"], **last["usage"]}
    return {**message, "content": blocks, **last["delta"], "usage": usage}


def completion_of(finish_reason: str, **message: object) -> Object:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, **message},
        "finish_reason": finish_reason,
    }
    return {"object": "chat.completion", "choices": [choice], "usage": USAGE}


# spec MD3: to the letter.
def test_a_streamed_text_has_the_events_of_the_api() -> None:
    writing = writer()
    assert writing.begin() == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "claude-x",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": NO_USAGE,
            },
        },
        {"type": "ping"},
    ]
    assert writing.feed(chunk(role="assistant", content="")) == []
    begun = {"type": "text", "text": ""}
    assert writing.feed(chunk(content="He")) == [
        {"type": "content_block_start", "index": 0, "content_block": begun},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "He"},
        },
    ]
    assert writing.feed(chunk(content="llo")) == [
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "llo"},
        },
    ]
    assert writing.feed(chunk("stop")) == []
    assert writing.feed({"choices": [], "usage": USAGE}) == []
    assert writing.finish(USAGE) == [
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": TOLD_USAGE,
        },
        {"type": "message_stop"},
    ]


# spec MD3: one block is open at a time, and what can be told is told at once.
def test_calls_of_tools_are_told_one_after_the_other() -> None:
    writing = writer()
    events = writing.begin()
    events += writing.feed(chunk(reasoning_content="hmm"))
    events += writing.feed(chunk(content="Look"))
    for index in (0, 1):
        events += writing.feed(piece(index, "", id=f"call_{index}", name="Read"))
        for part in ('{"a": ', str(index), "}"):
            told = writing.feed(piece(index, part))
            assert told[-1]["delta"]["partial_json"] == part
            events += told
    events += writing.feed(chunk("tool_calls"))
    message = message_of(events + writing.finish(USAGE))
    assert message["content"] == [
        {"type": "thinking", "thinking": "hmm", "signature": ""},
        text("Look"),
        tool_use("call_0", {"a": 0}, "Read"),
        tool_use("call_1", {"a": 1}, "Read"),
    ]
    assert (message["stop_reason"], message["usage"]) == ("tool_use", TOLD_USAGE)


# spec MD3
def test_calls_that_come_mixed_are_told_apart() -> None:
    events = events_of(
        writer(),
        piece(1, '{"b"', id="b", name="Read"),
        piece(0, '{"a"', id="a", name="Bash"),
        piece(1, ": 1"),
        piece(0, ": 0}"),
        chunk(content="and so"),
        piece(1, "}"),
        chunk("tool_calls"),
    )
    assert message_of(events)["content"] == [
        tool_use("b", {"b": 1}, "Read"),
        tool_use("a", {"a": 0}),
        text("and so"),
    ]


# spec MD3: however many calls are mixed, time grows as the answer does.
def test_the_arguments_of_a_call_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[bytes] = []

    def parse(data: bytes) -> Object:
        looked_at.append(data)
        return parse_object(data)

    monkeypatch.setattr(messages_writer, "parse_object", parse)
    pieces = [piece(number, "[", name="Read") for number in range(9)]
    events_of(writer(), *pieces, *pieces, chunk("tool_calls"))
    assert looked_at == [b"["]


# spec MD3: an answer lacks no id, and a result names one call.
def test_what_a_provider_gives_no_id_of_its_own_gets_one() -> None:
    calls = [
        {"index": index, "id": call, "function": {"name": "Read", "arguments": None}}
        for index, call in enumerate([None, "a", "a"])
    ]
    message = message_of(events_of(writer(), chunk("stop", tool_calls=calls)))
    assert message["content"] == [
        tool_use(call, {}, "Read") for call in ("toolu_2", "a", "toolu_3")
    ]
    asked = asking(user(text("hi")))
    ids = {
        MessagesWriter(asked, Translation({}), "m").begin()[0]["message"]["id"]
        for _ in range(2)
    }
    assert len(ids) == 2
    assert all(found.startswith("msg_") for found in ids)


# spec MD2: a client that did not ask for thoughts may not know what to do with them.
@pytest.mark.parametrize(
    "asked", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}]
)
def test_thoughts_are_shown_where_they_were_asked_for(asked: object) -> None:
    said = {"reasoning": "hmm", "content": "yes"}
    shown = message_of(events_of(writer(), chunk("stop", **said)))
    assert [block["type"] for block in shown["content"]] == ["thinking", "text"]
    request = asking(user(text("hi")), thinking=asked)
    for message in (
        MessagesWriter(request, Translation({}), "m").whole(
            completion_of("stop", **said)
        ),
        message_of(
            events_of(
                MessagesWriter(request, Translation({}), "m"), chunk("stop", **said)
            )
        ),
    ):
        assert message["content"] == [text("yes")]


CALLS = [tool_call("a", "{}")]


# spec MD2
@pytest.mark.parametrize(
    ("finish_reason", "message", "reason"),
    [
        ("stop", {"content": "a"}, "end_turn"),
        ("length", {"content": "a"}, "max_tokens"),
        ("tool_calls", {"tool_calls": CALLS}, "tool_use"),
        ("stop", {"tool_calls": CALLS}, "tool_use"),
        ("tool_calls", {"content": "a"}, "end_turn"),
        ("content_filter", {"content": "a"}, "refusal"),
        ("stop", {"refusal": "I will not"}, "refusal"),
    ],
)
def test_the_reason_of_the_end_is_translated(
    finish_reason: str, message: Object, reason: str
) -> None:
    whole = writer().whole(completion_of(finish_reason, **message))
    assert whole["stop_reason"] == reason
    streamed = message_of(events_of(writer(), chunk(finish_reason, **message)))
    assert streamed == whole


# spec MD2: vLLM and SGLang tell which stop sequence it was.
@pytest.mark.parametrize("key", ["stop_reason", "matched_stop"])
def test_a_stop_sequence_that_is_told_is_passed_on(key: str) -> None:
    for told, reason in (("END", "stop_sequence"), (128_009, "end_turn")):
        completion = completion_of("stop", content="a")
        completion["choices"][0][key] = told
        message = writer(stop_sequences=["END"]).whole(completion)
        assert message["stop_reason"] == reason
        assert message["stop_sequence"] == (told if told == "END" else None)


# spec MD2: of several choices the first, which some number with null.
def test_the_choice_that_was_asked_for_is_the_answer() -> None:
    completion = completion_of("stop", content="yes")
    completion["choices"][0]["index"] = None
    completion["choices"].insert(0, {"index": 1, "message": {"content": "no"}})
    assert writer().whole(completion)["content"] == [text("yes")]


# spec MD2: content may come as a list of parts.
def test_parts_of_text_are_one_text() -> None:
    parts = [text("a"), {"type": "other"}, text("b")]
    assert writer().whole(completion_of("stop", content=parts))["content"] == [
        text("ab")
    ]


# spec MD3: no broken answer ends as a whole one.
@pytest.mark.parametrize(
    "broken",
    [
        [chunk("error", content="a")],
        [piece(0, "{}", id="a"), chunk("tool_calls")],
        [piece(0, {"a": 1}, name="Read"), chunk("tool_calls")],
        [
            piece(0, "{}", name="Read"),
            piece(1, "{}", name="Read"),
            piece(0, ' {"a": 1}'),
            chunk("tool_calls"),
        ],
    ],
)
def test_an_answer_without_a_form_ends_as_an_error(broken: list[Object]) -> None:
    events = events_of(writer(), *broken)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in {event["type"] for event in events}


# spec MD2
@pytest.mark.parametrize(
    ("finish_reason", "call"),
    [
        ("abort", tool_call("a", "{}")),
        ("tool_calls", tool_call("a", "{", "Read")),
        ("tool_calls", tool_call("a", "[]", "Read")),
        ("tool_calls", tool_call("a", '{"a":' * 200 + "1" + "}" * 200, "Read")),
        ("tool_calls", tool_call("a", "{}", "")),
        ("length", tool_call("a", "{}", "")),
    ],
)
def test_an_answer_without_a_form_is_refused(finish_reason: str, call: Object) -> None:
    with pytest.raises(ValueError, match=r"^(a call|the arguments|the provider)"):
        writer().whole(completion_of(finish_reason, tool_calls=[call]))


# spec MD2: half a call would be another call.
def test_a_call_that_the_bound_cut_off_is_left_out() -> None:
    calls = [*CALLS, tool_call("b", '{"command": "rm -r')]
    message = writer().whole(completion_of("length", tool_calls=calls))
    assert message["content"] == [tool_use("a", {})]
    assert message["stop_reason"] == "max_tokens"


# spec MD3
def test_an_error_in_the_middle_is_the_last_event() -> None:
    assert writer().fail("overloaded_error", "busy") == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    ]


# spec MD3
def test_more_that_is_cached_than_read_is_told_as_read() -> None:
    usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 7}}
    told = writer().finish(usage)[0]["usage"]
    assert (told["input_tokens"], told["cache_read_input_tokens"]) == (0, 5)


# spec MD3
def test_an_answer_without_usage_is_told_as_none_used() -> None:
    writing = writer()
    assert writing.finish(None)[0]["usage"] == NO_USAGE


def cut(draw: Callable[..., Any], whole: str) -> list[str]:
    """Return a text in pieces, at places that are drawn."""
    places = draw(st.lists(st.integers(0, len(whole)), max_size=4))
    ends = [0, *sorted(places), len(whole)]
    return [whole[start:end] for start, end in itertools.pairwise(ends)]


@st.composite
def answers(draw: st.DrawFn) -> tuple[Object, list[Object]]:
    """Draw a completion, and chunks of it: calls mixed, each cut anywhere."""
    thought, said = draw(st.text(max_size=9)), draw(st.text(max_size=9))
    given = draw(
        st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=3)
    )
    calls = [
        tool_call(f"call_{number}", json.dumps(each), f"tool_{number}")
        for number, each in enumerate(given)
    ]
    message = {"reasoning_content": thought, "content": said, "tool_calls": calls}
    chunks = [chunk(reasoning_content=part) for part in cut(draw, thought)]
    chunks += [chunk(content=part) for part in cut(draw, said)]
    queues = []
    for number, call in enumerate(calls):
        chunks.append(piece(number, "", id=call["id"], name=call["function"]["name"]))
        parts = cut(draw, call["function"]["arguments"])
        queues.append([piece(number, part) for part in parts])
    while queues := [queue for queue in queues if queue]:
        chunks.append(draw(st.sampled_from(queues)).pop(0))
    reason = "tool_calls" if calls else draw(st.sampled_from(["stop", "length"]))
    return completion_of(reason, **message), [*chunks, chunk(reason)]


# spec MD3: however a stream is cut and mixed, its message is that of the whole answer.
@pytest.mark.slow
@given(answer=answers())
def test_any_pieces_make_the_same_message(answer: tuple[Object, list[Object]]) -> None:
    completion, chunks = answer
    assert message_of(events_of(writer(), *chunks)) == writer().whole(completion)


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        *(None, True, 0, 1.5, "", "a", "{}", " ", '{"a": 1}', {}, {"text": "a"}),
        *([], ["a"], [{"text": "b"}], [{"text": 1}], [[]], [{"function": "a"}]),
    ]
)
ODD_FUNCTIONS = ODD | st.fixed_dictionaries({"name": ODD, "arguments": ODD})
ODD_CALLS = st.fixed_dictionaries(
    {"index": st.integers(0, 2) | ODD, "id": ODD, "function": ODD_FUNCTIONS}
)
ODD_CHUNKS = st.dictionaries(st.sampled_from(["choices", "delta"]), ODD) | st.builds(
    chunk,
    ODD | st.sampled_from(["stop", "length", "tool_calls"]),
    content=ODD,
    reasoning=ODD,
    refusal=ODD,
    tool_calls=st.lists(ODD_CALLS, max_size=2) | ODD,
)


# spec MD3: whatever a provider sends, the events are in order.
@pytest.mark.slow
@given(chunks=st.lists(ODD_CHUNKS, max_size=5))
def test_any_chunks_make_events_in_order(chunks: list[Object]) -> None:
    events = events_of(writer(), *chunks)
    json.dumps(events)
    if events[-1]["type"] == "error":
        events[-1:] = [
            {"type": "message_delta", "delta": {}, "usage": {}},
            {"type": "message_stop"},
        ]
    for event in events:  # arguments may be no JSON: Claude Code tells the model
        if event["type"] == "content_block_delta" and "partial_json" in event["delta"]:
            event["delta"]["partial_json"] = " "
    message_of(events)
