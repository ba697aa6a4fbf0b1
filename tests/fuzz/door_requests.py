"""Requests of the doors with changes: read in every way, sent on, and translated."""

import copy
import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any
from unittest.mock import patch

from tests.fuzz.door_turns import turns
from tests.fuzz.door_words import change, encoded, redactor
from tests.fuzz.fuzz_protocol import Plan

MOST_VALUES = 50_000
BOUND = 3000


TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}

CHAT: dict[str, Any] = {
    "model": "m", "stream": True, "max_tokens": 99, "max_completion_tokens": 98,
    "stream_options": {"include_usage": True}, "temperature": 0.5, "stop": ["a"],
    "reasoning_effort": "low", "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "run", "parameters": TOOL}}],
    "messages": [
        {"role": "system", "content": "one"},
        {"role": "user", "content": [
            {"type": "text", "text": "two"},
            {"type": "image_url", "image_url": {"url": "https://a/b"}},
        ]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "run", "arguments": '{"command":"ls"}'}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "three"},
    ],
}  # fmt: skip

RESPONSES: dict[str, Any] = {
    "model": "m", "stream": True, "store": False, "max_output_tokens": 99,
    "instructions": "one", "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "temperature": 1,
    "reasoning": {"effort": "low", "summary": "auto"}, "service_tier": "auto",
    "text": {"verbosity": "low", "format": {
        "type": "json_schema", "name": "f", "schema": TOOL, "strict": True}},
    "parallel_tool_calls": True, "tool_choice": "auto",
    "tools": [
        {"type": "function", "name": "run", "parameters": TOOL, "strict": False},
        {"type": "custom", "name": "patch",
         "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
        {"type": "namespace", "name": "a", "description": "d", "tools": [
            {"type": "function", "name": "b", "parameters": TOOL}]},
        {"type": "web_search"},
    ],
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [
            {"type": "custom", "name": "more"}, {"type": "web_search"}]},
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": [
            {"type": "input_text", "text": "three"},
            {"type": "input_image", "image_url": "data:image/png;base64,QQ=="}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "four", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "run", "arguments": "{}"},
        {"type": "function_call", "call_id": "call_2", "name": "b", "namespace": "a",
         "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "call_3", "name": "patch", "input": "p"},
        {"type": "function_call_output", "call_id": "call_1", "output": "five"},
        {"type": "function_call_output", "call_id": "call_2", "output": [
            {"type": "input_text", "text": "six"},
            {"type": "input_image", "image_url": "https://a/b"}]},
        {"type": "custom_tool_call_output", "call_id": "call_3", "output": "seven"},
    ],
}  # fmt: skip

MESSAGES: dict[str, Any] = {
    "model": "m", "stream": True, "max_tokens": 32_000, "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999}, "context_management": {},
    "system": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}],
    "stop_sequences": ["a"], "temperature": 1, "top_p": 0.5,
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": TOOL}},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "tools": [{"name": "run", "description": "d", "input_schema": TOOL},
              {"type": "web_search_20250305", "name": "web_search"}],
    "messages": [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "three"},
            {"type": "tool_use", "id": "call_1", "name": "run", "input": {"command": "ls"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": [
                {"type": "text", "text": "four"},
                {"type": "image", "source": {
                    "type": "base64", "media_type": "image/png", "data": "QQ=="}}]},
            {"type": "document", "title": "t", "source": {
                "type": "text", "media_type": "text/plain", "data": "five"}},
            {"type": "image", "source": {"type": "url", "url": "https://a/b"}},
            {"type": "text", "text": "six"},
        ]},
    ],
}  # fmt: skip

EMBEDDINGS: dict[str, Any] = {"model": "m", "input": ["one", "two"], "dimensions": 8}

REQUESTS = (CHAT, RESPONSES, MESSAGES, EMBEDDINGS)


