"""How much a request says to a model: its bytes, messages, and parts that are not text.

Two figures come of it (spec L10): the most tokens that a provider can count, which are
reserved before a call, and an estimate, which is charged where no usage is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from supervisor.llm.quota import tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.llm.apis import Api
    from supervisor.llm.json_request import JsonRequest

MESSAGE_TOKENS = 16
"""Most tokens that a message takes beside its text: role and separators take 3 to 7."""

LIKELY_BYTES_PER_TOKEN = 3
"""The estimate of spec MD5: most texts have a token for each three bytes at most."""

IMAGE_TOKENS = 2000
"""Of a part that is not text: models of today count 85 to 1,600 for an image."""

_TEXT_KEYS = frozenset({"type", "text", "refusal", "cache_control"})
"""Keys of a part that is text; what has any other may name an image, a sound, a file."""

_WORDS = frozenset(
    {
        *("role", "name", "refusal", "tool_calls", "tool_call_id", "function_call"),
        *("reasoning", "reasoning_content", "reasoning_details", "annotations"),
    }
)
"""Keys of a message that stand for text; a table or list beneath any other may not."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The size of a prompt.

    Attributes:
        size_bytes: of everything that is forwarded.
        messages: how many there are.
        other_parts: parts of them that are not text.
    """

    size_bytes: int
    messages: int
    other_parts: int = 0

    @property
    def estimated_tokens(self) -> int:
        """The estimate of spec L10: four bytes are a token."""
        return tokens_of(self.size_bytes)

    def likely_tokens(self, image_tokens: int | None = None) -> int:
        """Return what most texts take at most: three bytes are a token (spec MD5)."""
        return -(-self.size_bytes // LIKELY_BYTES_PER_TOKEN) + self._other_tokens(
            image_tokens
        )

    def most_tokens(self, image_tokens: int | None = None) -> int:
        """Return the worst case of spec L10: each byte is a token.

        Args:
            image_tokens: for each part that is not text; None for the default.
        """
        told = self.size_bytes + MESSAGE_TOKENS * self.messages
        return told + self._other_tokens(image_tokens)

    def _other_tokens(self, image_tokens: int | None) -> int:
        return self.other_parts * (
            IMAGE_TOKENS if image_tokens is None else image_tokens
        )


def size_of_body(body: Mapping[str, object]) -> PromptSize:
    """Return the size of a request: every field counts, for a provider reads them all."""
    messages = body.get("messages")
    found = messages if isinstance(messages, list) else []
    parts = sum(_other_parts(message) for message in found)
    return PromptSize(len(msgspec.json.encode(body)), len(found), parts)


def size_of_request(api: Api, request: JsonRequest) -> PromptSize:
    """Return the size of a request that is sent on as it came."""
    if not api.streams:  # embeddings: texts, or lists of numbers of tokens
        return PromptSize(len(request.data), 0)
    said = request.value.get(api.items)
    items = said if isinstance(said, list) else [said]
    if api.name == "chat":
        parts = sum(_other_parts(message) for message in items)
    else:
        parts = sum(_parts_of(item) for item in (*items, request.value.get("system")))
    return PromptSize(len(request.data), len(items), parts)


_TEXT_TYPES = frozenset(
    {
        "text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text",
        "thinking", "redacted_thinking", "tool_use", "server_tool_use", "reasoning",
        "function_call", "custom_tool_call", "local_shell_call", "shell_call",
        "apply_patch_call", "local_shell_call_output", "shell_call_output",
        "apply_patch_call_output", "tool_search_call", "tool_search_output",
    }
)  # fmt: skip
"""Types of items and parts in Responses and Messages that are text."""

_HOLDERS = {
    "message": "content",
    "tool_result": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}
"""Types of those that hold parts, and where."""


def _parts_of(item: object) -> int:
    """Return how many things in an item of Responses or Messages are not text."""
    found, left = 0, [item]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            kind = one.get("type", "message")
            if isinstance(kind, str) and kind in _HOLDERS:
                left.append(one.get(_HOLDERS[kind]))
            elif not isinstance(kind, str) or kind not in _TEXT_TYPES:
                found += 1
                left += (value for value in one.values() if isinstance(value, list))
    return found


def _other_parts(message: object) -> int:
    """Return how many parts of a message are not text."""
    if not isinstance(message, dict):
        return 0
    found = sum(
        _others_in(value)
        for key, value in message.items()
        if key not in _WORDS and key != "content" and not isinstance(value, str)
    )
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return found + sum(_others_in(part) for part in parts if not isinstance(part, str))


def _others_in(part: object) -> int:
    """Return how many things a part has that are not text.

    A table that is no text is one, with the first table beneath it (``image_url``); each
    further one, and what stands in a list (images in a tool's result), is one more.
    """
    found, left = 0, [(part, 1)]
    while left:
        one, count = left.pop()
        if isinstance(one, list):
            left += ((item, 1) for item in one)
        elif isinstance(one, str):
            found += 1  # in a list: an address, say
        elif isinstance(one, dict) and not one.keys() <= _TEXT_KEYS:
            found += count
            tables = [value for value in one.values() if isinstance(value, dict)]
            left += ((value, number > 0) for number, value in enumerate(tables))
            left += ((value, 1) for value in one.values() if isinstance(value, list))
    return found
