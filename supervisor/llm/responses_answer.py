"""The reader of answers of the Responses API: checked and completed.

Rules of this file (spec MD3, MD5).

1. An item begins once and ends once, and nothing follows the end of the response; another
   order ends the answer.
2. Missing parts that clients need are added: an id of the response, and the end of each
   item.  Codex only reads these ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.llm.answer_reader import (
    MAX_ITEMS,
    AnswerError,
    AnswerReader,
    ProviderError,
    check_count,
    kind_of,
    read_usage,
    table_in,
)
from supervisor.llm.ids import put_id

if TYPE_CHECKING:
    from hostlib.documents import Object
    from supervisor.llm.quota import Usage

_ENDS = frozenset({"response.completed", "response.incomplete"})

_ITEM_ENDS = frozenset({"response.output_item.added", "response.output_item.done"})
"""The events with which an item begins and ends."""

_TEXTS = ("text", "arguments", "input", "refusal")
"""Members of an item or its parts with text of the model."""


class ResponsesAnswer(AnswerReader):
    """Reads one answer, a stream or a response in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self._id = ""
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._reported: object = None

    def _take_event(self, event: Object, size_bytes: int) -> list[Object]:
        del size_bytes
        kind = kind_of(event)
        if kind in ("error", "response.failed"):
            raise _failure(event)
        if kind == "keepalive":
            return [event]
        if not kind.startswith("response."):
            raise AnswerError("an event of another API than Responses")
        if kind in _ENDS:
            return self._end(event)
        if kind == "response.created" or isinstance(event.get("response"), dict):
            self._take_state(kind, _response_of(event))
        elif "output_index" in event or kind in _ITEM_ENDS:
            self._take_item(kind, event)
        if kind.endswith(".delta"):
            self.count_output(event.get("delta"))
        return [event]

    def _take_state(self, kind: str, response: Object) -> None:
        if kind == "response.created" and self._id:
            raise AnswerError("response.created came twice")
        self._id = put_id(response, "resp", self._id)

    def _take_item(self, kind: str, event: Object) -> None:
        index = event.get("output_index")
        if type(index) is not int or index in self._ended:
            raise AnswerError(f"{kind} of an item that has ended, or of none")
        if kind == "response.output_item.added":
            if index in self._begun:
                raise AnswerError(f"{kind} came twice")
            self._begun.add(index)
            check_count(self._begun, MAX_ITEMS, "items")
        elif kind == "response.output_item.done":
            self._ended.add(index)
            check_count(self._ended, MAX_ITEMS, "items")

    def _end(self, event: Object) -> list[Object]:
        """Return the last event, after the missing ends of items."""
        response = _response_of(event)
        put_id(response, "resp", self._id)
        self._take_response(response)
        self._is_done = True
        found = response.get("output")
        items = found if isinstance(found, list) else []
        check_count(items, MAX_ITEMS, "items")
        missing = [
            {"type": "response.output_item.done", "output_index": index, "item": item}
            for index, item in enumerate(items)
            if index not in self._ended and isinstance(item, dict)
        ]
        told = {one["output_index"] for one in missing}
        if not self._begun <= self._ended | told:
            raise AnswerError("an item without an end")
        return [*missing, event]

    def _take_plain(self, found: Object) -> None:
        if found.get("error") is not None or found.get("status") == "failed":
            raise _failure(found)
        items = found.get("output")
        if found.get("object") != "response" or not isinstance(items, list):
            raise AnswerError("no response of the Responses API")
        check_count(items, MAX_ITEMS, "items")
        put_id(found, "resp")
        for item in items:
            if not isinstance(item, dict):
                raise AnswerError("an item that is not an object")
            self.count_output(*(item.get(name) for name in _TEXTS))
            for parts in (item.get("content"), item.get("summary")):
                for part in parts if isinstance(parts, list) else ():
                    if isinstance(part, dict):
                        self.count_output(*(part.get(name) for name in _TEXTS))
        self._take_response(found)

    def _take_response(self, response: Object) -> None:
        if response.get("usage") is not None:
            self._reported = response["usage"]
            self.usage()  # raises before the event is passed on

    def usage(self) -> Usage | None:
        """See ``AnswerReader``."""
        return read_usage(self._reported, "input_tokens", "output_tokens")


def _response_of(event: Object) -> Object:
    found = event.get("response")
    if not isinstance(found, dict):
        raise AnswerError(f"{event['type']} without a response")
    return found


def _failure(found: Object) -> ProviderError:
    """Return the error of a failed event or response."""
    holder = table_in(found, "response") or found
    table = table_in(holder, "error")
    error = table or holder  # an event without ``response`` has the code itself
    reason = error.get("message") or "no reason given"
    code = error.get("code") or table.get("type") or ""
    return ProviderError(str(reason), str(code))
