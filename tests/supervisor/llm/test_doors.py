"""The doors of the endpoint: Responses, Messages, embeddings, models (MD1 to MD6)."""

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trio

from supervisor.llm.apis import MESSAGES
from supervisor.llm.endpoint import PER_CHILD
from tests.helpers.canary import KEY
from tests.helpers.doors import (
    Door,
    answered,
    answered_with_head,
    open_door,
    open_door_stage,
    unchunked,
)
from tests.helpers.provider import key_file, provider_process
from tests.helpers.stage import Stage, eventually
from tests.helpers.turns import find_longest_turn
from tests.supervisor.llm.led_provider import (
    NATIVE,
    TRANSLATED,
    WAYS,
    opened,
    raw,
    told,
)

pytestmark = pytest.mark.slow

TURN_S = 0.03
"""The longest turn that a task of the host may take."""

SHELL: Any = {
    "type": "function",
    "name": "shell",
    "parameters": {"type": "object"},
    "strict": None,
}
BASH: Any = {"name": "Bash", "input_schema": {"type": "object"}}


def official(door: Door) -> openai.AsyncOpenAI:
    """Return the client of Chat and Responses as the child has it."""
    return openai.AsyncOpenAI(
        base_url=door.env["OPENAI_BASE_URL"],
        api_key=door.env["OPENAI_API_KEY"],
        max_retries=0,
        timeout=20,
    )


def messages_client(anthropic: Any, door: Door) -> Any:
    """Return the client of Messages as the child has it."""
    return anthropic.AsyncAnthropic(
        base_url=door.env["ANTHROPIC_BASE_URL"],
        auth_token=door.env["ANTHROPIC_AUTH_TOKEN"],
        api_key=None,
        max_retries=0,
        timeout=20,
    )


def charged(stage: Stage) -> float:
    """Return what the stand-in counted, weighted."""
    return stage.provider.tokens().cost()


# spec MD2, MD3, MD4, MD5: plain and streamed, with tools, and paid exactly.
@WAYS
async def test_the_official_client_asks_responses(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    async with opened(tmp_path, **way) as (stage, door), official(door) as client:
        plain = await client.responses.create(
            model="gpt-99", input="!say=all_is_well !cached=3", instructions="x"
        )
        assert plain.output_text == "all is well"
        assert plain.model == "gpt-99"
        orders = '!script=[[["shell",{"command":"ls"}]]]'
        events = [
            event
            async for event in await client.responses.create(
                model="gpt-99", input=orders, tools=[SHELL], stream=True
            )
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert last.type == "response.completed"
        assert last.response.model == "gpt-99"
        (call,) = (one for one in last.response.output if one.type == "function_call")
        assert (call.name, json.loads(call.arguments)) == ("shell", {"command": "ls"})
        assert any(event.type == "response.output_item.done" for event in events)
        assert stage.llm.models.accounts.root.tokens.used == charged(stage)
        rows = stage.events("llm.called")
        api = "responses" if way is NATIVE else "chat"
        assert [row["api"] for row in rows] == [api, api]
        assert {row["asked"] for row in rows} == {"gpt-99"}
        assert rows[0]["cached_tokens"] == 3
        assert (
            sum(row["cost"] for row in rows)
            == stage.llm.models.accounts.root.tokens.used
        )


# spec MD1, MD2, MD3, MD4, MD5
@WAYS
async def test_the_official_client_asks_messages(
    tmp_path: Path, anthropic: Any, way: dict[str, Any]
) -> None:
    async with (
        opened(tmp_path, **way) as (stage, door),
        messages_client(anthropic, door) as client,
    ):
        request: dict[str, Any] = {"model": "claude-9", "max_tokens": 3000}
        said: Any = [
            {"role": "user", "content": "!say=all_is_well !cached=3 !written=2"}
        ]
        plain = await client.messages.create(messages=said, **request)
        assert plain.content[-1].text == "all is well"
        assert plain.model == "claude-9"
        orders = '!script=[[["Bash",{"command":"ls"}]]]'
        said = [{"role": "user", "content": orders}]
        async with client.messages.stream(
            messages=said, tools=[BASH], **request
        ) as stream:
            whole = await stream.get_final_message()
        assert whole.model == "claude-9"
        assert whole.stop_reason == "tool_use"
        assert whole.content[-1].to_dict()["input"] == {"command": "ls"}
        assert stage.llm.models.accounts.root.tokens.used == charged(stage)
        row = stage.events("llm.called")[0]
        assert (row["cached_tokens"], row["cache_write_tokens"]) == (3, 2)
        count = await client.messages.count_tokens(messages=said, model="claude-9")
        assert count.input_tokens > 10
        assert len(stage.provider.served) == 2


# spec MD2: what the host does not have to change is sent on byte for byte.
@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        (
            "/v1/responses",
            b' {"model" : "m", "new":{"a": 1.50},"input":"!words=1 \\u0041" }\n',
            b' {"model" : "gpt-4o-mini", "new":{"a": 1.50},"input":"!words=1 \\u0041" }\n',
        ),
        (
            "/v1/messages?beta=true",
            b'{"max_tokens":90, "messages":[{"role":"user","content":"!words=1"}],"z":[]}',
            (
                b'{"max_tokens":90, "messages":[{"role":"user","content":"!words=1"}],"z":[]'
                b',"model":"gpt-4o-mini"}'
            ),
        ),
        (
            "/v1/chat/completions",
            b'{"stream":true,"messages":[{"role":"user","content":"!words=1"}],"x":1e2}',
            (
                b'{"stream":true,"messages":[{"role":"user","content":"!words=1"}],"x":1e2'
                b',"model":"gpt-4o-mini","stream_options":{"include_usage":true}}'
            ),
        ),
        (
            "/v1/embeddings",
            b'{"input":["a","b"],"dimensions":8}',
            b'{"input":["a","b"],"dimensions":8,"model":"gpt-4o-mini"}',
        ),
    ],
)
async def test_a_request_is_passed_on(
    tmp_path: Path, path: str, body: bytes, sent: bytes
) -> None:
    async with opened(tmp_path, **NATIVE) as (stage, door):
        headers = {"anthropic-beta": "a,b", "anthropic-version": "2023-01-01"}
        more = {"openai-beta": "c", "x-stainless-lang": "js", "cookie": "d"}
        status, _, _ = await told(door, "POST", path, body, **headers, **more)
        assert status == 200
        (served,) = stage.provider.served
        assert served.data == sent
        passed = {name: served.headers.get(name) for name in (*headers, *more)}
        is_messages = "messages" in path
        expected = dict.fromkeys(passed) | (
            headers if is_messages else {"openai-beta": "c"}
        )
        if "embeddings" in path:
            expected["openai-beta"] = None
        assert passed == expected
        has_key = served.headers.get("x-api-key" if is_messages else "authorization")
        assert has_key == (KEY if is_messages else f"Bearer {KEY}")
        assert stage.llm.models.accounts.root.tokens.used == charged(stage)


