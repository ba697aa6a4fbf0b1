"""Parts of inputs of the doors: words, and changes of values and of JSON."""

import base64
import copy
import json
from functools import cache
from typing import Any

from tests.fuzz.fuzz_protocol import Plan

KEY = "sk-fuzz/+key-0123456789"
BASE64 = base64.b64encode(KEY.encode()).decode()

WORDS: tuple[Any, ...] = (
    *("", "text", "message", "user", "assistant", "system", "tool", "auto", "none"),
    *("function", "custom", "web_search_preview", "mcp_x", "namespace", "run", "a__b"),
    *("input_text", "output_text", "input_image", "image", "image_url", "document"),
    *("base64", "url", "data:image/png;base64,QQ==", "file:x", "tool_use", "refusal"),
    *(
        "tool_result",
        "function_call",
        "function_call_output",
        "item_reference",
        "call_1",
    ),
    *("reasoning", "thinking", "redacted_thinking", "enabled", "disabled", "adaptive"),
    *(
        "low",
        "json_schema",
        "json_object",
        "grammar",
        "allowed_tools",
        "stop",
        "length",
    ),
    *("content_filter", "tool_calls", "ping", "error", "message_start", "message_stop"),
    *("content_block_start", "content_block_delta", "content_block_stop", "keepalive"),
    *("message_delta", "response.created", "response.completed", "response.failed"),
    *("response.output_item.added", "response.output_item.done", "response.new.delta"),
    *(
        KEY,
        KEY[:9],
        KEY[9:],
        BASE64,
        "\ud800",
        "\U0001f600",
        "\\",
        '"',
        "\x00",
        "x" * 300,
    ),
    *(None, True, False, 0, 1, -1, 2, 40, 1024, 1 << 53, 1 << 63, 1 << 64, 10**30, 0.5),
    *(1e300, float("inf"), float("nan"), [], {}, [[]], {"": None}, {"type": "text"}),
)
"""Values that something is replaced by."""

NAMES = (
    *("type", "text", "content", "role", "name", "input", "output", "tools", "model"),
    *("id", "call_id", "tool_use_id", "arguments", "function", "parameters", "strict"),
    *("input_schema", "source", "data", "media_type", "image_url", "file_id", "detail"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "thinking", "stream"),
    *("budget_tokens", "reasoning", "effort", "reasoning_effort", "n", "background"),
    *("previous_response_id", "system", "instructions", "messages", "tool_choice"),
    *(
        "cache_control",
        "stop_sequences",
        "response_format",
        "format",
        "schema",
        "usage",
    ),
    *(
        "index",
        "delta",
        "choices",
        "finish_reason",
        "logprobs",
        "partial_json",
        "error",
    ),
    *("output_index", "content_index", "summary_index", "item", "response", "message"),
    *(
        "content_block",
        "prompt_tokens",
        "output_tokens",
        "input_tokens",
        "reasoning_content",
    ),
    *("signature", "citations", "allowed_callers", "namespace", "refusal", "code"),
)
"""Names that members get."""


# Something that is changed


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return each place in a value: what holds it, and its key or number."""
    found = []
    level = [value]
    for holder in level:  # grows while it is walked
        keys = holder.keys() if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                level.append(holder[key])
    return found


def change(plan: Plan, value: Any) -> None:
    """Change one place of a value as a plan says."""
    places = places_in(value)
    if not places:
        return
    holder, key = places[(plan.byte() << 8 | plan.byte()) % len(places)]
    new = copy.deepcopy(WORDS[plan.byte() % len(WORDS)])
    match plan.byte() % 6:
        case 0 | 1:
            holder[key] = new
        case 2:
            del holder[key]
        case 3:
            _add(plan, holder, new)
        case 4:
            other, place = places[plan.byte() % len(places)]
            holder[key] = copy.deepcopy(other[place])
        case _:
            if not isinstance(holder[key], dict | list):
                holder[key] = [holder[key]]
            _add(plan, holder[key], new)


def _add(plan: Plan, holder: Any, new: Any) -> None:
    if isinstance(holder, dict):
        holder[NAMES[plan.byte() % len(NAMES)]] = new
    else:
        holder.insert(plan.byte(), new)


def encoded(plan: Plan, value: Any) -> bytes:
    """Return a value as JSON, in one of its writings, perhaps with faults."""
    how = plan.byte()
    text = json.dumps(
        value,
        ensure_ascii=bool(how & 1),
        indent=1 if how & 2 else None,
        separators=(",", ":") if how & 4 else None,
    )
    data = bytearray(text.encode(errors="surrogatepass"))
    for _ in range(how >> 3 & 3):
        place = (plan.byte() << 8 | plan.byte()) % (len(data) + 1)
        match plan.byte() % 4:
            case 0:
                data[place : place + 1] = bytes([plan.byte()])
            case 1:
                del data[place : place + plan.byte()]
            case 2:  # a member twice
                size = plan.byte()
                data[place:place] = data[place : place + size]
            case _:
                data[place:place] = FRAGMENTS[plan.byte() % len(FRAGMENTS)]
    return bytes(data)


FRAGMENTS = (
    b'"model":1,', b',"model":1', b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-0",
    b"\\ud800", b"\\ud83d\\ude00", b"\xff", b"\xef\xbb\xbf", b"\x00", b"[" * 200,
    b'{"":' * 120, b"\\", b'"', b"}", b" ", b"\x0c", b"\xed\xa0\x80", b"1.0E+2", b"01",
)  # fmt: skip


@cache
def redactor() -> Any:
    """Return what knows the key."""
    from hostlib.redact import Redactor  # noqa: PLC0415

    return Redactor([KEY])
