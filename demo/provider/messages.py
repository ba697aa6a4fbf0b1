"""Answers in the form of Messages."""

from collections.abc import Iterator
from typing import Any

from demo.provider.answer import Answer, Event, Usage

SIGNATURE = "c2lnbmVkIGJ5IHRoZSBzdGFuZC1pbg=="
LEAST_BUDGET = 1024

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""The type of error that goes with a status; every other is `api_error`."""


def fault(body: dict[str, Any], headers: dict[str, str]) -> str | None:
    """Return why the real API would refuse a request; None if it would not."""
    if "anthropic-version" not in headers:
        return "anthropic-version: header is required"
    if not body.get("messages"):
        return "messages: at least one message is required"
    return None


def bound_fault(body: dict[str, Any]) -> str | None:
    """Return what is wrong with the bound of an answer; None if nothing."""
    bound = body.get("max_tokens")
    if not isinstance(bound, int):
        return "max_tokens: Field required"
    if bound < 1:
        return "max_tokens: must be at least 1"
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        return None
    budget = thinking.get("budget_tokens")
    if not isinstance(budget, int) or budget < LEAST_BUDGET:
        return f"thinking.budget_tokens: must be at least {LEAST_BUDGET}"
    if bound <= budget:
        return "max_tokens: must be greater than thinking.budget_tokens"
    return None


def whole(answer: Answer) -> dict[str, Any]:
    """Return the answer in one piece."""
    content = [_filled(answer, start, pieces) for start, pieces in _blocks(answer)]
    message = _message(answer)
    message["content"] = [] if "empty" in answer.orders else content
    message["stop_reason"] = _reason(answer)
    usage = answer.usage()
    message["usage"] = usage and _usage(usage, usage.output)
    return message


def events(answer: Answer) -> Iterator[Event]:
    """Yield the answer as a stream."""
    message = _message(answer)
    usage = answer.usage(0)
    if usage is not None:
        message["usage"] = _usage(usage, 1 if isinstance(usage.output, int) else "one")
    yield _event("message_start", message=message)
    sent = 0
    index = -1
    for index, (start, pieces) in enumerate(_blocks(answer)):
        yield _event("content_block_start", index=index, content_block=start)
        if index == 0:
            yield _event("ping")
        kind = start["type"]
        if kind == "tool_use":
            yield _delta(index, "input_json_delta", partial_json="")
        for piece in pieces:
            yield _piece(index, kind, piece)
            sent += 1
        if kind == "thinking":
            yield _delta(index, "signature_delta", signature=SIGNATURE)
        yield _event("content_block_stop", index=index)
    delta = {"stop_reason": _reason(answer), "stop_sequence": None}
    more: dict[str, Any] = {}
    usage = answer.usage(sent)
    if usage is not None:
        more["usage"] = _usage(usage, usage.output)
    yield _event("message_delta", delta=delta, **more)
    yield _event("message_stop")


def refusal(status: int, text: str, code: str | None) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = code or ERRORS.get(status, "api_error")
    error = {"type": kind, "message": text}
    return {"type": "error", "error": error, "request_id": "req_stand_in"}


def failure(answer: Answer, text: str, code: str | None) -> Event:
    """Return the event that tells of an error in the middle."""
    del answer
    return Event(refusal(529, text, code), "error")


def ping() -> Event | None:
    """Return a sign of life."""
    return _event("ping")


def _message(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_stand_in_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(answer: Answer) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the blocks of the content: how each starts, and its pieces."""
    if answer.thoughts:
        start = {"type": "thinking", "thinking": "", "signature": ""}
        yield start, answer.thoughts
    if answer.words or not answer.calls:
        yield {"type": "text", "text": ""}, answer.words
    for call in answer.calls:
        name = {"id": f"toolu_{call.id}", "name": call.tool.name, "input": {}}
        yield {"type": "tool_use", **name}, call.pieces


def _filled(answer: Answer, start: dict[str, Any], pieces: Any) -> dict[str, Any]:
    match start["type"]:
        case "tool_use":
            called = {f"toolu_{call.id}": call.input for call in answer.calls}
            return {**start, "input": called[start["id"]]}
        case "thinking":
            return {**start, "thinking": "".join(pieces), "signature": SIGNATURE}
        case _:
            return {**start, "text": "".join(pieces)}


def _piece(index: int, kind: str, piece: str) -> Event:
    match kind:
        case "tool_use":
            return _delta(index, "input_json_delta", is_piece=True, partial_json=piece)
        case "thinking":
            return _delta(
                index, "thinking_delta", is_piece=True, is_thought=True, thinking=piece
            )
        case _:
            return _delta(index, "text_delta", is_piece=True, text=piece)


def _delta(
    index: int,
    kind: str,
    *,
    is_piece: bool = False,
    is_thought: bool = False,
    **more: str,
) -> Event:
    name = "content_block_delta"
    value = {"type": name, "index": index, "delta": {"type": kind, **more}}
    return Event(value, name, is_piece, is_thought)


def _event(name: str, /, **more: Any) -> Event:
    return Event({"type": name, **more}, name)


def _reason(answer: Answer) -> str:
    if "stop" in answer.orders:
        return answer.orders["stop"]
    if answer.calls:
        return "tool_use"
    return "max_tokens" if answer.is_short else "end_turn"


def _usage(usage: Usage, output: Any) -> dict[str, Any]:
    """Return the usage: what is cached stands beside `input_tokens`, not in it."""
    plain = usage.input
    if isinstance(plain, int):
        plain = max(0, plain - (usage.cached or 0) - usage.written)
    return {
        "input_tokens": plain,
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": output,
    }
