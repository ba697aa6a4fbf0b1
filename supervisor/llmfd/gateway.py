"""The host's gateway as the tool loop's model: one paid call each."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING, cast

from hostlib.threads import in_thread
from supervisor.llm.errors import NO_MEMORY
from supervisor.llm.gateway import FailedCallError, NoMemoryError
from supervisor.llm.prompt_size import size_of_body
from supervisor.llm.quota import QuotaError
from supervisor.llmfd.conversations import Conversations
from supervisor.llmfd.toolloop import ModelError, ModelReply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from supervisor.llm.conversations import ConversationTurn
    from supervisor.llm.gateway import Completion
    from supervisor.llm.models import Models
    from supervisor.llm.service import LlmService
    from supervisor.llmfd import Json
    from supervisor.llmfd.service import FdService
    from vfs.clients import Client
    from vfs.payload import MemoryReservation, PayloadBudget

    Ask = Callable[[Client, Mapping[str, object], bool], Awaitable[Completion]]


class GatewayModel:
    """See ``toolloop.LoopModel``.

    Args:
        presets: system prompts by name.
        ask: makes one call for a client, in a view.
        failures: its exceptions for a failed call or a spent quota; their texts are one
            line each.
        budget: the host's memory.
    """

    def __init__(
        self,
        presets: Mapping[str, str],
        ask: Ask,
        failures: tuple[type[Exception], ...],
        budget: PayloadBudget,
    ) -> None:
        self._presets = presets
        self._ask = ask
        self._failures = failures
        self._budget = budget

    def system(self, program: str) -> str | None:
        """Return the system prompt of a preset; None if there is no such preset."""
        return self._presets.get(program)

    def reservation(self, client: Client) -> MemoryReservation:
        """Return a reservation of memory; see ``toolloop.LoopModel``."""
        return self._budget.reservation(client.ledger)

    async def complete(
        self,
        client: Client,
        program: str,
        messages: Sequence[dict[str, Json]],
        tools: Sequence[Json],
        claim: bool,
    ) -> ModelReply:
        """Ask once; see ``toolloop.LoopModel``."""
        del program  # its prompt is part of the messages
        body: dict[str, object] = {"messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        try:
            completion = await self._ask(client, body, claim)
        except OSError as why:  # not asked: no thread can be started
            raise ModelError(os.strerror(why.errno or errno.EIO)) from None
        except self._failures as why:
            raise ModelError(
                str(why) or "quota exceeded: cannot make LLM call"
            ) from why
        choices = completion.object.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        if not isinstance(message, dict):
            raise ModelError("invalid response: no choice with a message")
        return ModelReply(_plain(message), completion)


def _plain(message: dict[str, Json]) -> dict[str, Json]:
    """Return the parts of a message that may be sent back to a provider."""
    kept: dict[str, Json] = {
        "role": "assistant",
        "content": message.get("content"),
    }
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        kept["tool_calls"] = calls
    return kept


async def ask(
    models: Models, client: Client, body: Mapping[str, object], claim: bool
) -> Completion:
    """Make one call for a client under its rules, and pay for it."""
    section = models.section
    # Encoded once more than it is sent: all of a prompt is paid for.
    size = await in_thread(size_of_body, body, share=client.ledger.threads)
    if section.temperature is not None:
        body = {**body, "temperature": section.temperature}
    call = models.call_for_body(
        client,
        models.model_name(client, claim=claim and client.policy.top_level),
        body,
        size=size,
        max_tokens=section.max_tokens,
    )
    try:  # the body that is sent, and the one that was measured
        memory = models.budget.reservation(client.ledger, 2 * size.size_bytes)
    except OSError:
        raise NoMemoryError(NO_MEMORY) from None
    with memory:
        return await models.gateway.complete(call)


def connect(fds: FdService, llm: LlmService) -> Conversations:
    """Connect a host's LLM fds with its model: fork, spawn, summaries, conversations."""
    models = llm.models
    failures = (FailedCallError, QuotaError)
    model = GatewayModel(models.presets, partial(ask, models), failures, models.budget)
    conversations = Conversations(fds, model)
    llm.dialogues = _Dialogues(conversations, FailedCallError)
    return conversations


class _Dialogues:
    """Conversations of LLM_CHAT; see ``supervisor.llm.conversations.Dialogues``."""

    def __init__(
        self, conversations: Conversations, failure: Callable[[str], Exception]
    ) -> None:
        self._conversations = conversations
        self._failure = failure
        self.client_gone = conversations.client_gone

    async def answer(self, turn: ConversationTurn) -> Completion:
        """See ``Dialogues``."""
        try:
            reply = await self._conversations.answer(turn)
        except ModelError as why:
            # The gateway's own error; else the loop's.
            raise why.__cause__ or self._failure(str(why)) from None
        return cast("Completion", reply.whole)
