"""The host's gateway as the tool loop's model: one paid call each, nothing more.

It is written against what it needs of the gateway; ``connect`` puts the two together.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

from supervisor.fds.toolloop import ModelError, Reply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from supervisor.fds.conversations import Conversations
    from supervisor.fds.service import FdService
    from supervisor.llm.service import LlmService
    from vfs.content import Json
    from vfs.filesystem import Client


class Completion(Protocol):
    """An answer of the gateway, checked and redacted."""

    @property
    def object(self) -> Mapping[str, Json]:
        """A ``chat.completion`` as plain values."""


class Asker(Protocol):
    """What is needed of the gateway's service."""

    @property
    def presets(self) -> Mapping[str, str]:
        """System prompts by name."""

    async def ask(self, client: Client, body: Mapping[str, object]) -> Completion:
        """Make one call for a client by the rules for it, and pay."""


class GatewayModel:
    """See ``toolloop.Model``.

    Args:
        asker: makes the calls.
        failures: what it raises when a call failed or the quota is spent; their texts
            are one line each.
    """

    def __init__(self, asker: Asker, failures: tuple[type[Exception], ...]) -> None:
        self._asker = asker
        self._failures = failures

    def system(self, program: str) -> str | None:
        """Return the system prompt of a preset, None if there is no such preset."""
        return self._asker.presets.get(program)

    async def complete(
        self,
        client: Client,
        program: str,
        messages: Sequence[dict[str, Json]],
        tools: Sequence[Json],
    ) -> Reply:
        """Ask once; see ``toolloop.Model``."""
        del program  # its prompt stands in the messages
        body: dict[str, object] = {"messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        try:
            completion = await self._asker.ask(client, body)
        except self._failures as why:
            raise ModelError(
                str(why) or "quota exceeded: cannot make LLM call"
            ) from why
        choices = completion.object.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        if not isinstance(message, dict):
            raise ModelError("invalid response: no choice with a message")
        return Reply(_plain(message), completion)


def _plain(message: dict[str, Json]) -> dict[str, Json]:
    """Return of a message what may be sent back to a provider."""
    kept: dict[str, Json] = {
        "role": "assistant",
        "content": message.get("content"),
    }
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        kept["tool_calls"] = json.loads(json.dumps(calls))
    return kept


def connect(fds: FdService, llm: LlmService) -> Conversations:
    """Give a host's LLM fds its model: fork, spawn, summaries, conversations."""
    from supervisor.fds.conversations import Conversations  # noqa: PLC0415 - a cycle
    from supervisor.llm.gateway import FailedCallError  # noqa: PLC0415 - with a model
    from supervisor.llm.quota import QuotaError  # noqa: PLC0415 - likewise

    return Conversations(
        fds, GatewayModel(_LlmAsker(llm), (FailedCallError, QuotaError))
    )


class _LlmAsker:
    """The gateway's service as an ``Asker``."""

    def __init__(self, llm: LlmService) -> None:
        self._llm = llm

    @property
    def presets(self) -> Mapping[str, str]:
        """See ``Asker``."""
        return self._llm.presets

    async def ask(self, client: Client, body: Mapping[str, object]) -> Completion:
        """See ``Asker``."""
        llm = self._llm
        section = llm.section
        size = len(json.dumps(body, ensure_ascii=False).encode(errors="replace"))
        if section.temperature is not None:
            body = {**body, "temperature": section.temperature}
        call = llm.prepared(
            client,
            llm.model_name(client, claim=client.policy.top_level),
            body,
            size_bytes=size,
            max_tokens=section.max_tokens,
        )
        return await llm.gateway.complete(call)
