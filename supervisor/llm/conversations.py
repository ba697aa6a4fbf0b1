"""Conversations that a host keeps by name (``PRESET@NAME``, spec L5).

Rules of this file.

1. A conversation belongs to one client, and its nested clients cannot read it (A5).
2. Kept conversations count against the top child, with its nested clients (spec S7).
3. A conversation ends with its client.
4. A failed call leaves its conversation unchanged, so that it can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hostlib.threads import LARGE_BYTES, in_thread_if
from supervisor.llm.errors import NO_MEMORY
from supervisor.llm.gateway import FailedCallError, NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llm.gateway import Completion
    from supervisor.llm.models import Models
    from vfs.clients import Client

MOST_KEPT = 100
"""Most conversations of one top child: more than any known use needs, and few to search."""

MOST_KEPT_CHARS = 32 * 1024 * 1024
"""Most text in the conversations of one top child: four of the longest requests (spec L2)."""

Message = dict[str, str]
"""A message of a conversation: ``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class ChosenPreset:
    """The preset of a request, and the conversation that the request goes on with.

    Attributes:
        name: the preset's name; empty for none.
        system: the preset's text.
        has_tools: the model may call tools before it answers.
        conversation: its name; empty for one that ends with its answer.
    """

    name: str = ""
    system: str = ""
    has_tools: bool = False
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """A client's turn in a conversation with the model.

    Attributes:
        client: the client that asks and pays.
        claim: the effective view (spec A1).
        preset: its preset and its conversation.
        prompt: the user's text.
        files: (name, content) of each input file.
    """

    client: Client
    claim: bool
    preset: ChosenPreset
    prompt: str
    files: tuple[tuple[str, str], ...]

    @property
    def size_chars(self) -> int:
        """The number of characters of its texts."""
        return len(self.prompt) + sum(len(text) for _, text in self.files)


class Dialogues(Protocol):
    """Answers turns: with the tool loop of LLM fds, or with one call."""

    async def answer(self, turn: ConversationTurn) -> Completion:
        """Return the model's last completion (spec L7).

        Raises:
            KeptError: the conversation cannot be kept; no call was made.
            QuotaError: a call cannot be paid (spec L10).
            FailedCallError: the provider failed, or the model gave no answer (L11).
        """

    def client_gone(self, client: Client) -> None:
        """Forget a client's conversations."""


class KeptError(Exception):
    """There is no room for a conversation; the text is one line."""


def user_text(prompt: str, files: tuple[tuple[str, str], ...]) -> str:
    """Return the user's message: the prompt, and each file under its name."""
    parts = [prompt] if prompt else []
    parts += [file_text(name, text) for name, text in files]
    return "\n\n".join(parts)


async def long_user_text(prompt: str, files: tuple[tuple[str, str], ...]) -> str:
    """Return ``user_text``; long texts are joined in a worker thread (attack 43)."""
    size = len(prompt) + sum(len(text) for _, text in files)
    return await in_thread_if(size > LARGE_BYTES, user_text, prompt, files)


def file_text(name: str, text: str) -> str:
    """Return the part of a message for a file."""
    return f"File {name}:\n{text}"


T = TypeVar("T")


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    top_id: str
    size_chars: int


class NamedConversations(Generic[T]):
    """The conversations of a host's clients by name."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry[T]] = {}

    def find(self, client: Client, name: str) -> T | None:
        """Return a conversation; None if there is none of this name."""
        entry = self._entries.get((client.id, name))
        return None if entry is None else entry.value

    def all(self) -> Iterator[tuple[str, str, T, int]]:
        """Yield (client's id, name, conversation, its characters) of each."""
        for (client_id, name), one in self._entries.items():
            yield client_id, name, one.value, one.size_chars

    def check_room(self, client: Client, name: str, more_chars: int) -> None:
        """Check that a conversation may have more text.

        Raises:
            KeptError: there are too many conversations, or they are too long.
        """
        top_id = _top_of(client)
        mine = [one for one in self._entries.values() if one.top_id == top_id]
        if (client.id, name) not in self._entries and len(mine) >= MOST_KEPT:
            raise KeptError(f"{MOST_KEPT} conversations are kept already; use one")
        size = more_chars + sum(one.size_chars for one in mine)
        if size > MOST_KEPT_CHARS:
            text = f"{size} characters of conversations, more than {MOST_KEPT_CHARS}"
            raise KeptError(text)

    def keep(self, client: Client, name: str, value: T, size_chars: int) -> None:
        """Store a conversation, or its new state."""
        self._entries[client.id, name] = _Entry(value, _top_of(client), size_chars)

    def drop(self, client: Client) -> list[T]:
        """Forget a client's conversations, and return them."""
        keys = [key for key in self._entries if key[0] == client.id]
        return [self._entries.pop(key).value for key in keys]


def _top_of(client: Client) -> str:
    while client.parent is not None:
        client = client.parent
    return client.id


class PlainDialogues:
    """See ``Dialogues``.

    Args:
        models: the host's models.

    Attributes:
        kept: conversations under names.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self.kept: NamedConversations[tuple[Message, ...]] = NamedConversations()

    async def answer(self, turn: ConversationTurn) -> Completion:
        """See ``Dialogues``."""
        if turn.preset.has_tools:
            raise FailedCallError("the preset has tools, and this host has no LLM fds")
        client, models = turn.client, self._models
        self.kept.check_room(client, turn.preset.conversation, turn.size_chars)
        said = self.kept.find(client, turn.preset.conversation) or ()
        size_chars = turn.size_chars + sum(len(one["content"]) for one in said)
        is_long = size_chars > LARGE_BYTES
        messages, size = await in_thread_if(is_long, _messages, turn, said)
        said = tuple(messages[1:])
        call = models.call(client, messages, claim=turn.claim, size_bytes=size)
        # Earlier messages only: the client has reserved all copies of the present one.
        before = 2 * sum(len(message["content"]) for message in said[:-1])
        try:
            memory = models.budget.reservation(client.ledger, before)
        except OSError:
            raise NoMemoryError(NO_MEMORY) from None
        with memory:
            completion = await models.gateway.complete(call)
        said = (*said, {"role": "assistant", "content": completion.text})
        size = sum(len(message["content"]) for message in said)
        self.kept.keep(client, turn.preset.conversation, said, size)
        return completion

    def client_gone(self, client: Client) -> None:
        """See ``Dialogues``."""
        self.kept.drop(client)


def _messages(
    turn: ConversationTurn, said: tuple[Message, ...]
) -> tuple[list[Message], int]:
    """Return what a turn sends after what was said before it, and its length in bytes."""
    messages = [{"role": "system", "content": turn.preset.system}, *said]
    if text := user_text(turn.prompt, turn.files):
        messages.append({"role": "user", "content": text})
    return messages, sum(len(one["content"].encode()) for one in messages)
