"""Writers of answers to a child's program: events and objects of its API.

One writer for each kind of answer (spec MD2, MD3): Chat Completions, an API that is passed
on, Chat Completions translated to another API.

Rules of this file.

1. Secrets are searched for across events, before events are translated (spec L13).
2. The answer has the name of the model in the request (spec MD4).
3. An error in the middle has the form of the API; a broken stream never ends like a
   complete one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from supervisor.llm.answer_reader import DONE
from supervisor.llm.apis import MESSAGES, RESPONSES
from supervisor.llm.deltas import ChoiceRedactor, EventRedactor
from supervisor.llm.errors import api_error, responses_code
from supervisor.llm.gateway import FailedCallError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hostlib.documents import Object
    from hostlib.redact import Redactor
    from supervisor.llm.apis import Api
    from supervisor.llm.errors import RefusedRequestError
    from supervisor.llm.gateway import Completion


class AnswerWriter(ABC):
    """Writes one answer.

    Args:
        redactor: knows every secret.
        model: the name of the model in the answer; empty for the provider's own.
    """

    def __init__(self, redactor: Redactor, model: str) -> None:
        self.redactor = redactor
        self.model = model

    @abstractmethod
    def feed(self, event: Object) -> list[bytes]:
        """Return the frames to send for a provider's event."""

    @abstractmethod
    def finish(self, completion: Completion) -> list[bytes]:
        """Return the frames to send at the end of a stream."""

    @abstractmethod
    def fail(self, why: RefusedRequestError) -> list[bytes]:
        """Return the frames to send for an error in a stream."""

    @abstractmethod
    def whole(self, completion: Completion) -> bytes:
        """Return the answer in one piece."""

    def rename(self, found: Object) -> None:
        """Set the model's name to that of the request."""
        if self.model and "model" in found:
            found["model"] = self.model

    def encode(self, event: Object) -> bytes:
        """Return an event as JSON, without secrets."""
        return self.redactor.data(msgspec.json.encode(event))

    def frame(self, event: Object) -> bytes:
        """Return a server-sent event with its type as its name."""
        name = self.redactor.text(event["type"]).encode()
        return b"event: %b\ndata: %b\n\n" % (name, self.encode(event))


class ChatWriter(AnswerWriter):
    """Chat Completions, as it came.

    Args:
        redactor: see ``AnswerWriter``.
        model: see ``AnswerWriter``.
        include_usage: the last event tells the use.
    """

    def __init__(
        self, redactor: Redactor, model: str, *, include_usage: bool = False
    ) -> None:
        super().__init__(redactor, model)
        self._include_usage = include_usage
        self._events = ChatEvents(redactor)

    def feed(self, event: Object) -> list[bytes]:
        """See ``AnswerWriter``."""
        return self._frames(self._events.feed(event))

    def finish(self, completion: Completion) -> list[bytes]:
        """See ``AnswerWriter``."""
        frames = self._frames(self._events.finish(completion))
        return [*frames, b"data: %b\n\n" % DONE]

    def fail(self, why: RefusedRequestError) -> list[bytes]:
        """See ``AnswerWriter``."""
        return [b"data: %b\n\n" % why.body()]

    def whole(self, completion: Completion) -> bytes:
        """See ``AnswerWriter``."""
        if not self.model:
            return completion.data
        self.rename(completion.object)
        return self.encode(completion.object)

    def _frames(self, events: Iterable[Object]) -> list[bytes]:
        frames = []
        for event in events:
            if event.get("usage") is not None and not self._include_usage:
                del event["usage"]
                if not event.get("choices"):
                    continue
            self.rename(event)
            frames.append(b"data: %b\n\n" % self.encode(event))
        return frames


