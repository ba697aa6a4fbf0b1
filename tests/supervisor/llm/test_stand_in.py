"""The stand-in for a provider, against the official client and by its raw bytes."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
import trio
from openai import AsyncOpenAI, BadRequestError, RateLimitError

from demo.provider import Provider, Tokens, serving
from tests.helpers.canary import KEY
from tests.helpers.stage import eventually

VERSION = {"anthropic-version": "2023-06-01"}
APIS = ("chat", "responses", "messages")
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
ENDS = {"chat": "[DONE]", "responses": "response.completed", "messages": "message_stop"}

RESPONSES_ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]

RESPONSES_CALLS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]

MESSAGES_ORDER = [
    "message_start",
    "content_block_start",
    "ping",
    "content_block_delta",
    "content_block_delta",
    "content_block_delta",
    "content_block_stop",
    "content_block_start",
    "content_block_delta",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
]


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    """Return a stand-in that wants the key."""
    async with serving(KEY) as opened:
        yield opened


@pytest.fixture
async def client(provider: Provider) -> AsyncIterator[AsyncOpenAI]:
    """Return the official client."""
    async with AsyncOpenAI(
        base_url=provider.url, api_key=KEY, max_retries=0, timeout=20
    ) as opened:
        yield opened


Ask = Callable[..., Any]


@pytest.fixture
async def ask(provider: Provider) -> AsyncIterator[Ask]:
    """Return a function that asks an API, and gives the reply."""
    bearer = {"authorization": f"Bearer {KEY}"}
    async with httpx2.AsyncClient(headers=bearer, timeout=20, trust_env=False) as http:

        async def ask(api: str, text: str, **more: Any) -> httpx2.Response:
            body = request(api, text, **more)
            url = f"{provider.url}/{PATHS[api]}"
            return await http.post(url, json=body, headers=VERSION)

        yield ask


def request(api: str, text: str, **more: Any) -> dict[str, Any]:
    """Return a request's body."""
    name = "input" if api == "responses" else "messages"
    bound = {"max_tokens": 8000} if api == "messages" else {}
    said = [{"role": "user", "content": text}]
    return {"model": "m", name: said, **bound, **more}


def events_of(reply: httpx2.Response) -> list[Any]:
    """Return the data of a stream's events."""
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


def types_of(reply: httpx2.Response) -> list[str]:
    """Return the types of a stream's events; the SSE name is the same."""
    found = [event["type"] for event in events_of(reply)]
    named = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    assert named == found
    return found


# The official client


async def test_the_official_client_reads_responses(
    provider: Provider, client: AsyncOpenAI
) -> None:
    orders = "!say=all_is_well !think=2 !hidden=5 !cached=3"
    answer = await client.responses.create(model="m", input=orders, instructions="x")
    assert answer.output_text == "all is well"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens == 7
    prompt = answer.usage.input_tokens
    assert provider.tokens("responses") == Tokens(1, prompt, 3, 0, 10, 7)
    assert provider.tokens("chat") == Tokens()
    assert provider.tokens().cost() == prompt - 3 + 0.75 + 40


async def test_the_official_client_reads_streamed_responses(
    client: AsyncOpenAI,
) -> None:
    async with client.responses.stream(model="m", input="!say=all_is_well") as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "all is well"
    assert seen[-1] == "response.completed"


async def test_the_official_client_reads_calls_of_responses(
    client: AsyncOpenAI,
) -> None:
    tools: Any = [
        {"type": "function", "name": "f", "parameters": {}, "strict": False},
        {"type": "custom", "name": "apply_patch"},
    ]
    script = '!script=[[["f",{"a":1}],["apply_patch","***"]]]'
    async with client.responses.stream(model="m", input=script, tools=tools) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    first, second = final.output
    assert first.type == "function_call"
    assert json.loads(first.arguments) == {"a": 1}
    assert second.type == "custom_tool_call"
    assert second.input == "***"


async def test_the_official_client_reads_chat_with_reasoning(
    provider: Provider, client: AsyncOpenAI
) -> None:
    orders: Any = [{"role": "user", "content": "!say=all_is_well !think=2 !cached=1"}]
    answer = await client.chat.completions.create(model="m", messages=orders)
    assert answer.choices[0].message.content == "all is well"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    assert provider.tokens() == Tokens(1, answer.usage.prompt_tokens, 1, 0, 5, 2)


