"""An answer of Chat Completions as one of the Responses API (spec MD2, MD3).

Rules of this file.

1. The events of an item of ``output`` are ``output_item.added``, those of its parts, and
   ``output_item.done``; ``output_index`` is its place.
2. A text ends where something else begins.  A call ends with the answer: pieces of several
   calls may alternate, and none is marked as the last.
3. Pieces without text make no event, so that the sizes of pieces do not matter.
4. Texts are joined once, when their item is done.
5. Pieces of an unknown shape are skipped: ``answer`` has already checked the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from supervisor.llm.ids import random_id
from supervisor.llm.responses_input import CUSTOM_INPUT
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

_ECHOED: Object = {
    "instructions": None,
    "max_output_tokens": None,
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that a response repeats -> the value of an absent field."""

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reason to finish with an incomplete answer -> its name in Responses."""


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
"""Type of item -> prefix of its id."""

_EMPTY: dict[str, Object] = {
    "message": {
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    },
    "reasoning": {"type": "reasoning", "summary": []},
    "function_call": {
        "type": "function_call",
        "status": "in_progress",
        "arguments": "",
    },
    "custom_tool_call": {
        "type": "custom_tool_call",
        "status": "in_progress",
        "input": "",
    },
}
"""Type of item -> an empty item; copied, and never changed."""


class _Form(NamedTuple):
    """The names and fields of the events of a kind of part.

    Attributes:
        item: the type of the item.
        part_event: prefix of the part's events.
        text_event: prefix of its text's events.
        place: the field with the part's place in the item.
        field: the field with its text.
        in_part: other fields of the part.
        in_text: other fields of its text's events.
    """

    item: str
    part_event: str
    text_event: str
    place: str
    field: str
    in_part: Object
    in_text: Object


_FORMS = {
    "output_text": _Form(
        "message",
        "response.content_part",
        "response.output_text",
        "content_index",
        "text",
        {"annotations": [], "logprobs": []},
        {"logprobs": []},
    ),
    "refusal": _Form(
        "message",
        "response.content_part",
        "response.refusal",
        "content_index",
        "refusal",
        {},
        {},
    ),
    "summary_text": _Form(
        "reasoning",
        "response.reasoning_summary_part",
        "response.reasoning_summary_text",
        "summary_index",
        "text",
        {},
        {},
    ),
}
"""Each type of part."""


class ResponsesWriter:
    """Writes one answer, as a stream (``begin``, ``feed``, ``finish``) or whole.

    Events share objects: the caller encodes them, and changes none.

    Args:
        asked: the request, which the answer repeats in part.
        translation: its translation.
        model: the name of the model in the answer.
        created_at: seconds since 1970.
        make_id: returns a new id for a prefix.
    """

    def __init__(
        self,
        asked: Object,
        translation: Translation,
        model: str,
        created_at: int,
        make_id: Callable[[str], str] = random_id,
    ) -> None:
        self._response: Object = {
            "id": make_id("resp"),
            "object": "response",
            "created_at": created_at,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "model": model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "usage": None,
        }
        for name, default in _ECHOED.items():
            value = asked.get(name)
            self._response[name] = default if value is None else value
        self._translation = translation
        self._make_id = make_id
        self._events = _Events()
        self._items: list[_Item] = []
        self._texts: _Texts | None = None
        self._calls: dict[int, _IncomingCall] = {}
        self._call_ids: set[str] = set()
        self._last: _Item | None = None
        self._finish_reason: object = None

    def begin(self) -> list[Object]:
        """Return the first events of a stream."""
        for event in ("response.created", "response.in_progress"):
            self._events.add(event, response=self._response)
        return self._events.take()

    def feed(self, chunk: Object) -> list[Object]:
        """Return the events for a ``chat.completion.chunk``."""
        choice = choice_in(chunk)
        self._take(choice.get("delta"), choice.get("finish_reason"))
        return self._events.take()

    def finish(self, usage: Object | None) -> list[Object]:
        """Return the last events of a complete answer.

        Args:
            usage: the provider's usage; None without a report.
        """
        why = _INCOMPLETE.get(str(self._finish_reason))
        for call in self._calls.values():
            if call.item is None:  # its name or its id did not come
                self._open_call(call)
        for item in self._items:
            if item.made is None:
                is_cut = why is not None and item is self._last
                item.close("incomplete" if is_cut else "completed")
        status = "incomplete" if why else "completed"
        self._end(
            status,
            incomplete_details={"reason": why} if why else None,
            usage=_usage(usage),
        )
        return self._events.take()

    def fail(self, code: str, message: str) -> list[Object]:
        """Return the event of a failed answer; its open items stay open."""
        self._end("failed", error={"code": code, "message": message})
        return self._events.take()

    def whole(self, completion: Object) -> Object:
        """Return the response for a ``chat.completion``."""
        choice = choice_in(completion)
        self._take(choice.get("message"), choice.get("finish_reason"))
        response: Object = self.finish(completion.get("usage"))[-1]["response"]
        return response

    def _end(self, status: str, **fields: object) -> None:
        output = [item.made for item in self._items if item.made is not None]
        response = {**self._response, "status": status, "output": output, **fields}
        self._events.add(f"response.{status}", response=response)

    def _take(self, said: object, finish_reason: object) -> None:
        """Add the content of a choice: a piece of its message, or all of it."""
        self._finish_reason = finish_reason or self._finish_reason
        if not isinstance(said, dict):
            return
        self._add_text("summary_text", reasoning_in(said))
        self._add_text("output_text", content_in(said))
        self._add_text("refusal", text_in(said, "refusal"))
        calls = said.get("tool_calls")
        for number, piece in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(piece, dict):
                self._take_call(piece, number)

    def _add_text(self, part: str, text: str) -> None:
        """Add a text to the open item, or to a new one if that is of another type."""
        if not text:
            return
        kind = _FORMS[part].item
        if self._texts is None or self._texts.kind != kind:
            self._close_texts()
            item = {"id": self._make_id(_PREFIXES[kind]), **_EMPTY[kind]}
            self._texts = _Texts(self._events, len(self._items), item)
            self._items.append(self._texts)
        self._texts.add(part, text)
        self._last = self._texts

    def _close_texts(self) -> None:
        if self._texts is not None:
            self._texts.close("completed")
            self._texts = None

    def _take_call(self, piece: Object, number: int) -> None:
        index = piece.get("index")
        call = self._calls.setdefault(
            index if type(index) is int else number, _IncomingCall()
        )
        call.take(piece)
        if call.item is not None:
            call.pass_on()
            self._last = call.item
        elif call.name and call.call_id:
            self._open_call(call)

    def _open_call(self, call: _IncomingCall) -> None:
        """Open the item of a call, and pass its pieces on."""
        self._close_texts()
        call_id = call.call_id
        if not call_id or call_id in self._call_ids:  # a result could not refer to it
            call_id = self._make_id("call")
        self._call_ids.add(call_id)
        is_custom = call.name in self._translation.custom
        kind = "custom_tool_call" if is_custom else "function_call"
        item = {"id": self._make_id(_PREFIXES[kind]), **_EMPTY[kind]}
        item |= {"call_id": call_id, "name": call.name}
        if call.name in self._translation.namespaced:
            item["namespace"], item["name"] = self._translation.namespaced[call.name]
        make = _CustomCall if is_custom else _FunctionCall
        call.item = make(self._events, len(self._items), item)
        self._items.append(call.item)
        self._last = call.item
        call.pass_on()


class _Events:
    """Waiting events, and the number of the next one."""

    def __init__(self) -> None:
        self._number = 0
        self._events: list[Object] = []

    def add(self, kind: str, **fields: object) -> None:
        """Add an event."""
        self._events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def take(self) -> list[Object]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        return taken


class _Item:
    """One item of the output, from its first event to its last.

    Args:
        events: gets its events.
        place: its place in the output.
        item: the item without content.

    Attributes:
        made: the finished item; None before.
    """

    def __init__(self, events: _Events, place: int, item: Object) -> None:
        self._events = events
        self._place = place
        self._item = item
        self._pieces: list[str] = []
        self.made: Object | None = None
        events.add("response.output_item.added", output_index=place, item=item)

    def close(self, status: str) -> None:
        """Add the last events of the item.

        Args:
            status: ``completed``, or ``incomplete`` if the model was cut off in it.
        """
        raise NotImplementedError

    def _add(self, kind: str, **fields: object) -> None:
        item_id = self._item["id"]
        self._events.add(kind, item_id=item_id, output_index=self._place, **fields)

    def _finish(self, **content: object) -> None:
        self.made = {**self._item, **content}
        self._events.add(
            "response.output_item.done", output_index=self._place, item=self.made
        )


class _Texts(_Item):
    """A message or reasoning, with texts one after the other.

    Attributes:
        kind: ``message`` or ``reasoning``.
    """

    def __init__(self, events: _Events, place: int, item: Object) -> None:
        super().__init__(events, place, item)
        self.kind: str = item["type"]
        self._parts: list[Object] = []
        self._open = ""

    def add(self, part: str, text: str) -> None:
        """Add a piece of text, to a new part if the open one is of another type."""
        form = _FORMS[part]
        if part != self._open:
            self._close_part()
            self._open = part
            empty = {"type": part, form.field: "", **form.in_part}
            self._add_of_part(f"{form.part_event}.added", part=empty)
        self._pieces.append(text)
        self._add_of_part(f"{form.text_event}.delta", delta=text, **form.in_text)

    def close(self, status: str) -> None:
        """Add the events that the item ends with."""
        self._close_part()
        if self.kind == "message":
            self._finish(status=status, content=self._parts)
        else:
            self._finish(summary=self._parts)

    def _close_part(self) -> None:
        if not self._open:
            return
        form = _FORMS[self._open]
        texts = {form.field: "".join(self._pieces)}
        part = {"type": self._open, **texts, **form.in_part}
        self._add_of_part(f"{form.text_event}.done", **texts, **form.in_text)
        self._add_of_part(f"{form.part_event}.done", part=part)
        self._parts.append(part)
        self._pieces.clear()
        self._open = ""

    def _add_of_part(self, kind: str, **fields: object) -> None:
        place = _FORMS[self._open].place
        self._add(kind, **{place: len(self._parts)}, **fields)


class _FunctionCall(_Item):
    """A call of a function: its arguments are passed on as they come."""

    def add(self, text: str) -> None:
        """Add a piece of the arguments."""
        self._pieces.append(text)
        self._add("response.function_call_arguments.delta", delta=text)

    def close(self, status: str) -> None:
        """Add the events that the item ends with."""
        arguments = "".join(self._pieces)
        self._add("response.function_call_arguments.done", arguments=arguments)
        self._finish(status=status, arguments=arguments)


class _CustomCall(_Item):
    """A call of a custom tool: its input is sent at the end, from the arguments."""

    def add(self, text: str) -> None:
        """Add a piece of the arguments."""
        self._pieces.append(text)

    def close(self, status: str) -> None:
        """Add the events that the item ends with."""
        text = _input_in("".join(self._pieces))
        if text:
            self._add("response.custom_tool_call_input.delta", delta=text)
        self._add("response.custom_tool_call_input.done", input=text)
        self._finish(status=status, input=text)


class _IncomingCall:
    """A call that comes in pieces.

    Attributes:
        name: name of the function; empty until it comes.
        call_id: its id; empty until it comes.
        item: the item that was opened for it; None as long as name or id is missing.
    """

    def __init__(self) -> None:
        self.name = ""
        self.call_id = ""
        self.item: _FunctionCall | _CustomCall | None = None
        self._pieces: list[str] = []

    def take(self, piece: Object) -> None:
        """Add a piece of the call."""
        self.call_id = self.call_id or text_in(piece, "id")
        function = piece.get("function")
        if isinstance(function, dict):
            self.name = self.name or text_in(function, "name")
            if text := text_in(function, "arguments"):
                self._pieces.append(text)

    def pass_on(self) -> None:
        """Pass the received arguments to the item."""
        if self.item is not None and self._pieces:
            self.item.add("".join(self._pieces))
            self._pieces.clear()


def _input_in(arguments: str) -> str:
    """Return the input of a custom tool; all arguments if they have another form."""
    try:
        found = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def _usage(counted: Object | None) -> Object | None:
    """Return a ``usage`` of Chat Completions in the form of Responses."""
    if not isinstance(counted, dict):
        return None
    read = _count(counted, "prompt_tokens")
    written = _count(counted, "completion_tokens")
    read_details = counted.get("prompt_tokens_details")
    written_details = counted.get("completion_tokens_details")
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": _count(read_details, "cached_tokens"),
            "cache_write_tokens": _count(read_details, "cache_write_tokens"),
        },
        "output_tokens": written,
        "output_tokens_details": {
            "reasoning_tokens": _count(written_details, "reasoning_tokens")
        },
        "total_tokens": _count(counted, "total_tokens") or read + written,
    }


def _count(owner: object, name: str) -> int:
    value = owner.get(name) if isinstance(owner, dict) else None
    return value if type(value) is int else 0
