"""Conversations with a model that follows a script, in a host without processes."""

import json
from collections.abc import Callable, Iterator, Sequence

import pytest
import trio

from supervisor.llm.conversations import ChosenPreset, ConversationTurn
from supervisor.llmfd import Checkpoints, ContentSettings, Json, Process, Store
from supervisor.llmfd.conversations import Conversations
from supervisor.llmfd.service import FdService
from supervisor.llmfd.toolloop import ModelReply
from tests.helpers.sessions import Hall
from vfs.clients import Client
from vfs.payload import MemoryReservation, PayloadBudget

Message = dict[str, Json]
Script = Callable[[list[Message]], Message]


def calling(*calls: tuple[str, object]) -> Message:
    """Return an assistant's message that calls tools."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": given if isinstance(given, str) else json.dumps(given),
                },
            }
            for number, (name, given) in enumerate(calls)
        ],
    }


def words(text: str) -> Message:
    """Return an assistant's message in words."""
    return {"role": "assistant", "content": text}


class Scripted:
    """A model: each answer is the next of the script, or what a function makes of it.

    It checks what a provider checks: every call has its answer, and no unknown keys.
    """

    def __init__(self, *script: Message | Script) -> None:
        self.script = list(script)
        self.seen: list[list[Message]] = []
        self.tools: list[str] = []
        self.clients: list[Client] = []
        self.budget = PayloadBudget()

    def system(self, program: str) -> str | None:
        """See ``Model``."""
        return {"general": "Be good.", "expert": "You know all.", "": ""}.get(program)

    def reservation(self, client: Client) -> MemoryReservation:
        """See ``Model``."""
        return self.budget.reservation(client.ledger)

    async def complete(
        self,
        client: Client,
        program: str,
        messages: Sequence[Message],
        tools: Sequence[Json],
        claim: bool,
    ) -> ModelReply:
        """See ``Model``."""
        del program, claim
        await trio.lowlevel.checkpoint()
        checked(messages)
        self.clients.append(client)
        self.seen.append(list(messages))
        self.tools = [
            tool["function"]["name"] for tool in json.loads(json.dumps(tools))
        ]
        step = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        return ModelReply(step(list(messages)) if callable(step) else step, self)


def checked(messages: Sequence[Message]) -> None:
    """Fail if a provider would refuse these messages."""
    known = {"role", "content", "tool_calls", "tool_call_id"}
    open_calls: list[Json] = []
    for message in messages:
        assert set(message) <= known, message
        if message["role"] == "tool":
            open_calls.remove(message["tool_call_id"])
            continue
        assert not open_calls, open_calls
        calls = message.get("tool_calls") or []
        assert isinstance(calls, list)
        open_calls = [call["id"] for call in calls]  # type: ignore[call-overload, index]
    assert not open_calls


class Scene:
    """A client with conversations, and the model behind them."""

    def __init__(self, hall: Hall, model: Scripted, settings: ContentSettings) -> None:
        self.model = model
        self.client = hall.connect().client
        checkpoints = Checkpoints(str(hall.where / "checkpoints"))
        self.service = FdService(
            hall.fs, Store(), settings=settings, checkpoints=checkpoints
        )
        self.conversations = Conversations(self.service, model)

    @property
    def process(self) -> Process:
        """Return the client's own process."""
        return self.service.process_of(self.client)

    async def chat(self, prompt: str, name: str = "") -> str:
        """Ask in a conversation, kept if it has a name; return the answer."""
        preset = ChosenPreset("general", "Be good.", has_tools=True, conversation=name)
        turn = ConversationTurn(self.client, True, preset, prompt, ())
        reply = await self.conversations.answer(turn)
        assert reply.whole is self.model
        return reply.text


@pytest.fixture
def scene(hall: Hall) -> Iterator[Callable[..., Scene]]:
    """Make scenes; at the end nothing is kept for anybody."""
    made: list[Scene] = []

    def make(*script: Message | Script, **settings: object) -> Scene:
        chosen = ContentSettings(**settings)  # type: ignore[arg-type]
        one = Scene(hall, Scripted(*script), chosen)
        made.append(one)
        return one

    yield make
    for one in made:
        one.service.client_gone(one.client)
        assert not one.service.store.blobs
        one.service.close()


Make = Callable[..., Scene]