async def test_the_official_client_reads_embeddings_and_models(
    provider: Provider, client: AsyncOpenAI
) -> None:
    texts = ["one", "two!", "one"]
    answer = await client.embeddings.create(model="m", input=texts, dimensions=4)
    first, second, third = (one.embedding for one in answer.data)
    plain = await client.embeddings.create(
        model="m", input=texts, dimensions=4, encoding_format="float"
    )
    assert [one.embedding for one in plain.data] == [first, second, third]
    assert len(first) == 4
    assert first == third != second
    assert answer.usage.prompt_tokens == 3
    assert provider.tokens("embeddings") == Tokens(calls=2, input=6)
    assert [one.id async for one in client.models.list()] == ["stand-in"]
    assert (await client.models.retrieve("stand-in")).id == "stand-in"


async def test_the_official_client_tells_refusals_apart(
    provider: Provider, client: AsyncOpenAI
) -> None:
    orders = "!status=429 !code=insufficient_quota !retry-after=7 !header=x-a:b"
    with pytest.raises(RateLimitError) as caught:
        await client.responses.create(model="m", input=orders)
    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.response.headers["x-a"] == "b"
    with pytest.raises(BadRequestError):
        await client.responses.create(model="m", input="!least=16", max_output_tokens=1)
    provider.orders = "!once=400"
    with pytest.raises(BadRequestError):
        await client.embeddings.create(model="m", input="x")
    await client.embeddings.create(model="m", input="x")
    # A refused request is no call.
    assert provider.tokens().calls == 1


# Orders of events


async def test_events_of_responses_come_in_the_apis_order(ask: Ask) -> None:
    # spec MD3
    reply = await ask("responses", "!words=3 !think=2", stream=True)
    assert types_of(reply) == RESPONSES_ORDER
    events = events_of(reply)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    last = events[-1]["response"]
    assert last["id"] == events[0]["response"]["id"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert last["output"] == done
    plain = (await ask("responses", "!words=3 !think=2")).json()
    assert [one["type"] for one in plain["output"]] == ["reasoning", "message"]
    assert {**plain["usage"]} == last["usage"]


async def test_calls_of_responses_come_in_the_apis_order(ask: Ask) -> None:
    tools = [
        {"type": "web_search"},
        {"type": "function", "name": "f"},
        {"type": "custom", "name": "c"},
        {
            "type": "namespace",
            "name": "n",
            "tools": [{"type": "function", "name": "g"}],
        },
    ]
    script = '!script=[[["f",{"abc":"defgh"}],["c","text"],["g",{}]]]'
    reply = await ask("responses", script, tools=tools, stream=True)
    assert types_of(reply) == RESPONSES_CALLS
    output = events_of(reply)[-1]["response"]["output"]
    assert [one["name"] for one in output] == ["f", "c", "g"]
    assert output[2]["namespace"] == "n"


async def test_events_of_messages_come_in_the_apis_order(ask: Ask) -> None:
    # spec MD3
    orders = "!words=2 !think=2 !cached=2 !written=1"
    reply = await ask("messages", orders, stream=True)
    assert types_of(reply) == MESSAGES_ORDER
    events = events_of(reply)
    deltas = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    assert deltas == [
        "thinking_delta", "thinking_delta", "signature_delta", "text_delta",
        "text_delta",
    ]  # fmt: skip
    usage = events[-2]["usage"]
    assert usage["cache_read_input_tokens"] == 2
    assert usage["cache_creation_input_tokens"] == 1
    assert usage["output_tokens"] == 4
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    plain = (await ask("messages", orders)).json()
    assert plain["usage"] == usage
    assert [one["type"] for one in plain["content"]] == ["thinking", "text"]


async def test_a_call_of_messages_comes_as_json_in_pieces(
    provider: Provider, ask: Ask
) -> None:
    tools = [{"name": "Bash", "input_schema": {}}]
    script = '!script=[[["Bash",{"command":"ls"}]],"all_done"]'
    reply = await ask("messages", script, tools=tools, stream=True)
    parts = [e["delta"] for e in events_of(reply) if e["type"] == "content_block_delta"]
    told = "".join(part["partial_json"] for part in parts)
    assert json.loads(told) == {"command": "ls"}
    assert events_of(reply)[-2]["delta"]["stop_reason"] == "tool_use"
    use = (await ask("messages", script, tools=tools)).json()["content"][0]
    assert use["input"] == {"command": "ls"}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "calc.py"}
    said = [
        {"role": "user", "content": script},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    answer = (await ask("messages", "", messages=said, tools=tools)).json()
    assert answer["content"][0]["text"] == "all done"
    assert json.loads(provider.served[-1].data) == provider.served[-1].body


# Requests that the real Messages API refuses


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": 2000, "thinking": 2000}, "thinking.budget_tokens"),
        ({"max_tokens": 2000, "thinking": 1000}, "thinking.budget_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
)
async def test_messages_refuses_a_bad_request(
    ask: Ask, more: dict[str, Any], named: str
) -> None:
    # spec MD2
    if "thinking" in more:
        budget = more.pop("thinking")
        more["thinking"] = {"type": "enabled", "budget_tokens": budget}
    reply = await ask("messages", "hello", **more)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert named in reply.json()["error"]["message"]


async def test_messages_wants_its_version_and_a_key(provider: Provider) -> None:
    url = f"{provider.url}/messages?beta=true"
    body = request("messages", "hello")
    async with httpx2.AsyncClient(timeout=20, trust_env=False) as http:
        key = {"x-api-key": KEY}
        unversioned = await http.post(url, json=body, headers=key)
        unknown = await http.post(url, json=body, headers=VERSION)
        both = await http.post(url, json=body, headers=VERSION | key)
        looked = await http.head(provider.root)
        listed = await http.head(f"{provider.url}/models", headers=key)
    assert [r.status_code for r in (unversioned, unknown, both)] == [400, 401, 200]
    assert unknown.json()["error"]["type"] == "authentication_error"
    assert (looked.status_code, looked.content) == (200, b"")
    assert (listed.status_code, listed.content) == (200, b"")
    assert int(listed.headers["content-length"]) > 0


async def test_messages_counts_tokens_without_a_charge(
    provider: Provider, client: AsyncOpenAI
) -> None:
    del client
    bearer = {"authorization": f"Bearer {KEY}", **VERSION}
    async with httpx2.AsyncClient(timeout=20, trust_env=False) as http:
        body = request("messages", "ten bytes.", system="ten bytes.")
        url = f"{provider.url}/messages/count_tokens"
        reply = await http.post(url, json=body, headers=bearer)
    assert reply.json() == {"input_tokens": 4}
    assert provider.tokens() == Tokens()


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}]},
        {"tools": "x"},
        {"tools": [5]},
        {"max_tokens": "many"},
        {"max_tokens": 0},
        {"messages": [5], "input": [5]},
    ],
)
@pytest.mark.parametrize("api", APIS)
async def test_what_cannot_be_read_is_refused(
    ask: Ask, api: str, more: dict[str, Any]
) -> None:
    if api == "messages" and "tools" in more:
        more = {"tools": [{"type": "custom"}]}
    assert (await ask(api, "hello", **more)).status_code == 400
    assert (await ask(api, "hello")).status_code == 200


