"""Answers in the form of Responses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from demo.provider.answer import CREATED, Answer, Call, Event, Usage

ENCRYPTED = "ZW5jcnlwdGVkIGJ5IHRoZSBzdGFuZC1pbg=="
ECHOED = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
    "previous_response_id", "reasoning", "service_tier", "store", "temperature", "text",
    "tool_choice", "tools", "top_p", "truncation", "user",
)  # fmt: skip
"""Fields of a request that its answer repeats."""

DEFAULTS = {
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "metadata": {},
    "store": True,
}

Json = dict[str, Any]


def whole(answer: Answer) -> Json:
    """Return the answer in one piece."""
    items = [] if "empty" in answer.orders else [_item(one) for one in _parts(answer)]
    return _ended(answer, items, answer.usage())


def events(answer: Answer) -> Iterator[Event]:
    """Yield the answer as a stream, with rising sequence numbers."""
    for number, event in enumerate(_stream(answer)):
        yield event.with_field("sequence_number", number)


def refusal(status: int, text: str, code: str | None) -> Json:
    """Return the body of a refusal."""
    del status
    kind = code or "stand_in"
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


def failure(answer: Answer, text: str, code: str | None) -> Event:
    """Return the event that tells of an error in the middle."""
    code = code or "server_error"
    if answer.orders.get("error") == "failed":
        error = {"code": code, "message": text}
        response = {**_response(answer), "status": "failed", "error": error}
        return _event("response.failed", response=response)
    return _event("error", code=code, message=text, param=None)


def ping() -> Event | None:
    """Return a sign of life; None where the API has no event for it."""
    return None


@dataclass
class _Part:
    """One item of the output, while it is made.

    Attributes:
        id: of the item.
        start: the item, empty.
        pieces: of its text.
        call: the call that it is, if any.
        text: its words so far.
    """

    id: str
    start: Json
    pieces: Iterable[str]
    call: Call | None = None
    text: list[str] = field(default_factory=list)


def _parts(answer: Answer) -> Iterator[_Part]:
    number = answer.number
    if answer.thoughts or answer.served.hidden:
        name = f"rs_{number}"
        start: Json = {"id": name, "type": "reasoning", "summary": []}
        if "reasoning.encrypted_content" in (answer.question.body.get("include") or ()):
            start["encrypted_content"] = ENCRYPTED
        yield _Part(name, start, answer.thoughts)
    if answer.words or not answer.calls:
        name = f"msg_{number}"
        start = {"id": name, "type": "message", "status": "in_progress"}
        yield _Part(name, {**start, "role": "assistant", "content": []}, answer.words)
    for place, call in enumerate(answer.calls):
        yield _call_part(f"{number}_{place}", call)


def _call_part(number: str, call: Call) -> _Part:
    common = {"status": "in_progress", "call_id": call.id, "name": call.tool.name}
    if call.tool.namespace is not None:
        common["namespace"] = call.tool.namespace
    if call.tool.is_custom:
        name = f"ctc_{number}"
        start: Json = {"id": name, "type": "custom_tool_call", **common, "input": ""}
        return _Part(name, start, call.pieces, call)
    name = f"fc_{number}"
    start = {"id": name, "type": "function_call", **common, "arguments": ""}
    return _Part(name, start, call.pieces, call)


def _stream(answer: Answer) -> Iterator[Event]:
    yield _event("response.created", response=_response(answer))
    yield _event("response.in_progress", response=_response(answer))
    sent = 0
    items = []
    for index, part in enumerate(_parts(answer)):
        # A copy, for an answer is changed no more once it was sent.
        start = dict(part.start)
        yield _event("response.output_item.added", output_index=index, item=start)
        for event in _said(part, index):
            yield event
            sent += event.is_piece
        item = _item(part)
        items.append(item)
        yield _event("response.output_item.done", output_index=index, item=item)
    response = _ended(answer, items, answer.usage(sent))
    yield _event(f"response.{response['status']}", response=response)


def _said(part: _Part, index: int) -> Iterator[Event]:
    """Yield the events between an item's first and last one."""
    place: Json = {"item_id": part.id, "output_index": index}
    match part.start["type"]:
        case "reasoning":
            yield from _thought(part, {**place, "summary_index": 0})
        case "message":
            yield from _spoken(part, {**place, "content_index": 0})
        case "custom_tool_call":
            name = "response.custom_tool_call_input"
            yield from _deltas(part, name, place)
            yield _event(f"{name}.done", **place, input="".join(part.text))
        case _:
            name = "response.function_call_arguments"
            yield from _deltas(part, name, place)
            done = {"name": part.start["name"], "arguments": "".join(part.text)}
            yield _event(f"{name}.done", **place, **done)


def _thought(part: _Part, place: Json) -> Iterator[Event]:
    if not part.pieces:
        return  # reasoning that is not shown has no summary
    name = "response.reasoning_summary"
    empty = {"type": "summary_text", "text": ""}
    yield _event(f"{name}_part.added", **place, part=empty)
    for piece in part.pieces:
        part.text.append(piece)
        value = {"type": f"{name}_text.delta", **place, "delta": piece}
        yield Event(value, f"{name}_text.delta", is_piece=True, is_thought=True)
    text = "".join(part.text)
    yield _event(f"{name}_text.done", **place, text=text)
    yield _event(f"{name}_part.done", **place, part={**empty, "text": text})


def _spoken(part: _Part, place: Json) -> Iterator[Event]:
    empty = _output_text("")
    yield _event("response.content_part.added", **place, part=empty)
    yield from _deltas(part, "response.output_text", {**place, "logprobs": []})
    text = "".join(part.text)
    yield _event("response.output_text.done", **place, text=text, logprobs=[])
    yield _event("response.content_part.done", **place, part=_output_text(text))


def _deltas(part: _Part, name: str, place: Json) -> Iterator[Event]:
    for piece in part.pieces:
        part.text.append(piece)
        value = {"type": f"{name}.delta", **place, "delta": piece}
        yield Event(value, f"{name}.delta", is_piece=True)


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(part: _Part) -> Json:
    """Return an item as a whole."""
    text = "".join(part.text or part.pieces)
    match part.start["type"]:
        case "reasoning":
            summary = [{"type": "summary_text", "text": text}] if text else []
            return {**part.start, "summary": summary}
        case "message":
            content = [_output_text(text)]
            return {**part.start, "status": "completed", "content": content}
        case "custom_tool_call":
            return {**part.start, "status": "completed", "input": text}
        case _:
            return {**part.start, "status": "completed", "arguments": text}


def _response(answer: Answer) -> Json:
    body = answer.question.body
    echoed = {name: body.get(name, DEFAULTS.get(name)) for name in ECHOED}
    return {
        "id": f"resp_stand_in_{answer.number}",
        "object": "response",
        "created_at": CREATED,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": answer.model,
        "output": [],
        "usage": None,
        **echoed,
    }


def _ended(answer: Answer, items: list[Json], usage: Usage | None) -> Json:
    response = {**_response(answer), "output": items, "usage": _usage(usage)}
    status = "incomplete" if answer.is_short else "completed"
    response["status"] = answer.orders.get("stop", status)
    if response["status"] == "incomplete":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    return response


def _usage(usage: Usage | None) -> Json | None:
    if usage is None:
        return None
    found = {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
    if usage.written:
        found["input_tokens_details"]["cache_write_tokens"] = usage.written
    if isinstance(usage.input, int):
        found["total_tokens"] = usage.input + usage.output
    return found


def _event(name: str, /, **more: Any) -> Event:
    return Event({"type": name, **more}, name)