# spec MD2: the budget for thinking stays below a bound that is lowered.
@pytest.mark.parametrize(
    ("most", "thinking"),
    [
        (31_999, {"type": "enabled", "budget_tokens": 31_998}),
        (2_000, {"type": "enabled", "budget_tokens": 1_999}),
        (1_000, {"type": "disabled"}),
    ],
)
async def test_a_budget_is_lowered_with_its_bound(
    tmp_path: Path, most: int, thinking: dict[str, Any]
) -> None:
    async with open_door_stage(
        tmp_path, max_tokens=most, api="messages", quota={"max_tokens": 10**7}
    ) as stage:
        door = await open_door(stage)
        asked = {"type": "enabled", "budget_tokens": 31_999}
        said = [{"role": "user", "content": "!words=1"}]
        body = {"max_tokens": 32_000, "thinking": asked, "messages": said}
        status, _, answer = await told(door, "POST", "/v1/messages", body)
        assert status == 200, answer
        sent = stage.provider.served[0].body
        assert (sent["max_tokens"], sent["thinking"]) == (most, thinking)


SAID: Any = [{"role": "user", "content": "!words=1"}]


SAYS: Any = {"messages": SAID, "max_tokens": 9}

PROVIDER_TOOLS: list[Any] = [
    {"type": "mcp", "server_label": "a", "server_url": "https://a.example"},
    {"type": "web_search"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "shell"},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "shell", "environment": {"type": "container_reference", "id": "c"}},
    {"type": "programmatic_tool_calling"},
    {"type": "tool_search"},
    {"type": "brand_new"},
    {"type": "namespace", "name": "a", "tools": [{"type": "mcp", "name": "b"}]},
]

KEPT_ITEMS: list[Any] = [
    {"id": "msg_1"},
    {"type": None, "id": "msg_1"},
    {"role": "assistant", "id": "msg_1"},
    {"type": "message", "role": "assistant", "id": "msg_1"},
    {"type": "image_generation_call", "id": "ig_1"},
    {"type": "web_search_call", "id": "ws_1"},
    {"type": "brand_new", "id": "x_1"},
    {"type": "function_call", "id": "fc_1"},
    {"role": "assistant", "id": "msg_1", "content": 1},
    "text",
]

REFUSED: list[tuple[str, Any, str]] = [
    ("/v1/responses", {"input": "a", "background": True}, "background"),
    ("/v1/responses", {"input": "a", "previous_response_id": "r"}, "previous"),
    ("/v1/responses", {"input": "a", "conversation": "c"}, "conversation"),
    ("/v1/responses", {"input": "a", "prompt": {"id": "p"}}, "prompt"),
    (
        "/v1/responses",
        {"input": [{"type": "item_reference", "id": "i"}]},
        "input",
    ),
    ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"input": "a", "stream": "yes"}, "stream"),
    (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "web_search"}]},
        "tools[0].type",
    ),
    (
        "/v1/responses",
        {"input": "a", "tools": [{"type": "function"}]},
        "tools[0].name",
    ),
    ("/v1/messages", {"max_tokens": True, "messages": SAID}, "max_tokens"),
    ("/v1/messages", {"messages": SAID, "n": 2, "max_tokens": 9}, "n: "),
    (
        "/v1/messages",
        {"messages": SAID, "max_tokens": 9, "mcp_servers": [{}]},
        "mcp_servers",
    ),
    ("/v1/messages", b'{"max_tokens":1,"max_tokens":9}', "stands twice"),
    ("/v1/responses", b'{"input":"a","top_p":NaN}', "NaN"),
    ("/v1/responses", {"input": "a", "store": True}, "store"),
    ("/v1/responses", {"input": "a", "fallbacks": ["big"]}, "fallbacks"),
    ("/v1/messages", {**SAYS, "thread": {"type": "continue"}}, "thread"),
    ("/v1/messages", {**SAYS, "fallbacks": [{"model": "big"}]}, "fallbacks"),
    ("/v1/messages", {**SAYS, "speed": "fast"}, "speed"),
    ("/v1/chat/completions", {"messages": SAID, "models": ["big"]}, "models"),
    ("/v1/chat/completions", {"messages": SAID, "plugins": [{"id": "web"}]}, "plugins"),
    *(("/v1/responses", {"input": "a", "tools": [tool]}, "tools[0].")
      for tool in PROVIDER_TOOLS),
    *(("/v1/responses", {"input": [{"type": kind, "tools": [tool]}]}, "input[0].")
      for kind in ("additional_tools", "tool_search_output") for tool in PROVIDER_TOOLS),
    *(("/v1/messages", {**SAYS, "tools": [{"type": kind, "name": "a", "model": "big"}]},
       "tools[0].type")
      for kind in ("advisor_20260301", "mcp_toolset", "code_execution_20250825",
                   "tool_search_tool_regex_20251119", "bash_20250124_hosted")),
    ("/v1/messages", {**SAYS, "tools": [{**BASH, "model": "big"}]}, "tools[0].model"),
    *(("/v1/responses", {"input": [item]}, "input[0]") for item in KEPT_ITEMS),
]  # fmt: skip

