"""A provider's answer: bytes in, one checked ``chat.completion`` out (spec L7, L15).

What it is: sans-IO.  A stream of server-sent events is put together; a body that is one
JSON object, from a server that does not stream, is taken as it is.  What it is not: who
fetches the bytes (``provider``), or what they cost (``gateway``).

Rules of this file.

1. Told apart by what comes, not by what the headers claim: JSON begins with ``{``.
2. Memory is bounded by ``MAX_ANSWER_BYTES``, whatever comes (I9).
3. Nothing is passed on that has not been looked at; what is unknown is kept.
4. The time that an answer takes grows as its length does, whatever it holds.
5. What one call takes apart, with nothing else of the host going on, is bounded by
   ``MAX_VALUES``.
"""

from __future__ import annotations

import msgspec

from supervisor.llm.pieces import JOINED, Object, extend, joined, merge
from supervisor.llm.quota import Usage, tokens_of

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Longest answer of a provider: a model of today writes some 500 KiB at most, and the
events around each token of it take ten times that."""

MAX_DEPTH = 100
"""Most lists and objects within one another; what answers hold is some ten deep.  Whoever
walks through one (to join, redact, encode) then needs no more of the stack than is there."""

MAX_VALUES = 250_000
"""Most of the bytes ``[``, ``{`` and ``,`` in one piece of JSON, those of its texts with
them: no more values than that are in it, and to count these takes a fiftieth of the time.
So many keys take 0.1 s; 16 MiB of empty lists took 1.6 s, in each of which nobody else of the
host has a turn.  An event holds a token.  A server that does not stream has one piece for
all: the 128,000 tokens of a long answer hold half as many as numbers in a list, and
log-probabilities of 5 alternatives are told for 6,000 tokens of it."""

PIECE_BYTES = 100
"""What a piece of text takes beside its characters."""

FORMS = 6
"""In so many forms a text of the model is there at the end: in pieces, joined, as JSON,
searched for secrets. As many are there of an answer that comes as one piece of JSON."""

PROBABILITIES_BYTES = 10
"""What a byte of log-probabilities takes once it is decoded: they are kept as they come."""

DONE = b"[DONE]"

_OUTLINE = b"[{,"

_OWN_WAY = frozenset({"index", "delta", "message", "logprobs"})
"""What of a choice is not simply the newest one."""


class AnswerError(Exception):
    """What came is no answer; the text says why, in one line."""


class ProviderError(Exception):
    """The provider says that it failed, in the middle of its answer."""


class Answer:
    """Puts one answer together.

    Attributes:
        events: how many pieces came.
        output_bytes: text that the model has written so far.
        output_pieces: in how many pieces it came; a piece is a token at least.
        kept_bytes: memory that what is kept of its events takes, beside that text.
    """

    def __init__(self) -> None:
        self.events = 0
        self.output_bytes = 0
        self.output_pieces = 0
        self.kept_bytes = 0
        self._size = 0
        self._pending = bytearray()
        self._searched = 0  # of what is pending: it holds no LF
        self._data: list[bytes] = []
        self._is_plain: bool | None = None
        self._is_done = False
        self._head: Object = {}
        self._choices: dict[int, Object] = {}
        self._usage: object = None

    @property
    def has_begun(self) -> bool:
        """Whether anything of an answer has come."""
        return self._size > 0

    @property
    def pending_bytes(self) -> int:
        """How long what has come of an event is, or of an answer in one piece."""
        return len(self._pending)

    @property
    def held_bytes(self) -> int:
        """How much memory it takes, its other forms at the end included."""
        texts = self.pending_bytes + self.output_bytes
        return FORMS * texts + PIECE_BYTES * self.output_pieces + self.kept_bytes

    # Taking it in

    def feed(self, data: bytes) -> list[Object]:
        """Take bytes; return the events that they complete, in order.

        Raises:
            AnswerError: it is too long, or no answer.
            ProviderError: an event says that the provider failed.
        """
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            raise AnswerError(f"longer than {MAX_ANSWER_BYTES} bytes")
        pending = self._pending
        pending += data
        if self._is_plain is None:
            start = bytes(pending[:64]).lstrip()
            if not start:
                return []
            self._is_plain = start.startswith(b"{")
        if self._is_plain:
            return []
        return self._take_lines()

    def _take_lines(self) -> list[Object]:
        pending = self._pending
        end = pending.rfind(b"\n", self._searched)
        self._searched = len(pending)
        if end < 0:
            return []
        self._searched -= end + 1
        block = bytes(pending[:end])
        del pending[: end + 1]
        events = []
        for raw in block.split(b"\n"):
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                text = b"\n".join(self._data)
                self._data.clear()
                event = self._take_event(text)
                if event is not None:
                    events.append(event)
        return events

    def _take_event(self, text: bytes) -> Object | None:
        if self._is_done or text == DONE:
            self._is_done = True
            return None
        event = parse_object(text)
        _refuse_error(event)
        self.events += 1
        for key, value in event.items():
            if key not in ("choices", "usage", "object") and value is not None:
                self._head[key] = value
        if event.get("usage") is not None:
            self._usage = event["usage"]
        choices = event.get("choices")
        if isinstance(choices, list):
            for choice in choices:
                self._take_choice(choice, len(text))
        elif choices is not None:
            raise AnswerError("choices are not a list")
        return event

    def _take_choice(self, piece: object, event_bytes: int) -> None:
        if not isinstance(piece, dict):
            raise AnswerError("a choice is not an object")
        index = piece.get("index", 0)
        if not isinstance(index, int):
            raise AnswerError("a choice has no number")
        known = self._choices.setdefault(index, {"index": index, "message": {}})
        for key, value in piece.items():
            if key not in _OWN_WAY and value is not None:
                known[key] = value
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
        """Add what a choice says: a part of its message, or for once all of it."""
        if isinstance(piece.get("message"), dict):
            known["message"] = {}
        for said in (piece.get("message"), piece.get("delta")):
            if isinstance(said, dict):
                self._count(said)
                merge(known["message"], said)

    def _count(self, value: object) -> None:
        """Add up the text of a delta."""
        size = _text_bytes(value)
        if size:
            self.output_bytes += size
            self.output_pieces += 1

    # What it came to

    def finish(self) -> Object:
        """Return the whole answer, checked.

        Raises:
            AnswerError: it is incomplete, or lacks what an answer has.
            ProviderError: it is an error instead.
        """
        if self._is_plain:
            found = parse_object(bytes(self._pending))
            _refuse_error(found)
            self._usage = found.get("usage")
            self._count(_messages_of(found))
            _check(found)
            return found
        if not self._size or self._is_plain is None:
            raise AnswerError("nothing came")
        if not self._choices and not self._usage:
            raise AnswerError("no event of a completion came")
        finished = all(c.get("finish_reason") for c in self._choices.values())
        if not self._is_done and not (self._choices and finished):
            raise AnswerError("the stream ended before its end")
        whole = {"object": "chat.completion", **self._head}
        choices = []
        for _, choice in sorted(self._choices.items()):
            choice["message"] = joined(choice["message"])
            _tidy(choice)
            choices.append(choice)
        whole["choices"] = choices
        if self._usage is not None:
            whole["usage"] = self._usage
        _check(whole)
        return whole

    def usage(self) -> Usage | None:
        """Return the use that the provider reported; None if it has not.

        Raises:
            AnswerError: it is not numbers.
        """
        return usage_of(self._usage)

    def estimate(self, prompt_tokens: int, most: int | None) -> Usage:
        """Return what to charge where nothing usable was reported (spec L10).

        Args:
            prompt_tokens: the estimate for the messages.
            most: what the output was held to; None for no bound.
        """
        output = max(self.output_pieces, tokens_of(self.output_bytes))
        return Usage(prompt_tokens, output if most is None else min(output, most))


def usage_of(reported: object) -> Usage | None:
    """Return a provider's ``usage`` as numbers; None if there is none.

    Raises:
        AnswerError: one of them is no number of tokens.
    """
    if reported is None:
        return None
    if not isinstance(reported, dict):
        raise AnswerError("usage is not an object")
    details = reported.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    numbers = []
    for name, value in (
        ("prompt_tokens", reported.get("prompt_tokens")),
        ("completion_tokens", reported.get("completion_tokens", 0)),
        ("cached_tokens", 0 if cached is None else cached),
    ):
        # A bool is an int to Python, and nothing else here is a count of tokens.
        if type(value) is not int or not 0 <= value < 1 << 53:
            raise AnswerError(f"usage: {name} is no number of tokens")
        numbers.append(value)
    return Usage(*numbers)


def first_text(completion: Object) -> str:
    """Return the text of an answer's first choice (spec L4); empty if it has none."""
    content = completion["choices"][0]["message"].get("content")
    return content if isinstance(content, str) else ""


def parse_object(text: bytes) -> Object:
    """Return a JSON object of a provider, if it is neither too long nor too deep.

    Raises:
        AnswerError: it is, or it is none.
    """
    outline = len(text) - len(text.translate(None, _OUTLINE))
    if outline > MAX_VALUES:
        raise AnswerError(f"more than {MAX_VALUES} values in one piece")
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError) as why:
        raise AnswerError(f"not JSON: {why}") from None
    if not isinstance(found, dict):
        raise AnswerError("not a JSON object")
    if outline > MAX_DEPTH and _is_deep(found):
        raise AnswerError(f"more than {MAX_DEPTH} values within one another")
    return found


def _is_deep(value: object) -> bool:
    """Tell whether something lies deeper in a value than ``MAX_DEPTH``."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined] # a list
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse_error(found: Object) -> None:
    failed = found.get("error")
    if failed:
        text = failed.get("message") if isinstance(failed, dict) else failed
        raise ProviderError(str(text))


def _check(completion: Object) -> None:
    """Raise unless it has what spec L15 asks for."""
    choices = completion.get("choices")
    if not isinstance(choices, list) or not choices:
        raise AnswerError("no choices")
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict) or not message:
            raise AnswerError("a choice without a message")
        if not isinstance(message.get("content"), str | list | None):
            raise AnswerError("a message whose content is no text")
    usage_of(completion.get("usage"))


def _messages_of(completion: Object) -> list[object]:
    choices = completion.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice.get("message") for choice in choices if isinstance(choice, dict)]


def _text_bytes(value: object) -> int:
    """Return how many bytes of text the model wrote into a delta or a message."""
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
    """Make a choice that came in pieces look like one that came whole."""
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