def check_request(plan: Plan) -> None:
    """Read a request in every way, and send it on and translate it."""
    from supervisor.llm import apis  # noqa: PLC0415 - see main()

    number = plan.byte() % len(REQUESTS)
    value = copy.deepcopy(REQUESTS[number])
    for _ in range(plan.byte() % 8):
        change(plan, value)
    data = encoded(plan, value)
    expected = _read_strictly(data)
    found = turns().take("a request is read", _read, data)
    assert (found is None) == (expected is None), "other readers see it otherwise"
    with patch.multiple(
        "supervisor.llm.json_request", INLINE_BYTES=0, LONG_TEXT_BYTES=3
    ):
        by_parts = _read(data)
    assert (found is None) == (by_parts is None), "as a long request it is another"
    if found is None or by_parts is None:
        return
    _check_short(data, found.value)
    assert by_parts.members == found.members
    assert _is_same(by_parts.whole_value(), found.value)
    assert _is_same(found.value, expected)
    for name, inner in found.value.items():
        assert _is_same(json.loads(found.text_of(name)), inner)
    api = (apis.CHAT, apis.RESPONSES, apis.MESSAGES, apis.EMBEDDINGS)[number]
    hosted = ("refuse", "drop", "pass")[plan.byte() % 3]
    try:
        apis.check_request(api, found.value, hosted)
    except apis.BadRequestError as why:
        check_refusal(str(why))
        return
    try:
        apis.check_native(api, found.value, hosted)
    except apis.BadRequestError as why:
        check_refusal(str(why))
    else:
        _check_native(api, found, hosted, plan.byte())
    if api in (apis.RESPONSES, apis.MESSAGES):
        _check_translated(api, found, hosted)


def _check_short(data: bytes, value: Any) -> None:
    """Check that what is read in the Trio thread has few values (spec MD8)."""
    from supervisor.llm import json_request  # noqa: PLC0415 - see main()

    with patch.object(json_request, "INLINE_VALUES", 20):
        if json_request.is_short(data):
            assert _values(value) <= 2 * json_request.INLINE_VALUES


def _values(value: Any) -> int:
    """Return how many values and keys there are in one, itself included."""
    found, left = 0, [value]
    while left:
        one = left.pop()
        found += 1
        if isinstance(one, dict):
            found += len(one)
            left += one.values()
        elif isinstance(one, list):
            left += one
    return found


def _read(data: bytes) -> Any:
    """Return a request; None if it is refused."""
    from supervisor.llm.json_request import BadJsonError, read_request  # noqa: PLC0415

    try:
        return read_request(data, MOST_VALUES)
    except BadJsonError as why:
        check_refusal(str(why))
        return None