REFUSED_NATIVELY: list[tuple[str, Any, str]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}, *SAID]},
        "messages[0].audio",
    ),
    (
        "/v1/responses",
        {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]},
        'include: ["reasoning.encrypted_content"]',
    ),
]


# spec MD2: what is refused is refused by its name, in the API's own form.
@WAYS
async def test_what_may_not_be_asked_is_named(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    async with opened(tmp_path, **way) as (stage, door):
        for path, body, name in REFUSED:
            status, head, answer = await told(door, "POST", path, body)
            assert (status, head[b"x-should-retry"]) == (400, b"false"), body
            assert name in answer["error"]["message"], body
            assert (answer.get("type") == "error") is (path == "/v1/messages"), body
            assert answer["error"]["type"] == "invalid_request_error", body
        assert not stage.provider.served


# spec MD2: what a translation has no use for is refused where a request is sent on.
async def test_what_may_not_be_sent_on_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (stage, door):
        for path, body, name in REFUSED_NATIVELY:
            status, _, answer = await told(door, "POST", path, body)
            assert status == 400, body
            assert name in answer["error"]["message"], body
        assert not stage.provider.served


RUN_BY_THE_CHILD: list[Any] = [
    {"type": "function", "name": "f", "parameters": {"properties": {"file_id": {}}}},
    {"type": "custom", "name": "apply"},
    {"type": "namespace", "name": "n", "tools": [SHELL]},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "computer"},
    {"type": "tool_search", "execution": "client", "parameters": {}},
]


# spec MD2: what agents send is sent on: tools that they run, items with their content.
async def test_what_agents_send_is_sent_on(tmp_path: Path) -> None:
    calls: list[Any] = [
        {"type": "additional_tools", "role": "developer", "tools": RUN_BY_THE_CHILD},
        {"role": "user", "content": "!words=1"},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": []},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply", "input": "b"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "c"},
        {"type": "local_shell_call", "call_id": "3", "action": {"type": "exec"}},
        {"type": "local_shell_call_output", "id": "3", "output": "d"},
        {"type": "tool_search_call", "call_id": "4", "arguments": {}},
        {"type": "tool_search_output", "call_id": "4", "tools": RUN_BY_THE_CHILD},
        {"type": "compaction", "encrypted_content": "e"},
    ]
    dated = ("bash_20250124", "text_editor_20250728", "computer_20251124", "custom")
    tools = [{"type": kind, "name": kind} for kind in dated]
    async with opened(tmp_path, **NATIVE) as (stage, door):
        for path, body in (
            ("/v1/responses", {"input": calls, "tools": RUN_BY_THE_CHILD}),
            ("/v1/messages", {**SAYS, "tools": [BASH, *tools]}),
        ):
            status, _, answer = await told(door, "POST", path, body)
            assert status == 200, answer
            sent = stage.provider.served[-1].body
            assert {name: sent[name] for name in body} == body


# spec MD2: hosted tools are left out where they stand, in the input too.
async def test_hosted_tools_are_left_out_of_the_input(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE, hosted_tools="drop") as (stage, door):
        said = {"role": "user", "content": "!words=1"}
        more = {"type": "additional_tools", "tools": [*PROVIDER_TOOLS[:-1], SHELL]}
        body = {"input": [more, said], "tools": [SHELL]}
        assert (await told(door, "POST", "/v1/responses", body))[0] == 200
        sent = stage.provider.served[0].body
        assert sent["input"] == [{**more, "tools": [SHELL]}, said]


# spec MD6: the host asks once; the official clients ask again where it is of use.
@pytest.mark.parametrize(("status", "asked"), [(503, 2), (529, 2), (401, 1)])
async def test_the_official_clients_ask_a_failing_provider_again(
    tmp_path: Path, anthropic: Any, status: int, asked: int
) -> None:
    order: Any = [{"role": "user", "content": f"!status={status}"}]
    async with opened(tmp_path, **NATIVE) as (stage, door):
        async with official(door).with_options(max_retries=1) as client:
            with pytest.raises(openai.APIStatusError):
                await client.chat.completions.create(model="m", messages=order)
        assert len(stage.provider.served) == asked
        asking = messages_client(anthropic, door)
        async with asking.with_options(max_retries=1) as other:
            with pytest.raises(anthropic.APIStatusError):
                await other.messages.create(model="m", messages=order, max_tokens=9)
        assert len(stage.provider.served) == 2 * asked
        assert stage.llm.models.accounts.root.tokens.used == 0