# Tricks


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_is_cut_after_so_many_bytes(
    provider: Provider, ask: Ask, api: str
) -> None:
    whole = await ask(api, "!words=20", stream=True)
    await eventually(lambda: provider.served[0].done)
    with pytest.raises(httpx2.RemoteProtocolError):
        await ask(api, "!words=20 !cut=700", stream=True)
    assert len(whole.content) > 700
    assert not provider.served[1].done
    assert provider.served[1].pieces < 20


FAILURES = {
    "chat": lambda last: last["error"]["message"],
    "responses": lambda last: last["message"],
    "messages": lambda last: last["error"]["message"],
}


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_fails_in_the_middle_by_an_event(
    provider: Provider, ask: Ask, api: str
) -> None:
    reply = await ask(api, "!words=4 !error", stream=True)
    assert FAILURES[api](events_of(reply)[-1]).startswith("it broke")
    assert provider.served[0].pieces == 2
    assert not provider.served[0].done
    assert provider.tokens().output == 2


async def test_responses_fail_in_either_form(ask: Ask) -> None:
    orders = "!words=4 !error=failed !code=insufficient_quota"
    last = events_of(await ask("responses", orders, stream=True))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "insufficient_quota"


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_events_come_out_of_order_twice_or_not_at_all(
    provider: Provider, ask: Ask, api: str
) -> None:
    usual = types_of(await ask(api, "!words=2", stream=True))
    swapped = types_of(await ask(api, "!words=2 !swap=0", stream=True))
    assert swapped == [usual[1], usual[0], *usual[2:]]
    piece = next(at for at, name in enumerate(usual) if name.endswith("delta"))
    twice = types_of(await ask(api, f"!words=2 !twice={piece}", stream=True))
    assert twice == [*usual[: piece + 1], *usual[piece:]]
    counted = provider.served[0].tokens.output
    assert [one.tokens.output for one in provider.served] == [counted] * 3
    dropped = types_of(await ask(api, f"!words=2 !drop={ENDS[api]}", stream=True))
    assert dropped == usual[:-1]


