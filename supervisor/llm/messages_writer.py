"""An answer of Chat Completions as an answer of the Messages API (spec MD2, MD3).

Rules of this file.

1. One block is open at a time, and each opened block is closed.  Chat may mix the calls of
   tools: pieces of a later block wait until the open one is complete.
2. An answer that cannot be translated ends as an error, never as a complete answer.
3. A text is joined once, not with each piece.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from supervisor.llm.answer import usage_of
from supervisor.llm.answer_reader import AnswerError, parse_object
from supervisor.llm.ids import random_id
from supervisor.llm.quota import Usage
from supervisor.llm.translation import (
    choice_in,
    content_in,
    reasoning_in,
    text_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostlib.documents import Object
    from supervisor.llm.translation import Translation

_STOP_REASONS = {
    "stop": "end_turn",
    "eos": "end_turn",
    "eos_token": "end_turn",
    "length": "max_tokens",
    "model_length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
"""``finish_reason`` -> ``stop_reason``; "eos" and "model" are dialects."""

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Kind of block -> (type of its deltas, key of their text)."""

_NAMELESS = "a call has no name"


@dataclass(slots=True)
class _Block:
    """A block of the answer so far.

    Attributes:
        kind: its type.
        waiting: pieces of its text that are in no event yet.
        told: pieces of a call's arguments that are in events.
        id, name: id and name of a call; empty until known.
        is_open: an event has begun it.
        is_closed: an event has ended it.
        was_examined: its arguments were parsed, which is done once.
    """

    kind: str
    waiting: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    id: str = ""
    name: str = ""
    is_open: bool = False
    is_closed: bool = False
    was_examined: bool = False

    def is_complete(self) -> bool:
        """Return whether a block that is followed by another one is complete.

        If arguments are no JSON although the next call has begun, pieces of both are
        mixed, and only the end of the answer completes them.
        """
        if self.kind != "tool_use":
            return True
        if self.was_examined:
            return False
        self.was_examined = True
        return self.arguments(empty=None) is not None

    def tell(self) -> str:
        """Return the text that is in no event yet, and mark it as told."""
        if self.kind == "tool_use":
            self.told += self.waiting
        text = "".join(self.waiting)
        self.waiting.clear()
        return text

    def arguments(self, empty: Object | None) -> Object | None:
        """Return the arguments of a call; None if they are no JSON object.

        Args:
            empty: the result if there are no arguments.
        """
        text = "".join([*self.told, *self.waiting])
        if not text.strip():
            return empty
        try:
            return parse_object(text.encode())
        except AnswerError:
            return None


