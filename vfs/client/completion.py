"""Types of the answer to LLM_CHAT (spec L7).

Loaded by the first call of ``llm_chat``; the only part of the child's side that needs
``msgspec``.  A child without it calls ``llm_chat_json``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vfs.client.turn import client_errors


class ToolFunction(msgspec.Struct):
    """The function of a call by the model; ``arguments`` is JSON."""

    name: str = ""
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """One call by the model."""

    id: str = ""
    type: str = "function"
    function: ToolFunction = msgspec.field(default_factory=ToolFunction)


class Message(msgspec.Struct):
    """The model's message."""

    role: str = "assistant"
    content: Any = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """One answer of a completion."""

    index: int = 0
    message: Message = msgspec.field(default_factory=Message)
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The tokens of a call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class ChatCompletion(msgspec.Struct):
    """A ``chat.completion``.

    Attributes:
        quota: the host's text about the quota after the call.
        raw: the received JSON.
    """

    choices: list[Choice]
    id: str = ""
    model: str = ""
    created: int = 0
    usage: Usage | None = None
    quota: str = ""
    raw: bytes = b""

    @property
    def text(self) -> str:
        """The text of the first answer; empty without one."""
        content = self.choices[0].message.content if self.choices else None
        return content if isinstance(content, str) else ""


def completion(body: bytes, quota: str) -> ChatCompletion:
    """Return the completion in LLM_CHAT's body.

    Raises:
        FsProxyError: the body is no completion.
    """
    try:
        found = msgspec.json.decode(body, type=ChatCompletion)
    except ValueError:  # msgspec's own, and text that is not UTF-8
        raise client_errors().unreadable("LLM_CHAT", body) from None
    found.quota = quota
    found.raw = body
    return found
