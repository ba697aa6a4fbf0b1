"""The gateway as the tool loop's model: what goes in, what comes out, what fails."""

import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from supervisor.llm.gateway import Completion
from supervisor.llmfd import Json
from supervisor.llmfd.gateway import GatewayModel
from supervisor.llmfd.toolloop import ModelError, size_of
from tests.helpers.sessions import Hall, hall
from vfs.clients import Client
from vfs.payload import PayloadBudget

__all__ = ["hall"]


class QuotaError(Exception):
    """The exception of a gateway with a spent quota."""


@dataclass
class Asker:
    """A gateway that gives one answer."""

    answer: dict[str, Json] | Exception
    asked: list[Mapping[str, object]] = field(default_factory=list)

    async def ask(
        self, client: Client, body: Mapping[str, object], claim: bool
    ) -> Completion:
        del client, claim
        self.asked.append(body)
        if isinstance(self.answer, Exception):
            raise self.answer
        return Completion(b"", self.answer)


PRESETS = {"general": "Be good."}
CALLS: list[Json] = [{"id": "1", "type": "function", "function": {"name": "list_fds"}}]


@pytest.mark.parametrize("calls", [None, [], CALLS])
async def test_a_message_comes_back_as_a_provider_takes_it(
    hall: Hall, calls: Json
) -> None:
    message: Json = {
        "role": "assistant",
        "content": "hi",
        "tool_calls": calls,
        "refusal": None,
    }
    asker = Asker({"choices": [{"message": message}]})
    model = GatewayModel(PRESETS, asker.ask, (QuotaError,), PayloadBudget())
    client = hall.connect().client
    reply = await model.complete(client, "general", [{"role": "user"}], CALLS, True)
    expected: dict[str, Json] = {"role": "assistant", "content": "hi"}
    if calls:
        expected["tool_calls"] = calls
        assert reply.message["tool_calls"] is calls  # which may be long: no copy
    assert reply.message == expected
    assert reply.text == "hi"
    assert isinstance(reply.whole, Completion)
    assert asker.asked == [{"messages": [{"role": "user"}], "tools": CALLS}]
    assert model.system("general") == "Be good."
    assert model.system("other") is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (QuotaError(), "quota exceeded: cannot make LLM call"),
        (QuotaError("timed out"), "timed out"),
        ({"choices": []}, "invalid response"),
        ({"choices": [{"message": None}]}, "invalid response"),
        ({}, "invalid response"),
    ],
)
async def test_what_fails_is_a_fault_of_the_model(
    hall: Hall, answer: dict[str, Json] | Exception, said: str
) -> None:
    asker = Asker(answer)
    model = GatewayModel(PRESETS, asker.ask, (QuotaError,), PayloadBudget())
    with pytest.raises(ModelError, match=said):
        await model.complete(hall.connect().client, "general", [], [], True)
    assert asker.asked == [{"messages": []}]


def test_the_size_of_messages_is_that_of_their_text_and_copies_none_of_it() -> None:
    arguments = "x" * 1_000_000
    call: Json = {"id": "one", "function": {"name": "write", "arguments": arguments}}
    text: Json = [{"type": "text", "text": "four"}, {"n": 1, "of": None}]
    messages: list[dict[str, Json]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": text, "tool_calls": [call] * 10},
    ]
    tracemalloc.start()
    size = size_of(messages)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    of_a_call = len("idonefunctionnamewritearguments") + 1_000_000
    assert size == 5 + len("typetexttextfournof") + 10 * of_a_call
    assert most < 100_000
