"""Conversations that are messages and nothing else, for hosts without LLM fds (L5).

A call that fails leaves its conversation as it was: said again, it is said once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.dialogues import LARGE_CHARS, Kept, user_text
from supervisor.llm.gateway import NO_MEMORY, FailedCallError, NoMemoryError
from vfs.hostio import in_thread

if TYPE_CHECKING:
    from supervisor.dialogues import Message, Turn
    from supervisor.llm.gateway import Completion
    from supervisor.llm.models import Models
    from vfs.clients import Client


class PlainDialogues:
    """See ``supervisor.dialogues.Dialogues``.

    Args:
        models: answer.

    Attributes:
        kept: conversations under names.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self.kept: Kept[tuple[Message, ...]] = Kept()

    async def answer(self, turn: Turn) -> Completion:
        """See ``Dialogues``."""
        if turn.has_tools:
            raise FailedCallError("the preset has tools, and this host has no LLM fds")
        client, models = turn.client, self._models
        self.kept.check_room(client, turn.name, turn.size_chars)
        said = self.kept.find(client, turn.name) or ()
        size_chars = turn.size_chars + sum(len(one["content"]) for one in said)
        if size_chars > LARGE_CHARS:
            messages, size = await in_thread(_messages, turn, said)
        else:
            messages, size = _messages(turn, said)
        said = tuple(messages[1:])
        call = models.call(client, messages, claim=turn.claim, size_bytes=size)
        # What was said before; of what is said now its client has reserved all forms.
        before = 2 * sum(len(message["content"]) for message in said[:-1])
        try:
            memory = models.budget.reservation(client.ledger, before)
        except OSError:
            raise NoMemoryError(NO_MEMORY) from None
        with memory:
            completion = await models.gateway.complete(call)
        said = (*said, {"role": "assistant", "content": completion.text})
        size = sum(len(message["content"]) for message in said)
        self.kept.keep(client, turn.name, said, size)
        return completion

    def client_gone(self, client: Client) -> None:
        """See ``Dialogues``."""
        self.kept.drop(client)


def _messages(turn: Turn, said: tuple[Message, ...]) -> tuple[list[Message], int]:
    """Return what a turn sends after what was said before it, and its length in bytes."""
    messages = [{"role": "system", "content": turn.system}, *said]
    if text := user_text(turn.prompt, turn.files):
        messages.append({"role": "user", "content": text})
    return messages, sum(len(one["content"].encode()) for one in messages)
