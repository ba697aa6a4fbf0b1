"""The reader of answers of the Messages API: checked and completed.

Rules of this file (spec MD3, MD5).

1. Events must come in the order of the API; another order ends the answer.
2. Missing parts that clients need are added: an id, and the end of each block.  Claude Code
   would repeat a ``message_start`` without an id for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from supervisor.llm.answer_reader import (
    MAX_ITEMS,
    AnswerError,
    AnswerReader,
    ProviderError,
    check_count,
    kind_of,
    table_in,
    tokens_in,
)
from supervisor.llm.ids import put_id
from supervisor.llm.quota import Usage

if TYPE_CHECKING:
    from hostlib.documents import Object

_TEXTS = ("text", "thinking", "partial_json")
"""Members of a delta or a block with text of the model."""

_TOKENS = (
    "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens",
    "output_tokens",
)  # fmt: skip
"""Members of ``usage`` that are read."""


class MessagesAnswer(AnswerReader):
    """Reads one answer, a stream or a message in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self._has_begun = False
        self._open: int | None = None
        self._blocks = 0  # number of the next block
        self._begun = 0
        self._usage: Object = {}

    def _take_event(self, event: Object, size_bytes: int) -> list[Object]:
        del size_bytes
        kind = kind_of(event)
        if kind.startswith("response."):
            raise AnswerError("an event of another API than Messages")
        if kind == "error":
            raise _failure(event)
        if kind == "ping":
            return [event]
        if (kind == "message_start") is self._has_begun:
            raise AnswerError(f"{kind} at the wrong place")
        take = self._takers.get(kind)
        return [event] if take is None else take(self, event)

    def _begin(self, event: Object) -> list[Object]:
        message = event.get("message")
        if not isinstance(message, dict):
            raise AnswerError("message_start without a message")
        self._has_begun = True
        put_id(message, "msg")
        self._take_usage(message)
        self.has_early_usage = True
        return [event]

    def _begin_block(self, event: Object) -> list[Object]:
        index = event.get("index")
        if type(index) is not int or index < self._blocks:
            raise AnswerError("content_block_start at the wrong place")
        self._begun += 1
        if self._begun > MAX_ITEMS:
            raise AnswerError(f"more than {MAX_ITEMS} blocks")
        before = self._closing()
        self._blocks = index + 1
        self._open = index
        block = table_in(event, "content_block")
        self.count_output(*(block.get(name) for name in _TEXTS))
        return [*before, event]

    def _take_delta(self, event: Object) -> list[Object]:
        self._check_open(event)
        delta = table_in(event, "delta")
        self.count_output(*(delta.get(name) for name in _TEXTS))
        return [event]

    def _end_block(self, event: Object) -> list[Object]:
        self._check_open(event)
        self._open = None
        return [event]

    def _take_end(self, event: Object) -> list[Object]:
        self._take_usage(event)
        if table_in(event, "usage").get("output_tokens") is not None:
            self.has_early_usage = False
        return [*self._closing(), event]

    def _end(self, event: Object) -> list[Object]:
        self._is_done = True
        return [*self._closing(), event]

    def _check_open(self, event: Object) -> None:
        if self._open is None or event.get("index") != self._open:
            raise AnswerError(f"{event['type']} of a block that is not open")

    def _closing(self) -> list[Object]:
        """Return the end of an open block, if the provider left it out."""
        if self._open is None:
            return []
        index, self._open = self._open, None
        return [{"type": "content_block_stop", "index": index}]

    _takers: ClassVar = {
        "message_start": _begin,
        "content_block_start": _begin_block,
        "content_block_delta": _take_delta,
        "content_block_stop": _end_block,
        "message_delta": _take_end,
        "message_stop": _end,
    }

    def _take_usage(self, holder: Object) -> None:
        reported = holder.get("usage")
        if reported is not None and not isinstance(reported, dict):
            raise AnswerError("usage is not an object")
        # The last report counts: each has the sum of the output.
        told = reported or {}
        self._usage |= {
            name: told[name] for name in _TOKENS if told.get(name) is not None
        }
        self.usage()  # raises before the event is passed on

    def _take_plain(self, found: Object) -> None:
        if found.get("type") == "error" or "error" in found:
            raise _failure(found)
        blocks = found.get("content")
        if found.get("type") != "message" or not isinstance(blocks, list):
            raise AnswerError("no message of the Messages API")
        check_count(blocks, MAX_ITEMS, "blocks")
        put_id(found, "msg")
        for block in blocks:
            if not isinstance(block, dict):
                raise AnswerError("a block that is not an object")
            self.count_output(*(block.get(name) for name in _TEXTS))
            if block.get("input"):  # in a stream it comes as text
                self.count_output(msgspec.json.encode(block["input"]).decode())
        self._take_usage(found)

    def usage(self) -> Usage | None:
        """See ``AnswerReader``; tokens from the cache are part of the prompt here."""
        reported = self._usage
        if "input_tokens" not in reported or "output_tokens" not in reported:
            return None
        cached = tokens_in(reported, "cache_read_input_tokens")
        written = tokens_in(reported, "cache_creation_input_tokens")
        prompt = tokens_in(reported, "input_tokens") + cached + written
        output = tokens_in(reported, "output_tokens")
        return Usage(prompt, output, cached, written)


def _failure(found: Object) -> ProviderError:
    error = table_in(found, "error")
    reason = error.get("message") or found.get("error") or "no reason given"
    return ProviderError(str(reason), str(error.get("type") or ""))