# spec MD2: unknown fields are refused by name where a request is translated.
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_an_unknown_field_is_named_where_it_is_translated(
    tmp_path: Path, path: str
) -> None:
    async with opened(tmp_path, **TRANSLATED) as (stage, door):
        body: dict[str, Any] = {"messages": SAID}
        if "responses" in path:
            body = {"input": "a"}
        body |= {"max_tokens": 9} if "messages" in path else {}
        status, _, answer = await told(door, "POST", path, {**body, "brand_new": 1})
        assert status == 400
        assert "brand_new" in answer["error"]["message"]
        assert not stage.provider.served


# spec MD3: an answer without a form in the API is a fault of the provider's.
async def test_an_answer_that_cannot_be_translated_is_an_error(tmp_path: Path) -> None:
    async with opened(tmp_path, **TRANSLATED) as (_, door):
        said = [{"role": "user", "content": "!words=1 !stop=abort"}]
        body = {"messages": said, "max_tokens": 9}
        status, _, answer = await told(door, "POST", "/v1/messages", body)
        assert status == 502
        assert answer["error"]["type"] == "api_error"
        assert "abort" in answer["error"]["message"]
        body["stream"] = True
        status, _, text = await told(door, "POST", "/v1/messages", body)
        assert status == 200
        assert b"event: error" in text
        assert b"message_stop" not in text


# spec MD2: fields that change nothing are dropped, counted, and told once.
async def test_what_changes_nothing_is_dropped_and_told(tmp_path: Path) -> None:
    async with opened(tmp_path, **TRANSLATED) as (stage, door):
        body = {"input": "!words=1", "store": False, "prompt_cache_key": "k"}
        for _ in range(2):
            assert (await told(door, "POST", "/v1/responses", body))[0] == 200
        rows = stage.events("llm.dropped")
        assert [sorted(row["fields"]) for row in rows] == [
            ["prompt_cache_key", "store"]
        ] * 2
        assert "prompt_cache_key" not in stage.provider.served[0].body


# spec MD2: headers of the API are passed on, or dropped and told as fields are.
@WAYS
@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/messages", "anthropic-beta"), ("/v1/responses", "openai-beta")],
)
async def test_a_beta_is_passed_on_or_told(
    tmp_path: Path, way: dict[str, Any], path: str, name: str
) -> None:
    async with opened(tmp_path, **way) as (stage, door):
        body: dict[str, Any] = {"input": "!words=1"}
        if path == "/v1/messages":
            body = {"messages": SAID, "max_tokens": 9}
        beta = {name.replace("-", "_"): "new-1"}
        assert (await told(door, "POST", path, body, **beta))[0] == 200
        dropped = [row["fields"] for row in stage.events("llm.dropped")]
        assert dropped == ([] if way is NATIVE else [[name]])