class MessagesWriter:
    """Writes one answer, as a stream (``begin``, ``feed``, ``finish``) or whole.

    Args:
        asked: the request of the Messages API.
        translation: its translation.
        model: the name of the model in the answer.
        make_id: makes an id with a prefix.
    """

    def __init__(
        self,
        asked: Object,
        translation: Translation,
        model: str,
        make_id: Callable[[str], str] = random_id,
    ) -> None:
        self._model = model
        self._make_id = make_id
        self._shows_thinking = _shows_thinking(asked.get("thinking"))
        self._stops = translation.body.get("stop", [])
        self._blocks: deque[_Block] = deque()
        self._calls: dict[int, _Block] = {}
        self._ids: set[str] = set()
        self._index = 0
        self._reason = "end_turn"
        self._stop: str | None = None
        self._has_calls = self._is_refusal = False
        self._fault = ""

    # A stream

    def begin(self) -> list[Object]:
        """Return the events before the model's first text."""
        message = self._message([], None, None)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def feed(self, chunk: Object) -> list[Object]:
        """Return the events for a ``chat.completion.chunk``."""
        self._take(chunk, "delta")
        return self._events(is_end=False)

    def finish(self, usage: Object | None) -> list[Object]:
        """Return the events that end the answer, after its last chunk.

        Args:
            usage: the provider's usage, in the form of Chat Completions.
        """
        events = self._events(is_end=True)
        if self._fault:
            return events + self.fail("api_error", self._fault)
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop}
        end = {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        return [*events, end, {"type": "message_stop"}]

    def fail(self, kind: str, message: str) -> list[Object]:
        """Return the last event of a failed answer."""
        return [{"type": "error", "error": {"type": kind, "message": message}}]

    # A whole answer

    def whole(self, completion: Object) -> Object:
        """Return a ``chat.completion`` as a message.

        A call that the bound on the output has cut off is left out; the stop reason shows
        it.

        Raises:
            ValueError: it cannot be translated; the text says why.
        """
        self._take(completion, "message")
        reason = self._stop_reason()
        content = []
        for block in self._blocks:
            if block.kind != "tool_use":
                _, key = _DELTAS[block.kind]
                content.append({**self._empty(block), key: "".join(block.waiting)})
                continue
            found = block.arguments(empty={})
            if not block.name:
                self._fault = _NAMELESS
            elif found is not None:
                content.append({**self._empty(block), "input": found})
            elif reason != "max_tokens":
                name = block.name[:60]
                self._fault = f"the arguments of a call of {name} are no JSON object"
        if self._fault:
            raise ValueError(self._fault)
        return self._message(content, reason, completion.get("usage"))

    # Input from the provider

    def _take(self, answer: Object, key: str) -> None:
        """Add the content of an answer or a chunk; ``key`` is that of its message."""
        choice = choice_in(answer)
        said = choice.get(key)
        if isinstance(said, dict):
            self._take_said(said)
        if reason := text_in(choice, "finish_reason"):
            if reason not in _STOP_REASONS:
                self._fault = f"the provider ended its answer with: {reason[:60]}"
            self._reason = _STOP_REASONS.get(reason, self._reason)
            for name in ("stop_reason", "matched_stop"):  # of vLLM, of SGLang
                if choice.get(name) in self._stops:
                    self._stop = choice[name]

    def _take_said(self, said: Object) -> None:
        if self._shows_thinking:
            self._take_text("thinking", reasoning_in(said))
        self._take_text("text", content_in(said))
        if refusal := text_in(said, "refusal"):
            self._take_text("text", refusal)
            self._is_refusal = True
        calls = said.get("tool_calls")
        for piece in calls if isinstance(calls, list) else ():
            if isinstance(piece, dict):
                self._take_call(piece)

    def _take_text(self, kind: str, text: str) -> None:
        if not text:
            return
        if not self._blocks or self._blocks[-1].kind != kind:
            self._blocks.append(_Block(kind))
        self._blocks[-1].waiting.append(text)

    def _take_call(self, piece: Object) -> None:
        """Add a piece of a call; one without an index is all of a call."""
        index = piece.get("index")
        call = self._calls.get(index) if type(index) is int else None
        if call is None:
            call = _Block("tool_use")
            self._blocks.append(call)
            self._has_calls = True
            if type(index) is int:
                self._calls[index] = call
        call.id = call.id or text_in(piece, "id")
        function = piece.get("function")
        if not isinstance(function, dict):
            return
        call.name = call.name or text_in(function, "name")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | None):
            self._fault = "the arguments of a call are no text"
        elif arguments and not call.is_closed:
            call.waiting.append(arguments)
        elif arguments and arguments.strip():
            self._fault = "the arguments of a call went on behind their end"

    def _stop_reason(self) -> str:
        if self._stop is not None:
            return "stop_sequence"
        if self._is_refusal:
            return "refusal"
        # OpenAI gives "stop" after a call that the request forced by its name.
        if self._reason in ("end_turn", "tool_use"):
            return "tool_use" if self._has_calls else "end_turn"
        return self._reason

    # Output to the client

    def _events(self, *, is_end: bool) -> list[Object]:
        """Return the events that can be sent now (rule 1)."""
        events: list[Object] = []
        while self._blocks:
            block = self._blocks[0]
            if block.kind == "tool_use" and not block.name:
                if is_end:
                    self._fault = _NAMELESS
                break
            place = {"index": self._index}
            if not block.is_open:
                block.is_open = True
                start = {"content_block": self._empty(block)}
                events.append({"type": "content_block_start", **place, **start})
            if text := block.tell():
                kind, key = _DELTAS[block.kind]
                delta = {"delta": {"type": kind, key: text}}
                events.append({"type": "content_block_delta", **place, **delta})
            if not is_end and (len(self._blocks) == 1 or not block.is_complete()):
                break
            events.append({"type": "content_block_stop", **place})
            block.is_closed = True
            block.told.clear()
            self._blocks.popleft()
            self._index += 1
        return events

    def _empty(self, block: _Block) -> Object:
        """Return a block of the answer without its text."""
        if block.kind == "text":
            return {"type": "text", "text": ""}
        if block.kind == "thinking":
            # Without a signature: Claude Code accepts that, and requests' are dropped.
            return {"type": "thinking", "thinking": "", "signature": ""}
        call_id = block.id
        if not call_id or call_id in self._ids:  # a result could not refer to it
            call_id = self._make_id("toolu")
        self._ids.add(call_id)
        return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}

    def _message(
        self, content: list[Object], reason: str | None, usage: object
    ) -> Object:
        return {
            "id": self._make_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": self._stop,
            "usage": _usage(usage),
        }


def _shows_thinking(asked: object) -> bool:
    """Return whether the request asks for thinking; other clients may not read it."""
    if not isinstance(asked, dict) or asked.get("display") == "omitted":
        return False
    return asked.get("type") in ("enabled", "adaptive")


def _usage(reported: object) -> Object:
    """Return a provider's usage in the form of the Messages API; 0 if it has none."""
    used = usage_of(reported) or Usage(0, 0)
    cached = min(used.cached, used.prompt)
    return {
        "input_tokens": used.prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": used.completion,
    }