class ChatEvents:
    """The events of one answer of Chat Completions, redacted across them.

    Args:
        redactor: knows every secret.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._choices: dict[int, ChoiceRedactor] = {}
        self._last: Object = {}

    def feed(self, event: Object) -> Iterator[Object]:
        """Yield an event without secrets, after the rest of texts that it ends.

        Text that may become a secret is held back.
        """
        choices = event.get("choices") or []
        if choices:
            self._last = {**event, "choices": [], "usage": None}
        for choice in choices:
            known = self._choice(choice.get("index", 0))
            if rest := known.take_ended(choice):
                yield self._piece(choice.get("index", 0), rest)
            known.feed(choice)
        yield event

    def _piece(self, index: int, delta: Object) -> Object:
        """Return an event with text that was held back."""
        last = {key: value for key, value in self._last.items() if key != "usage"}
        choice = {"index": index, "delta": delta, "finish_reason": None}
        return {**last, "choices": [choice]}

    def _choice(self, index: int) -> ChoiceRedactor:
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = ChoiceRedactor(self._redactor)
        return known

    def finish(self, completion: Completion) -> Iterator[Object]:
        """Yield the held-back text, or the events of an answer in one piece."""
        if not self._last:  # a provider that does not stream
            yield from _events_of(completion.object)
        for index, known in self._choices.items():
            if rest := known.rest():
                yield self._piece(index, rest)


def _events_of(completion: Object) -> Iterator[Object]:
    """Yield a completion as the events of a stream."""
    head = {
        key: value
        for key, value in completion.items()
        if key not in ("choices", "usage")
    }
    head["object"] = "chat.completion.chunk"
    choices = []
    for choice in completion["choices"]:
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(calls)
            ]
        reason = choice.get("finish_reason") or "stop"
        index = choice.get("index", 0)
        choices.append({"index": index, "delta": delta, "finish_reason": reason})
    yield {**head, "choices": choices}
    if completion.get("usage"):
        yield {**head, "choices": [], "usage": completion["usage"]}


class PassedWriter(AnswerWriter):
    """An API that is passed on: Responses, Messages, Embeddings.

    Args:
        redactor: see ``AnswerWriter``.
        model: see ``AnswerWriter``.
        api: the API of the answer.
    """

    def __init__(self, redactor: Redactor, model: str, api: Api) -> None:
        super().__init__(redactor, model)
        self._api = api
        self._events = EventRedactor(redactor)
        self._number = 0

    def feed(self, event: Object) -> list[bytes]:
        """See ``AnswerWriter``."""
        for holder in (event, event.get("message"), event.get("response")):
            if isinstance(holder, dict):
                self.rename(holder)
        return [self._numbered(one) for one in self._events.feed(event)]

    def _numbered(self, event: Object) -> bytes:
        # Held-back pieces are events of their own, and shift the numbers of others.
        if self._api is RESPONSES:
            event["sequence_number"] = self._number
            self._number += 1
        return self.frame(event)

    def finish(self, completion: Completion) -> list[bytes]:
        """See ``AnswerWriter``."""
        del completion  # all of it was passed on
        return []

    def fail(self, why: RefusedRequestError) -> list[bytes]:
        """See ``AnswerWriter``."""
        return [self._numbered(_failure_event(self._api, why))]

    def whole(self, completion: Completion) -> bytes:
        """See ``AnswerWriter``."""
        self.rename(completion.object)
        return self.encode(completion.object)


def _failure_event(api: Api, why: RefusedRequestError) -> Object:
    """Return the event with which a stream of Responses or Messages fails (spec MD3)."""
    if api is MESSAGES:
        return api_error("messages", why)
    error = {"code": responses_code(why), "message": str(why)}
    response = {"object": "response", "status": "failed", "error": error, "output": []}
    return {"type": "response.failed", "response": response}


class Maker(Protocol):
    """Translates an answer of Chat Completions; its events are named by type."""

    def begin(self) -> list[Object]:
        """Return the first events."""

    def feed(self, chunk: Object) -> list[Object]:
        """Return the events for an event of Chat Completions."""

    def finish(self, usage: Object | None) -> list[Object]:
        """Return the last events."""

    def fail(self, code: str, message: str) -> list[Object]:
        """Return the events of a failure."""

    def whole(self, completion: Object) -> Object:
        """Return the answer in one piece."""


class TranslatedWriter(AnswerWriter):
    """Chat Completions, translated to another API.

    Args:
        redactor: see ``AnswerWriter``.
        api: the other API.
        maker: translates the answer.
    """

    def __init__(self, redactor: Redactor, api: Api, maker: Maker) -> None:
        super().__init__(redactor, "")
        self._api = api
        self._maker = maker
        self._events = ChatEvents(redactor)
        self._has_begun = False

    def feed(self, event: Object) -> list[bytes]:
        """See ``AnswerWriter``."""
        return self._all_frames(self._events.feed(event))

    def finish(self, completion: Completion) -> list[bytes]:
        """See ``AnswerWriter``."""
        frames = self._all_frames(self._events.finish(completion))
        usage = completion.object.get("usage")
        return [*frames, *self._frames(partial(self._maker.finish, usage))]

    def fail(self, why: RefusedRequestError) -> list[bytes]:
        """See ``AnswerWriter``."""
        code = responses_code(why)
        if self._api is MESSAGES:
            code = api_error("messages", why)["error"]["type"]
        return self._frames(partial(self._maker.fail, code, str(why)))

    def _all_frames(self, events: Iterable[Object]) -> list[bytes]:
        return [
            frame
            for event in events
            for frame in self._frames(partial(self._maker.feed, event))
        ]

    def _frames(self, make: Callable[[], list[Object]]) -> list[bytes]:
        # Make the first events first, for events are numbered as they are made.
        first = [] if self._has_begun else self._maker.begin()
        self._has_begun = True
        return [self.frame(event) for event in (*first, *make())]

    def whole(self, completion: Completion) -> bytes:
        """See ``AnswerWriter``.

        Raises:
            FailedCallError: the answer has no form in the other API.
        """
        try:
            found = self._maker.whole(completion.object)
        except ValueError as why:
            reason = self.redactor.text(f"invalid response: {why}")
            raise FailedCallError(reason) from None
        return self.encode(found)
