"""The stand-in's Messages, read by the official client."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from demo.provider import Provider, Tokens, serving
from tests.helpers.canary import KEY

TOOLS: Any = [{"name": "Bash", "input_schema": {"type": "object"}}]


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    """Return a stand-in that wants the key."""
    async with serving(KEY) as opened:
        yield opened


@pytest.fixture
async def client(provider: Provider, anthropic: Any) -> AsyncIterator[Any]:
    """Return the client, with the key as a bearer's."""
    async with anthropic.AsyncAnthropic(
        base_url=provider.root, auth_token=KEY, api_key=None, max_retries=0, timeout=20
    ) as opened:
        yield opened


def ask(text: str, **more: Any) -> dict[str, Any]:
    """Return the arguments of a call."""
    said = [{"role": "user", "content": text}]
    return {"model": "m", "max_tokens": 4000, "messages": said, **more}


async def test_the_official_client_reads_messages(
    provider: Provider, client: Any
) -> None:
    orders = "!say=all_is_well !think=2 !cached=3 !written=2"
    answer = await client.messages.create(**ask(orders, system="x"))
    thought, said = answer.content
    assert thought.type == "thinking"
    assert said.type == "text"
    assert said.text == "all is well"
    assert answer.stop_reason == "end_turn"
    usage = answer.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 2)
    prompt = usage.input_tokens + 5
    assert provider.tokens("messages") == Tokens(1, prompt, 3, 2, 5, 2)
    assert provider.tokens().cost(cache_write=1.25) == prompt - 5 + 0.75 + 2.5 + 20


async def test_the_official_client_reads_streamed_messages(
    provider: Provider, client: Any
) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 2000}
    orders = '!think=2 !pings !script=[[["Bash",{"command":"ls"}]]]'
    request = ask(orders, tools=TOOLS, thinking=thinking)
    async with client.messages.stream(**request) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_message()
    thought, call = final.content
    assert thought.type == "thinking"
    assert thought.signature
    assert call.type == "tool_use"
    assert call.input == {"command": "ls"}
    assert final.stop_reason == "tool_use"
    # Two words of thought, and the arguments in pieces of twelve characters.
    assert final.usage.output_tokens == provider.tokens().output == 4


async def test_the_official_client_counts_tokens_and_lists_models(
    provider: Provider, client: Any
) -> None:
    said: Any = [{"role": "user", "content": "ten bytes."}]
    counted = await client.messages.count_tokens(model="m", messages=said)
    assert counted.input_tokens == 2
    assert [one.id async for one in client.models.list()] == ["stand-in"]
    assert provider.tokens() == Tokens()


async def test_the_official_client_tells_refusals_apart(
    client: Any, anthropic: Any
) -> None:
    with pytest.raises(anthropic.RateLimitError) as caught:
        await client.messages.create(**ask("!status=429 !retry-after=7"))
    assert caught.value.response.headers["retry-after"] == "7"
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        await client.messages.create(**ask("!status=529"))
    assert overloaded.value.status_code == 529