@pytest.mark.parametrize("api", APIS)
async def test_fields_are_lacking_or_hold_the_key(ask: Ask, api: str) -> None:
    for stream in (False, True):
        lacking = await ask(api, "hello !lack=id,usage", stream=stream)
        assert '"id"' not in lacking.text
        assert '"usage"' not in lacking.text
        leaking = await ask(api, "hello !leak-field=id,model", stream=stream)
        assert f'"id": "Bearer {KEY}"' in leaking.text
        assert f'"model": "Bearer {KEY}"' in leaking.text
        named = await ask(api, "hello !leak-name", stream=stream)
        assert f'"Bearer {KEY}": "Bearer {KEY}"' in named.text
        headed = await ask(api, "hello !leak-header", stream=stream)
        assert headed.headers["x-request-id"] == f"Bearer {KEY}"
    event = await ask(api, "hello !leak-event", stream=True)
    assert f"event: Bearer {KEY}" in event.text


@pytest.mark.parametrize("api", APIS)
async def test_the_key_is_thought_said_called_and_told(ask: Ask, api: str) -> None:
    for order in ("!leak", "!leak-tool", "!leak-thought", "!leak-refused"):
        assert KEY in (await ask(api, f"hello {order}")).text
    last = events_of(await ask(api, "hello !leak-error", stream=True))[-1]
    assert KEY in FAILURES[api](last)


@pytest.mark.parametrize("api", APIS)
async def test_usage_is_none_or_more_than_there_were_bytes(
    provider: Provider, ask: Ask, api: str
) -> None:
    none = (await ask(api, "hello !usage=none")).json()
    assert none["usage"] is None
    orders = "hello !prompt-tokens=100000 !output-tokens=50000"
    many = (await ask(api, orders)).json()["usage"]
    assert {100_000, 50_000} <= {one for one in many.values() if isinstance(one, int)}
    counted = provider.served[-1].tokens
    assert (counted.input, counted.output) == (100_000, 50_000)
    bad = (await ask(api, "hello !usage=bad")).json()["usage"]
    assert {"many", "more"} <= {one for one in bad.values() if isinstance(one, str)}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("foreign", APIS)
async def test_another_apis_events_come(ask: Ask, api: str, foreign: str) -> None:
    reply = await ask(api, f"hello !foreign={foreign}", stream=True)
    last = events_of(reply)[-1]
    assert (last if isinstance(last, str) else last["type"]) == ENDS[foreign]


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_has_another_form_than_was_asked_for(
    ask: Ask, api: str
) -> None:
    plain = await ask(api, "hello !plain", stream=True)
    assert "The message" in json.dumps(plain.json())
    streamed = await ask(api, "hello !stream")
    assert streamed.text.startswith(("data:", "event:"))
    kind = await ask(api, "hello !kind=text/plain", stream=True)
    assert kind.headers["content-type"] == "text/plain"
    page = await ask(api, "hello !status=503 !page")
    assert (page.status_code, page.text[:6]) == (503, "<html>")
    away = await ask(api, "hello !redirect=http://127.0.0.1:1/v1")
    assert away.status_code == 307
    assert away.headers["location"] == "http://127.0.0.1:1/v1"
    giant = await ask(api, "hello !giant=1", stream=True)
    assert len(giant.content) > 1 << 20


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_never_ends(provider: Provider, api: str) -> None:
    body = json.dumps(request(api, "hello !endless")).encode()
    head = f"POST /v1/{PATHS[api]} HTTP/1.1\r\nHost: x\r\nAnthropic-Version: 1\r\n"
    head += f"X-Api-Key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", provider.port) as stream:
        await stream.send_all(head.encode() + body)
        with trio.fail_after(20):
            while provider.tokens().output < 100:
                assert await stream.receive_some()
    assert not provider.served[0].done


@pytest.mark.parametrize("api", APIS)
async def test_the_bound_of_the_answer_holds(ask: Ask, api: str) -> None:
    name = "max_output_tokens" if api == "responses" else "max_tokens"
    answer = (await ask(api, "!words=9 !think=2", **{name: 5})).json()
    assert "word2 " in json.dumps(answer)
    assert "word3 " not in json.dumps(answer)
    output = "completion_tokens" if api == "chat" else "output_tokens"
    assert answer["usage"][output] == 5
    reasons = {
        "chat": lambda: answer["choices"][0]["finish_reason"],
        "responses": lambda: answer["status"],
        "messages": lambda: answer["stop_reason"],
    }
    said = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}
    assert reasons[api]() == said[api]


async def test_a_websocket_is_refused_at_once(provider: Provider) -> None:
    # spec MD, the table of doors
    named = {"connection": "Upgrade", "upgrade": "websocket"}
    async with httpx2.AsyncClient(timeout=20, trust_env=False) as http:
        reply = await http.get(f"{provider.url}/responses", headers=named)
    assert reply.status_code == 426
    assert reply.headers["connection"] == "close"
    assert "error" in reply.json()
