"""Answers in the form of Chat Completions."""

from collections.abc import Iterator
from typing import Any

from demo.provider.answer import CREATED, Answer, Call, Event, Usage

DONE = "[DONE]"


def whole(answer: Answer) -> dict[str, Any]:
    """Return the answer in one piece."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(answer.words)}
    if answer.calls:
        message["content"] = None
        message["tool_calls"] = [_call(call) for call in answer.calls]
    if answer.thoughts:
        message["reasoning_content"] = "".join(answer.thoughts)
    choice = {"index": 0, "message": message, "finish_reason": _reason(answer)}
    if answer.question.body.get("logprobs"):
        choice["logprobs"] = {"content": [_logprob(word) for word in answer.words]}
    choices = [] if "empty" in answer.orders else [choice]
    head = _head(answer, "chat.completion")
    return {**head, "choices": choices, "usage": _usage(answer.usage())}


def events(answer: Answer) -> Iterator[Event]:
    """Yield the answer as a stream."""
    yield _chunk(answer, {"role": "assistant", "content": ""})
    sent = 0
    for thought in answer.thoughts:
        delta = {"reasoning_content": thought}
        yield _chunk(answer, delta, is_piece=True, is_thought=True)
        sent += 1
    for word in answer.words:
        yield _chunk(answer, {"content": word}, is_piece=True)
        sent += 1
    for index, call in enumerate(answer.calls):
        # The first piece of the arguments comes with the name.
        first, *more = call.pieces
        part = _call(call)
        part["function"]["arguments"] = first
        yield _chunk(answer, {"tool_calls": [{"index": index, **part}]}, is_piece=True)
        for piece in more:
            part = {"index": index, "function": {"arguments": piece}}
            yield _chunk(answer, {"tool_calls": [part]}, is_piece=True)
        sent += len(call.pieces)
    yield _chunk(answer, {}, _reason(answer))
    options = answer.question.body.get("stream_options") or {}
    usage = answer.usage(sent)
    if options.get("include_usage") and usage is not None:
        head = _head(answer, "chat.completion.chunk")
        yield Event({**head, "choices": [], "usage": _usage(usage)})
    yield Event(DONE)


def refusal(status: int, text: str, code: str | None) -> dict[str, Any]:
    """Return the body of a refusal."""
    del status
    return {"error": {"message": text, "type": code or "stand_in", "code": code}}


def failure(answer: Answer, text: str, code: str | None) -> Event:
    """Return the event that tells of an error in the middle."""
    del answer
    return Event(refusal(500, text, code))


def ping() -> Event | None:
    """Return a sign of life; None where the API has no event for it."""
    return None


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-stand-in",
        "object": kind,
        "created": CREATED,
        "model": answer.model,
    }


def _reason(answer: Answer) -> str:
    if "stop" in answer.orders:
        return answer.orders["stop"]
    if answer.calls:
        return "tool_calls"
    return "length" if answer.is_short else "stop"


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    found: dict[str, Any] = {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
    }
    if isinstance(usage.input, int):
        found["total_tokens"] = usage.input + usage.output
    if usage.tells_cache:
        found["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    if usage.written:
        found["prompt_tokens_details"]["cache_write_tokens"] = usage.written
    if usage.reasoning:
        found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return found


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.tool.name, "arguments": call.text}
    return {"id": call.id, "type": "function", "function": function}


def _chunk(
    answer: Answer,
    delta: dict[str, Any],
    reason: str | None = None,
    *,
    is_piece: bool = False,
    is_thought: bool = False,
) -> Event:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    if answer.question.body.get("logprobs") and "content" in delta:
        choice["logprobs"] = {"content": [_logprob(delta["content"])]}
    chunk = {**_head(answer, "chat.completion.chunk"), "choices": [choice]}
    return Event(chunk, is_piece=is_piece, is_thought=is_thought)


def _logprob(word: str) -> dict[str, Any]:
    return {"token": word, "logprob": -0.5}
