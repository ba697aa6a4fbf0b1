"""The size of a request: its bytes, messages, and parts that are not text.

From it come the most tokens that a provider can count, which are reserved before a call,
and an estimate, which is charged if no usage is reported (spec L10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from supervisor.llm.quota import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.llm.apis import Api
    from supervisor.llm.json_request import JsonRequest

MESSAGE_TOKENS = 16
"""Most tokens that a message takes beside its text: role and separators take 3 to 7."""

LIKELY_BYTES_PER_TOKEN = 3
"""The estimate of spec MD5: most texts have at most a token for each three bytes."""

IMAGE_TOKENS = 2000
"""Tokens of a part that is not text: models count 85 to 1,600 for an image."""

_TEXT_KEYS = frozenset({"type", "text", "refusal", "cache_control"})
"""Keys of a part that is text; a part with another key may be an image, a sound, a file."""

_WORDS = frozenset(
    {
        *("role", "name", "refusal", "tool_calls", "tool_call_id", "function_call"),
        *("reasoning", "reasoning_content", "reasoning_details", "annotations"),
    }
)
"""Keys of a message with text; a table or list under another key may be no text."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The size of a prompt.

    Attributes:
        size_bytes: bytes of everything that is passed on.
        messages: number of messages.
        other_parts: number of their parts that are not text.
    """

    size_bytes: int
    messages: int
    other_parts: int = 0

    @property
    def estimated_tokens(self) -> int:
        """The estimate of spec L10, with four bytes a token."""
        return -(-self.size_bytes // BYTES_PER_TOKEN)

    def likely_tokens(self, image_tokens: int | None = None) -> int:
        """Return the most tokens of most texts, with three bytes a token (spec MD5)."""
        return -(-self.size_bytes // LIKELY_BYTES_PER_TOKEN) + self._other_tokens(
            image_tokens
        )

    def most_tokens(self, image_tokens: int | None = None) -> int:
        """Return the worst case of spec L10, with each byte a token.

        Args:
            image_tokens: tokens of each part that is not text; None for the default.
        """
        told = self.size_bytes + MESSAGE_TOKENS * self.messages
        return told + self._other_tokens(image_tokens)

    def _other_tokens(self, image_tokens: int | None) -> int:
        return self.other_parts * (
            IMAGE_TOKENS if image_tokens is None else image_tokens
        )


def size_of_body(body: Mapping[str, object]) -> PromptSize:
    """Return the size of a request with all its fields, which a provider reads."""
    messages = body.get("messages")
    found = messages if isinstance(messages, list) else []
    parts = sum(_other_parts(message) for message in found)
    return PromptSize(len(msgspec.json.encode(body)), len(found), parts)


def size_of_request(api: Api, request: JsonRequest) -> PromptSize:
    """Return the size of a request that is passed on untranslated."""
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
"""Type of item or part that holds parts -> the member with them."""


def _parts_of(item: object) -> int:
    """Return the number of parts in an item that are not text."""
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
    """Return the number of parts of a message that are not text."""
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
    """Return the number of contents of a part that are not text.

    A table that is no text counts as one together with the first table in it
    (``image_url``); each further table, and each in a list (images in a tool's result),
    counts as another.
    """
    found, left = 0, [(part, 1)]
    while left:
        one, count = left.pop()
        if isinstance(one, list):
            left += ((item, 1) for item in one)
        elif isinstance(one, str):
            found += 1  # in a list, such as an address
        elif isinstance(one, dict) and not one.keys() <= _TEXT_KEYS:
            found += count
            tables = [value for value in one.values() if isinstance(value, dict)]
            left += ((value, number > 0) for number, value in enumerate(tables))
            left += ((value, 1) for value in one.values() if isinstance(value, list))
    return found