# Such a value is valid on the wire (RFC 9110 5.5), and no provider defines one.
@WAYS
async def test_a_beta_of_other_characters_is_refused(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    async with opened(tmp_path, **way) as (stage, door):
        body = {"messages": SAID, "max_tokens": 9}
        status, _, found = await told(
            door, "POST", "/v1/messages", body, anthropic_beta="n\xe9w"
        )
        assert status == 400
        why = "the header anthropic-beta has characters beyond ASCII"
        assert found["error"]["message"] == why
        assert stage.provider.served == []


# spec MD2: an effort of reasoning goes to models that have one, and is dropped else.
@pytest.mark.parametrize("has_reasoning", [True, False])
async def test_an_effort_is_asked_of_models_that_have_one(
    tmp_path: Path, has_reasoning: bool
) -> None:
    async with opened(tmp_path, **TRANSLATED, reasoning=has_reasoning) as (stage, door):
        thinking = {"type": "enabled", "budget_tokens": 9000}
        for path, body, name in (
            ("/v1/responses", {"input": "a", "reasoning": {"effort": "low"}}, "low"),
            (
                "/v1/messages",
                {"messages": SAID, "max_tokens": 9999, "thinking": thinking},
                "medium",
            ),
        ):
            assert (await told(door, "POST", path, body))[0] == 200
            sent = stage.provider.served[-1].body.get("reasoning_effort")
            assert sent == (name if has_reasoning else None)
        dropped = [row["fields"] for row in stage.events("llm.dropped")]
        expected = [["reasoning.effort"], ["thinking"]]
        assert dropped == ([] if has_reasoning else expected)


async def test_a_long_name_of_a_model_is_told_in_part(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (stage, door):
        body = {"model": "m" * 50_000, "input": "!words=1"}
        assert (await told(door, "POST", "/v1/responses", body))[0] == 200
        (row,) = stage.events("llm.called")
        assert row["asked"] == "m" * 200


# spec MD2: hosted tools, as [llm] hosted_tools says.
@pytest.mark.parametrize(
    ("hosted", "sent"),
    [("drop", ["function"]), ("pass", ["web_search", "function"])],
)
async def test_hosted_tools_are_what_is_configured(
    tmp_path: Path, hosted: str, sent: list[str]
) -> None:
    async with opened(tmp_path, **NATIVE, hosted_tools=hosted) as (stage, door):
        tools = [{"type": "web_search"}, SHELL]
        body = {"input": "!words=1", "tools": tools}
        assert (await told(door, "POST", "/v1/responses", body))[0] == 200
        found = [tool["type"] for tool in stage.provider.served[0].body["tools"]]
        assert found == sent


# spec MD1: either header; two that differ are none.
async def test_a_token_is_shown_in_either_way(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (_, door):
        token = door.env["ANTHROPIC_AUTH_TOKEN"]
        assert token == door.env["OPENAI_API_KEY"]
        assert door.env["OPENAI_BASE_URL"] == door.env["ANTHROPIC_BASE_URL"] + "/v1"
        bearer = {"authorization": f"Bearer {token}"}
        for headers, status in (
            ({"x_api_key": token}, 200),
            ({"x_api_key": token, **bearer}, 200),
            ({"x_api_key": "other", **bearer}, 401),
            ({"x_api_key": token, "authorization": "Basic x"}, 401),
        ):
            assert (await told(door, "GET", "/v1/models", **headers))[0] == status


# spec MD1: a wrong token is told in the API's form, before the body has come.
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_wrong_token_is_told_before_the_body(tmp_path: Path, path: str) -> None:
    async with opened(tmp_path) as (_, door):
        head = raw(door, "POST", path, x_api_key="sk-x", content_length="99")
        async with await door.connect() as stream:
            await stream.send_all(head.replace(b"content-length: 0\r\n", b""))
            status, body = await answered(stream)
        answer = json.loads(body)
        assert status == 401
        kind = "authentication_error" if "messages" in path else "invalid_request_error"
        assert answer["error"]["type"] == kind


# spec MD1: HEAD / is a test of the connection, and the connection stays usable.
async def test_the_connection_is_tested_without_a_token(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, door), await door.connect() as stream:
        for _ in range(2):
            await stream.send_all(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
            status, head, body = await answered_with_head(stream)
            assert (status, head[b"content-length"], body) == (200, b"0", b"")
        sizes = set()
        for method in ("HEAD", "GET"):
            await stream.send_all(raw(door, method, "/v1/models"))
            data = b""
            while b"\r\n\r\n" not in data or (method == "GET" and b"}" not in data):
                data += await stream.receive_some()
            sizes.add(data.lower().partition(b"content-length: ")[2].split()[0])
        assert len(sizes) == 1


# spec MD1: a WebSocket is refused at once, and the connection ends.
async def test_a_websocket_is_refused_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (_, door), await door.connect() as stream:
        upgrade = {"connection": "Upgrade", "upgrade": "websocket"}
        await stream.send_all(raw(door, "GET", "/v1/responses", **upgrade))
        status, head, body = await answered_with_head(stream)
        assert (status, head[b"connection"]) == (426, b"close")
        assert "error" in json.loads(body)
        assert await stream.receive_some() == b""


# spec MD1: who offers another protocol beside its request gets the request answered.
@pytest.mark.parametrize(
    ("method", "upgrade", "status"),
    [("POST", "h2c", 200), ("POST", "websocket", 200), ("GET", "h2c", 405)],
)
async def test_an_upgrade_to_no_websocket_is_left_out(
    tmp_path: Path, method: str, upgrade: str, status: int
) -> None:
    async with opened(tmp_path, **NATIVE) as (_, door), await door.connect() as stream:
        body = {"input": "!words=1"} if method == "POST" else None
        offered = {"connection": "Upgrade", "upgrade": upgrade}
        for _ in range(2):
            await stream.send_all(raw(door, method, "/v1/responses", body, **offered))
            assert (await answered(stream))[0] == status


MIB = 1024 * 1024
PAID: dict[str, Any] = {"quota": {"max_tokens": 10**9}}


# spec MD7: a long image is asked about; what can never fit is told so, once and for all.
async def test_a_long_image_is_translated(tmp_path: Path) -> None:
    async with opened(tmp_path, **PAID) as (stage, door):
        source = {"type": "base64", "media_type": "image/png", "data": "A" * 15 * MIB}
        said = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        status, _, answer = await told(
            door, "POST", "/v1/messages", {"messages": said, "max_tokens": 9}
        )
        assert status == 200, answer
        (served,) = stage.provider.served
        assert len(str(served.body)) > 15 * MIB
    assert stage.host.budget.request_memory.used == 0


@pytest.mark.parametrize(
    ("way", "path"),
    [
        ({**PAID, "api": NATIVE["api"]}, "/v1/messages"),
        (PAID, "/v1/messages"),
        (PAID, "/v1/messages/count_tokens"),
        (PAID, "/v1/chat/completions"),
    ],
)
async def test_a_request_that_never_fits_is_too_large(
    tmp_path: Path, way: dict[str, Any], path: str
) -> None:
    async with opened(tmp_path, **way) as (stage, door):
        text = "a" * 12 * MIB + "\N{GRINNING FACE}"
        said = [{"role": "user", "content": text}]
        body = json.dumps({"messages": said, "max_tokens": 9}, ensure_ascii=False)
        status, head, answer = await told(door, "POST", path, body.encode())
        assert status == 413
        assert head[b"x-should-retry"] == b"false"
        assert b"retry-after" not in head
        assert "has 96 MiB for one" in answer["error"]["message"]
        assert not stage.provider.served


async def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (_, door):
        for method, path, status, said in (
            ("GET", "/v1/responses/resp_1", 404, "no response is kept"),
            ("GET", "/v1/models/gpt-0", 404, "GET /v1/models lists"),
            ("GET", "/v1/models/gpt-4o-mini", 200, ""),
            ("GET", "/v1/messages", 405, "does nothing"),
            ("POST", "/v1/audio/speech", 404, "there are /v1/chat/completions"),
        ):
            found, head, answer = await told(door, method, path)
            assert found == status
            if status != 200:
                assert said in answer["error"]["message"]
            assert (b"allow" in head) is (status == 405)


# spec MD1: clients escape a name that is one part of a path (RFC 3986 2.1).
async def test_a_model_with_a_slash_is_found(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, default_model="org/na me", restricted_model="org/na me") as (
            _,
            door,
        ),
        official(door) as client,
    ):
        assert (await client.models.retrieve("org/na me")).id == "org/na me"
        for path in ("org/na%20me", "org%2fna%20me"):
            status, _, answer = await told(door, "GET", f"/v1/models/{path}")
            assert (status, answer["id"]) == (200, "org/na me")
        for path in ("org%252Fna%20me", "org", "%FF"):
            assert (await told(door, "GET", f"/v1/models/{path}"))[0] == 404


# spec MD4: who may name which model; an alias counts after the names.
async def test_a_model_is_named_by_rights_and_aliases(tmp_path: Path) -> None:
    models = {"big": {"model": "b"}, "cheap": {"model": "c"}, "gpt-own": {}}
    restricted = {"messages": "cheap", "default": "small"}
    alias = {"gpt-*": "big", "gpt-5-*": "cheap", "*": "big"}
    async with open_door_stage(
        tmp_path,
        models=models,
        default_model="big",
        restricted_model=restricted,
        alias=alias,
        api=["chat", "messages"],
        quota={"max_tokens": 10**6},
    ) as stage:
        top = await open_door(stage, top_level=True)
        low = await open_door(stage)
        asked = ["cheap", "gpt-own", "gpt-4", "gpt-5-mini", "claude", None]
        for door, expected in (
            (top, ["c", "gpt-own", "b", "c", "b", "b"]),
            (low, ["small"] * 6),
        ):
            del stage.provider.served[:]
            for name in asked:
                body = {"messages": SAID} | ({} if name is None else {"model": name})
                status, _, answer = await told(
                    door, "POST", "/v1/chat/completions", body
                )
                assert status == 200, answer
                assert name is None or answer["model"] == name
            assert [one.body["model"] for one in stage.provider.served] == expected
        del stage.provider.served[:]
        body = {"messages": SAID, "max_tokens": 9, "model": "big"}
        status, _, answer = await told(low, "POST", "/v1/messages", body)
        assert (status, answer["model"]) == (200, "big")
        assert stage.provider.served[0].body["model"] == "c"


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream that are named by their type."""
    found = []
    for block in body.split(b"\n\n"):
        lines = dict(line.split(b": ", 1) for line in block.split(b"\n") if line)
        if b"data" in lines:
            event = json.loads(lines[b"data"])
            assert lines[b"event"].decode() == event["type"]
            found.append(event)
    return found


async def streamed(
    door: Door, path: str, text: str
) -> tuple[int, list[dict[str, Any]]]:
    """Ask for a stream; return the status and its events."""
    body: dict[str, Any] = {"model": "m", "stream": True}
    if path == "/v1/messages":
        body |= {"max_tokens": 4000, "messages": [{"role": "user", "content": text}]}
    else:
        body |= {"input": text}
    async with await door.connect() as stream:
        await stream.send_all(raw(door, "POST", path, body))
        status, head, data = await answered_with_head(stream)
    if status != 200:
        return status, [json.loads(data)]
    assert head[b"content-type"].startswith(b"text/event-stream")
    return 200, events_of(unchunked(data))


# spec MD3: an error in the middle is the API's own, and what came is charged.
@WAYS
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_an_error_in_the_middle_is_the_apis_own(
    tmp_path: Path, way: dict[str, Any], path: str
) -> None:
    async with opened(tmp_path, **way) as (stage, door):
        for order in ("!error", "!truncated", "!cut=900"):
            before = stage.llm.models.accounts.root.tokens.used
            _, events = await streamed(door, path, f"!words=40 {order}")
            last = events[-1]
            if path == "/v1/messages":
                assert last["type"] == "error", order
                assert not any(event["type"] == "message_stop" for event in events)
            else:
                assert last["type"] == "response.failed", order
                assert last["response"]["status"] == "failed"
                assert set(last["response"]["error"]) == {"code", "message"}
                numbers = [event["sequence_number"] for event in events]
                assert numbers == list(range(len(events))), order
            await eventually(lambda: not stage.llm.models.accounts.root.tokens.reserved)
            assert stage.llm.models.accounts.root.tokens.used > before
            # The received output is charged, whatever the first report said (spec MD5).
            row = stage.events("llm.called")[-1]
            assert row["completion_tokens"] >= stage.provider.served[-1].pieces, order
        # Nothing of an answer has come: the status tells it.
        other = "chat" if way is NATIVE else "responses"
        status, events = await streamed(door, path, f"!words=9 !foreign={other}")
        assert status == 502
        assert "another API" in events[0]["error"]["message"]
        assert stage.llm.models.accounts.root.calls.used == 4


# spec MD3: the provider's own code is told, for some programs end at it at once.
@WAYS
@pytest.mark.parametrize(
    ("code", "told_code", "kind"),
    [
        ("context_length_exceeded", "context_length_exceeded", "invalid_request_error"),
        ("insufficient_quota", "rate_limit_exceeded", "rate_limit_error"),
        ("overloaded_error", "overloaded_error", "overloaded_error"),
        ("authentication_error", "server_error", "api_error"),
        ("No_Word", "server_error", "api_error"),
        ("w" * 65, "server_error", "api_error"),
    ],
)
async def test_the_providers_code_is_told_in_a_stream(
    tmp_path: Path, way: dict[str, Any], code: str, told_code: str, kind: str
) -> None:
    async with opened(tmp_path, **way) as (_, door):
        order = f"!words=4 !error=failed !code={code}"
        _, events = await streamed(door, "/v1/responses", order)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == told_code
        _, events = await streamed(door, "/v1/messages", order)
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == kind


# spec MD6: an error status keeps its code too, in the form of the API.
@WAYS
async def test_the_providers_code_is_told_with_its_status(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    async with opened(tmp_path, **way) as (_, door):
        for status, code, expected in (
            (400, "context_length_exceeded", (400, "context_length_exceeded")),
            (400, "insufficient_quota", (400, None)),
            (401, "invalid_api_key", (502, None)),
            (400, "No_Word", (400, None)),
        ):
            order = f"!status={status} !code={code}"
            got, events = await streamed(door, "/v1/responses", order)
            assert (got, events[0]["error"]["code"]) == expected
        order = "!status=400 !code=context_length_exceeded"
        got, events = await streamed(door, "/v1/messages", order)
        assert (got, events[0]["error"]["type"]) == (400, "invalid_request_error")


# I10, spec L13: a code that is the key is not told, plain a word as it may be.
async def test_a_code_that_is_the_key_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-plain-word-0123456789"
    monkeypatch.setattr("tests.helpers.stage.KEY", key)
    monkeypatch.setattr(
        "tests.helpers.stage.key_file", lambda where: key_file(where, key)
    )
    async with opened(tmp_path, **NATIVE) as (_, door):
        order = f"!words=4 !error=failed !code={key}"
        _, events = await streamed(door, "/v1/responses", order)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"


# spec MD3: nothing comes behind the end, whatever becomes of the connection.
@WAYS
@pytest.mark.parametrize("order", ["!unended", "!hang-after=3"])
async def test_an_answer_is_whole_when_its_last_event_has_come(
    tmp_path: Path, way: dict[str, Any], order: str
) -> None:
    async with opened(tmp_path, **way) as (stage, door):
        for path, end in (
            ("/v1/messages", "message_stop"),
            ("/v1/responses", "response.completed"),
        ):
            _, events = await streamed(door, path, f"!words=3 {order}")
            assert events[-1]["type"] == end
        rows = stage.events("llm.called")
        assert [row["outcome"] for row in rows] == ["ok", "ok"]
        assert [row["completion_tokens"] for row in rows] == [3, 3]


# spec MD5: usage that is told at the beginning alone is no usage of the output.
def test_usage_at_the_beginning_of_a_message_is_not_its_output() -> None:
    reader = MESSAGES.reader()
    usage = {"input_tokens": 9, "output_tokens": 1}
    first = {"type": "message_start", "message": {"id": "m", "usage": usage}}
    last: dict[str, Any] = {"type": "message_delta", "delta": {}, "usage": {}}
    for event in (first, last):
        reader.feed(b"data: %b\n\n" % json.dumps(event).encode())
        assert reader.has_early_usage
    last["usage"] = {"output_tokens": 7}
    reader.feed(b"data: %b\n\n" % json.dumps(last).encode())
    assert not reader.has_early_usage


# spec MD3: what clients cannot do without is put in.
async def test_the_gaps_of_an_answer_are_filled(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (_, door):
        _, events = await streamed(door, "/v1/messages", "!words=2 !lack=id")
        assert events[0]["message"]["id"].startswith("msg_")
        order = "!words=2 !drop=content_block_stop"
        _, events = await streamed(door, "/v1/messages", order)
        kinds = [event["type"] for event in events if event["type"] != "ping"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        _, events = await streamed(door, "/v1/responses", "!words=2 !lack=id")
        ids = {one["response"]["id"] for one in events if "response" in one}
        assert len(ids) == 1
        assert ids.pop().startswith("resp_")
        order = "!words=2 !drop=response.output_item.done"
        _, events = await streamed(door, "/v1/responses", order)
        assert [event["type"] for event in events][-2:] == [
            "response.output_item.done", "response.completed",
        ]  # fmt: skip


# spec MD3: an order of events that the API does not have ends the answer.
async def test_events_out_of_order_end_the_answer(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (stage, door):
        orders = [("/v1/messages", one) for one in ("!twice=0", "!twice=1", "!swap=0")]
        orders += [("/v1/responses", one) for one in ("!twice=0", "!twice=2")]
        for count, (path, order) in enumerate(orders, 1):
            status, events = await streamed(door, path, f"!words=3 {order}")
            last = events[-1]
            assert status == 502 or last["type"] in ("error", "response.failed"), order
            assert "invalid response" in json.dumps(last), order
            assert stage.llm.models.accounts.root.calls.used == count


LEAKS = (
    "!leak", "!leak-thought", "!leak-error", "!leak-name", "!leak-event",
    "!leak-header", "!leak-field=id", "!leak-field=type", "!leak-refused",
    "!leak-field=text", "!leak-field=delta", "!leak-field=signature",
)  # fmt: skip


# spec L13, MD3: a key passes in no piece of any event.
@WAYS
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_no_key_passes_a_stream(
    tmp_path: Path, way: dict[str, Any], path: str
) -> None:
    async with opened(tmp_path, **way) as (_, door):
        for order in LEAKS:
            _, events = await streamed(door, path, f"!words=3 {order}")
            assert KEY not in json.dumps(events), order
            pieces = "".join(map(piece_of, events))
            assert KEY[4:] not in pieces, order


def piece_of(event: dict[str, Any]) -> str:
    """Return the text that an event has a piece of."""
    delta = event.get("delta", "")
    if isinstance(delta, dict):
        return "".join(str(text) for name, text in delta.items() if name != "type")
    return str(delta)


# spec MD6: each door refuses in its own form, and 400 from the fourth time on.
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_quota_is_refused_in_the_apis_form(tmp_path: Path, path: str) -> None:
    async with opened(tmp_path, **NATIVE) as (stage, door):
        stage.llm.models.accounts.root.tokens.used = 1e9
        found = []
        for _ in range(5):
            status, events = await streamed(door, path, "a")
            error = events[0]["error"]
            found.append((status, error["type"], error.get("code")))
        if path == "/v1/messages":
            first: Any = (429, "rate_limit_error", None)
            later: Any = (400, "invalid_request_error", None)
        else:
            first = (429, "insufficient_quota", "insufficient_quota")
            later = (400, *first[1:])
        assert found == [first] * 3 + [later] * 2


# spec MD6: a provider's failure is asked about once: the agent asks again by itself.
async def test_the_host_leaves_trying_again_to_the_agent(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (stage, door):
        for count, (sent, seen) in enumerate(((429, 429), (500, 502), (529, 529)), 1):
            status, _ = await streamed(door, "/v1/messages", f"!status={sent}")
            assert status == seen
            assert len(stage.provider.served) == count
        assert stage.llm.models.accounts.root.calls.used == 0


# spec MD5: once a provider has counted more than bytes were sent, that is reserved.
async def test_a_provider_that_counts_more_is_reserved_for(tmp_path: Path) -> None:
    limit = 12_000
    async with open_door_stage(
        tmp_path, api="messages", max_tokens=10, quota={"max_tokens": limit}
    ) as stage:
        door = await open_door(stage)
        text = "!words=1 !wait=0.2 !prompt-tokens=2000"
        await streamed(door, "/v1/messages", text)
        # Children that have asked nothing yet are of the same account, the host's.
        doors = [door, await open_door(stage), await open_door(stage)]
        async with trio.open_nursery() as nursery:
            for number in range(42):
                which = doors[number % len(doors)]
                nursery.start_soon(streamed, which, "/v1/messages", text)
        assert stage.llm.models.accounts.root.tokens.used <= limit + 2000 + 40


# spec MD5: with a small quota a call goes alone if the estimate fits.
async def test_a_call_whose_worst_case_does_not_fit_goes_alone(tmp_path: Path) -> None:
    async with open_door_stage(
        tmp_path, api="messages", max_tokens=None, quota={"max_tokens": 6000}
    ) as stage:
        door = await open_door(stage)
        text = "!words=5 " + "many words " * 900  # 9,900 bytes, 2,000 tokens
        status, events = await streamed(door, "/v1/messages", text)
        assert status == 200
        assert events[-1]["type"] == "message_stop"
        assert stage.provider.served[0].body["max_tokens"] > 500
        assert stage.llm.models.accounts.root.tokens.used == charged(stage)


# spec MD7: requests that never come whole keep no other from an answer.
async def test_half_a_request_keeps_none_from_an_answer(tmp_path: Path) -> None:
    async with opened(tmp_path, **NATIVE) as (_, door):
        held = [await door.connect() for _ in range(PER_CHILD)]
        half = raw(door, "POST", "/v1/messages", content_length="99")
        for stream in held:
            await stream.send_all(half.replace(b"content-length: 0\r\n", b"") + b"{")
        for path in ("/v1/messages", "/v1/responses"):
            status, _ = await streamed(door, path, "!words=1")
            assert status == 200
        for stream in held:
            await stream.aclose()


# spec MD8, S5: long requests and long answers are taken apart in short turns.
@WAYS
async def test_what_is_long_has_short_turns(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    with provider_process() as base_url:
        async with opened(tmp_path, **{**way, "quota": {}}, base_url=base_url) as (
            _,
            door,
        ):
            long = "words \u4e2d " * 400_000
            for path in ("/v1/messages", "/v1/responses"):
                for text in (f"{long} !words=2", "!giant=2"):
                    await streamed(door, path, "!words=1")

                    async def ask(path: str = path, text: str = text) -> None:
                        status, _ = await streamed(door, path, text)
                        assert status == 200, path

                    turn_s, task = await find_longest_turn(ask, TURN_S)
                    assert turn_s < TURN_S, (path, text[-9:], task)


# spec MD1: a fixed port.
async def test_the_port_is_the_configured_one(tmp_path: Path) -> None:
    with trio.socket.socket() as probe:
        await probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with opened(tmp_path, endpoint_port=port) as (_, door):
        assert door.env["OPENAI_BASE_URL"] == f"http://127.0.0.1:{port}/v1"
        async with httpx2.AsyncClient() as client:
            found = await client.head(f"http://127.0.0.1:{port}/")
            assert found.status_code == 200
