"""An answer of Chat Completions: events in, one checked ``chat.completion`` out.

Rules of this file (spec L7, L15).

1. Only checked content is passed on; unknown members are kept.
2. The completion of a stream equals that of an answer in one piece.
3. Only immutable values of an event are kept, for a writer later changes the events.
4. Adding a piece takes time in proportion to the piece, not to the message.
5. Kept values are counted: each takes memory beside its text.
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

if TYPE_CHECKING:
    from hostlib.documents import Object
    from supervisor.llm.quota import Usage

PROBABILITIES_BYTES = 10
"""Memory of a decoded byte of log-probabilities; they are kept as they come."""

JOINED = frozenset({"content", "refusal", "arguments", "reasoning_content"})
"""Texts that come in pieces; other texts of a delta are complete."""

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
                self._keep(_put(self._head, key, value))
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
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = {"index": index, "message": {}}
            check_count(self._choices, MAX_CHOICES, "choices")
        for key, value in piece.items():
            if key not in _OWN_WAY and value is not None:
                self._keep(_put(known, key, value))
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
                self._count_texts(said)
                self._keep(_merge(known["message"], said))
        _check_calls(known["message"])

    def _take_plain(self, found: Object) -> None:
        _refuse_error(found)
        self._usage = found.get("usage")
        self._count_texts(_messages_of(found))
        _check(found)

    def _count_texts(self, said: object) -> None:
        """Count the model's texts in a delta, or in messages, as one piece."""
        size = _text_bytes(said)
        self.output_bytes += size
        self.output_pieces += size > 0

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
            choice["message"] = _join_texts(choice["message"])
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


# Merging the pieces of a stream


def _merge(known: Object, delta: Object) -> int:
    """Add a delta to a message, without keeping the delta; return the new kept values."""
    size = len(known)
    more = 0
    for key, value in delta.items():
        before = known.get(key)
        if value is None:
            known.setdefault(key, None)
        elif isinstance(value, str) and key in JOINED:
            if not isinstance(before, _Pieces):
                before = known[key] = _Pieces()
            before.append(value)
        elif isinstance(value, dict):
            if not isinstance(before, dict):
                before = known[key] = {}
            more += _merge(before, value)
        elif isinstance(value, list):
            known[key], items = _merge_list(before, value)
            more += items
        else:
            known[key] = value
    return more + len(known) - size


def _put(known: Object, key: str, value: object) -> int:
    """Set a member; return the number of new kept values."""
    more = _values_in(value) - (_values_in(known[key]) if key in known else 0)
    known[key] = value
    return more


def _values_in(value: object) -> int:
    """Return the number of values in a value, itself included."""
    count = 0
    ahead = [value]
    while ahead:
        one = ahead.pop()
        count += 1
        if isinstance(one, dict):
            ahead += one.values()
        elif isinstance(one, list):
            ahead += one
    return count


class _Pieces(list[str]):
    """The pieces of a text: adding to a string would copy it each time."""


def _join_texts(value: object) -> object:
    """Return a message with its texts in one piece."""
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _join_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_join_texts(inner) for inner in value]
    return value


class _Items(list[object]):
    """A list that comes in pieces, and its items by their ``index``."""

    def __init__(self) -> None:
        super().__init__()
        self.by_index: dict[int | str, Object] = {}


def _merge_list(before: object, pieces: list[object]) -> tuple[_Items, int]:
    """Add pieces to a list; one with an ``index`` is merged into the item with it.

    Returns:
        (the list, the number of new kept values).
    """
    known = before if isinstance(before, _Items) else _Items()
    more = 0
    for piece in pieces:
        if not isinstance(piece, dict):
            known.append(piece)
            more += _values_in(piece)
            continue
        place = piece.get("index")
        item = known.by_index.get(place) if isinstance(place, int | str) else None
        if item is None:
            item = {}
            known.append(item)
            more += 1
            if isinstance(place, int | str):
                known.by_index[place] = item
        more += _merge(item, piece)
    return known, more


def extend(known: Object, piece: Object) -> None:
    """Add the lists of a piece to the known ones; other members are replaced."""
    for key, value in piece.items():
        if isinstance(value, list):
            if not isinstance(known.get(key), list):
                known[key] = []
            known[key].extend(value)
        elif value is not None:
            known[key] = value
