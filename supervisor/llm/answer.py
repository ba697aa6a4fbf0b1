"""An answer of Chat Completions: events in, one checked ``chat.completion`` out.

Rules of this file (spec L7, L15).

1. Only checked content is passed on; unknown members are kept.
2. The completion of a stream equals that of an answer in one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.llm.answer_reader import (
    MAX_CHOICES,
    MAX_ITEMS,
    MAX_VALUES,
    VALUE_BYTES,
    AnswerError,
    AnswerReader,
    ProviderError,
    check_count,
    read_usage,
)
from supervisor.llm.pieces import JOINED, Object, extend, join_texts, merge, put

if TYPE_CHECKING:
    from supervisor.llm.quota import Usage

PROBABILITIES_BYTES = 10
"""Memory of a decoded byte of log-probabilities; they are kept as they come."""

_OWN_WAY = frozenset({"index", "delta", "message", "logprobs"})
"""Members of a choice that are merged; for others the newest value counts."""


class Answer(AnswerReader):
    """Assembles one completion."""

    ends_with_done = True

    def __init__(self) -> None:
        super().__init__()
        self._head: Object = {}
        self._choices: dict[int, Object] = {}
        self._usage: object = None
        self._values = 0  # kept values, without texts of the model and probabilities

    # Input

    def _take_event(self, event: Object, size_bytes: int) -> list[Object]:
        _refuse_error(event)
        if "choices" not in event and "type" in event:
            raise AnswerError("an event of another API than Chat Completions")
        for key, value in event.items():
            if key not in ("choices", "usage", "object") and value is not None:
                self._keep(put(self._head, key, value))
        if event.get("usage") is not None:
            self._usage = event["usage"]
        choices = event.get("choices")
        if isinstance(choices, list):
            for choice in choices:
                self._take_choice(choice, size_bytes)
        elif choices is not None:
            raise AnswerError("choices are not a list")
        return [event]

    def _keep(self, values: int) -> None:
        """Add to the number of kept values."""
        self._values += values
        self.kept_bytes += VALUE_BYTES * values
        if self._values > MAX_VALUES:
            raise AnswerError(f"more than {MAX_VALUES} values in all pieces")

    def _take_choice(self, piece: object, event_bytes: int) -> None:
        if not isinstance(piece, dict):
            raise AnswerError("a choice is not an object")
        index = piece.get("index", 0)
        if not isinstance(index, int):
            raise AnswerError("a choice has no number")
        known = self._choices.setdefault(index, {"index": index, "message": {}})
        check_count(self._choices, MAX_CHOICES, "choices")
        for key, value in piece.items():
            if key not in _OWN_WAY and value is not None:
                self._keep(put(known, key, value))
        self._take_said(known, piece)
        logprobs = piece.get("logprobs")
        if not isinstance(logprobs, dict):
            known.setdefault("logprobs", None)
            return
        if not isinstance(known.get("logprobs"), dict):
            known["logprobs"] = {}
        self.kept_bytes += PROBABILITIES_BYTES * event_bytes
        extend(known["logprobs"], logprobs)

    def _take_said(self, known: Object, piece: Object) -> None:
        """Add the content of a choice: a part of its message, or all of it."""
        if isinstance(piece.get("message"), dict):
            known["message"] = {}
        for said in (piece.get("message"), piece.get("delta")):
            if isinstance(said, dict):
                self.add_output(_text_bytes(said))
                self._keep(merge(known["message"], said))
        _check_calls(known["message"])

    def _take_plain(self, found: Object) -> None:
        _refuse_error(found)
        self._usage = found.get("usage")
        self.add_output(_text_bytes(_messages_of(found)))
        _check(found)

    # Result

    def _finish_stream(self) -> Object:
        if not self._choices and not self._usage:
            raise AnswerError("no event of a completion came")
        finished = all(c.get("finish_reason") for c in self._choices.values())
        if not self._is_done and not (self._choices and finished):
            raise AnswerError("the stream ended before its end")
        whole = {"object": "chat.completion", **self._head}
        choices = []
        for _, choice in sorted(self._choices.items()):
            choice["message"] = join_texts(choice["message"])
            _tidy(choice)
            choices.append(choice)
        whole["choices"] = choices
        if self._usage is not None:
            whole["usage"] = self._usage
        _check(whole)
        return whole

    def usage(self) -> Usage | None:
        """See ``AnswerReader``."""
        return usage_of(self._usage)


def usage_of(reported: object) -> Usage | None:
    """Return the ``usage`` of a completion; see ``read_usage``."""
    return read_usage(reported, "prompt_tokens", "completion_tokens")


def first_text(completion: Object) -> str:
    """Return the text of an answer's first choice (spec L4); empty without one."""
    content = completion["choices"][0]["message"].get("content")
    return content if isinstance(content, str) else ""


def _refuse_error(found: Object) -> None:
    failed = found.get("error")
    if failed:
        table = failed if isinstance(failed, dict) else {"message": failed}
        code = table.get("code") or table.get("type") or ""
        raise ProviderError(str(table.get("message")), str(code))


def _check(completion: Object) -> None:
    """Raise unless a completion has the members of spec L15."""
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices:
        raise AnswerError("no choices")
    check_count(choices, MAX_CHOICES, "choices")
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict) or not message:
            raise AnswerError("a choice without a message")
        if not isinstance(message.get("content"), str | list | None):
            raise AnswerError("a message whose content is no text")
        _check_calls(message)
    usage_of(completion.get("usage"))


def _check_calls(message: Object) -> None:
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        check_count(calls, MAX_ITEMS, "calls of tools")


def _messages_of(completion: Object) -> list[object]:
    choices = completion.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice.get("message") for choice in choices if isinstance(choice, dict)]


def _text_bytes(value: object) -> int:
    """Return the bytes of text that the model wrote into a delta or a message."""
    total = 0
    ahead = [value]
    for item in ahead:  # grows while it is walked
        if isinstance(item, list):
            ahead.extend(item)
        elif isinstance(item, dict):
            for key, inner in item.items():
                if isinstance(inner, str):
                    if key in JOINED:
                        total += len(inner.encode())
                else:
                    ahead.append(inner)
    return total


def _tidy(choice: Object) -> None:
    """Turn a choice of a stream into the form of one that came in one piece."""
    choice.setdefault("finish_reason", None)
    message = choice["message"]
    if message:
        message.setdefault("role", "assistant")
        message.setdefault("content", None)
    calls = message.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        places = [call.pop("index", None) for call in calls]
        if all(isinstance(place, int) for place in places):
            ordered = sorted(range(len(calls)), key=places.__getitem__)
            message["tool_calls"] = [calls[number] for number in ordered]