def check_refusal(text: str) -> None:
    """Check that a refusal says something, and not all of what was asked."""
    assert 0 < len(text) < 400


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether values are the same, types and orders of members included."""
    return json.dumps(one) == json.dumps(other)


def _read_strictly(data: bytes) -> Any:
    """Return the object that other readers take data for; None if they may differ."""
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_pairs,
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_constant,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _depth(value) <= 100 else None


def _pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(found)) != len(found):
        raise ValueError("a key stands twice")
    return dict(found)


def _integer(text: str) -> int:
    if len(text) > 25 or not -(1 << 63) <= int(text) < 1 << 64:
        raise ValueError("an integer overflows")
    return int(text)


def _real(text: str) -> float:
    found = float(text)
    if len(text) > 400 or found in (float("inf"), float("-inf")):
        raise ValueError("a number overflows")
    return found


def _constant(text: str) -> float:
    raise ValueError(text)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return depth


@cache
def _model() -> Any:
    from supervisor.llm.apis import CHAT, EMBEDDINGS, MESSAGES, RESPONSES  # noqa: PLC0415
    from supervisor.llm.gateway import Model  # noqa: PLC0415
    from supervisor.llm.section import Weights  # noqa: PLC0415

    nobody: Any = None
    speaks = (CHAT, RESPONSES, MESSAGES, EMBEDDINGS)
    return Model("name", "its-id", nobody, Weights(), apis=speaks)


def _check_native(api: Any, request: Any, hosted: str, byte: int) -> None:
    """Send a request on: nothing of it changes but what may."""
    from supervisor.llm import apis  # noqa: PLC0415
    from supervisor.llm.json_request import read_request  # noqa: PLC0415
    from supervisor.llm.native_request import encode_native  # noqa: PLC0415
    from supervisor.llm.prompt_size import size_of_request  # noqa: PLC0415

    bound = (None, 1, 1024, BOUND)[byte % 4]
    temperature = 0.25 if byte & 4 and api is apis.CHAT else None
    size = turns().take("a request is measured", size_of_request, api, request)
    assert size.size_bytes == len(request.data)
    assert 0 <= size.other_parts <= len(request.data)
    assert size.estimated_tokens <= size.likely_tokens() <= size.most_tokens()
    apis.has_reasoning(api, request.value)
    drops = hosted == "drop"
    data = encode_native(
        api,
        _model(),
        request,
        bound,
        temperature=temperature,
        drops_hosted_tools=drops,
    )
    sent = read_request(data, MOST_VALUES).value
    asked = request.value
    may_change = {"model", "stream", "stream_options", "thinking", *api.bounds}
    may_change |= {"tools", "input"} if hosted == "drop" else set()
    may_change |= {"temperature"} if temperature is not None else set()
    for name in (asked.keys() | sent.keys()) - may_change:
        assert _is_same(asked.get(name), sent.get(name)), name
    assert sent["model"] == "its-id"
    if hosted == "drop":  # nothing is left to leave out, and nothing to refuse
        apis.check_request(api, sent, "refuse")
        apis.check_native(api, sent, "refuse")
    told = [sent[name] for name in api.bounds if name in sent]
    assert len(told) <= 1 or None in told
    if api.bounds and bound is not None:
        assert max(filter(None, told)) <= bound
    if api is apis.CHAT:
        assert sent["stream"] is True
        assert sent["stream_options"] == {"include_usage": True}


def _check_translated(api: Any, request: Any, hosted: str) -> None:
    """Translate a request: no text of it is lost, and it stays in proportion."""
    from supervisor.llm.apis import MESSAGES  # noqa: PLC0415
    from supervisor.llm.endpoint_call import translate  # noqa: PLC0415
    from supervisor.llm.messages_request import count_tokens_estimate  # noqa: PLC0415
    from supervisor.llm.prompt_size import size_of_body  # noqa: PLC0415
    from supervisor.llm.translation import UntranslatableError  # noqa: PLC0415

    asked = request.whole_value()
    before = json.dumps(asked)
    if api is MESSAGES:
        assert count_tokens_estimate(asked) >= 1
    try:
        make = partial(
            translate,
            api,
            asked,
            "m",
            redactor(),
            has_reasoning=hosted == "pass",
            drops_hosted_tools=hosted == "drop",
        )
        found, _ = turns().take("a request is translated", make)
    except UntranslatableError as why:
        check_refusal(str(why))
        return
    assert json.dumps(asked) == before, "the request was changed"
    size = size_of_body(found.body)
    assert size.size_bytes < 2000 + 20 * len(request.data)
    said = json.dumps(found.body["messages"])
    for text in _texts_of(asked):
        assert json.dumps(text)[1:-1] in said, text


def _texts_of(asked: Any) -> Iterator[str]:
    """Yield each text that a request says in a part of its own."""
    kinds = ("text", "input_text", "output_text")
    level: list[Any] = [asked.get(name) for name in ("messages", "input", "system")]
    for one in level:  # grows while it is walked
        if isinstance(one, list):
            level += one
        elif isinstance(one, dict):
            if one.get("type") in kinds and isinstance(one.get("text"), str):
                yield one["text"]
            # Members that are dropped, or no part: a call's arguments.
            if one.get("type") not in ("reasoning", "thinking", "tool_use"):
                level += [one.get("content"), one.get("output")]
