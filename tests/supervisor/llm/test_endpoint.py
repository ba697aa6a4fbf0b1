"""The endpoint for unmodified programs, with children (L6, L10, L11, L13)."""

import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from supervisor.fleet.fence import FleetLife, UnpaidError
from supervisor.llm import endpoint
from supervisor.llm.endpoint import EndpointState
from tests.helpers.canary import KEY
from tests.helpers.canary_forms import NAMES, in_every_form, searched_forms
from tests.helpers.doors import (
    Door,
    answered,
    answered_with_head,
    ask,
    open_door,
    open_door_stage,
)
from tests.helpers.provider import provider_process
from tests.helpers.stage import Stage, eventually
from tests.helpers.turns import watched
from vfs.ledger import MOST_MEMORY_BYTES

pytestmark = pytest.mark.slow

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
BEARER = b"Authorization: Bearer TOKEN\r\n"

# A request that would be answered by the model.
_ASKED = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_ASKED), _ASKED)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Return a host with an endpoint and a quota."""
    async with open_door_stage(tmp_path) as opened_scene:
        yield opened_scene


async def test_a_token_is_worth_nothing_after_its_child(stage: Stage) -> None:
    # spec L10, L13: what is under way ends with the child, and is charged.
    door = await open_door(stage)
    other = await open_door(stage)
    assert door.env["OPENAI_API_KEY"] != other.env["OPENAI_API_KEY"]
    status, body = await door.ask(ask("hello"))
    assert (status, json.loads(body)["object"]) == (200, "chat.completion")
    before = stage.llm.models.accounts.root.tokens.used
    async with await door.connect() as stream:
        await stream.send_all(door.request(ask("!hang-after=3 !words=9")))
        await eventually(
            lambda: (
                len(stage.provider.served) == 2 and stage.provider.served[1].pieces == 3
            )
        )
        await door.puppet.kill()
        assert (await answered(stream))[0] == 0
    assert stage.llm.models.accounts.root.tokens.used > before + 4 * 3
    assert not stage.llm.models.accounts.root.tokens.reserved
    await eventually(lambda: not stage.provider.at_once)
    status, body = await door.ask(ask("hello"))
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    assert not os.listdir(os.path.dirname(door.env["SANDHOST_LLM_SOCKET"]))
    assert (await other.ask(ask("hello")))[0] == 200
    told = stage.events("llm.called")
    assert [row["outcome"] for row in told] == ["ok", "cancelled", "ok"]


@pytest.mark.parametrize("more", [(), (b"\r\n",), (b"GET ", b"/v1/models")])
async def test_closing_the_connection_ends_the_call(
    stage: Stage, more: tuple[bytes, ...]
) -> None:
    # spec L10: whatever else it has sent before.
    door = await open_door(stage)
    for stream in (False, True):
        count = len(stage.provider.served)
        line = await door.connect()
        await line.send_all(door.request(ask("!hang-after=2 !words=5", stream=stream)))
        await stage.provider.wait_for(count + 1)
        for piece in more:
            await line.send_all(piece)
        await line.aclose()
        await eventually(lambda: not stage.provider.at_once)
        await eventually(lambda: not stage.llm.models.accounts.root.tokens.reserved)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "it is no JSON"),
        # spec S5: a decoder would keep every client waiting for seconds.
        (b'{"messages":[' + b"{}," * 300_000 + b"{}]}", 400, "more than 50000 values"),
        ([], 400, "no JSON object"),
        ({"messages": []}, 400, "messages: a list of at least one"),
        (ask("a", n=2), 400, "n: not available through this host"),
        (ask("a", service_tier="priority"), 400, "service_tier: not available"),
        (ask("a", max_tokens=0), 400, "max_tokens: a whole number from 1 on"),
        (ask("a", stream_options=5), 400, "stream_options: an object"),
        (ask("!status=404"), 404, "OpenAI API call failed: 404 as it was told"),
        (ask("!status=400"), 400, "OpenAI API call failed: 400 as it was told"),
        (ask("!status=403"), 502, "OpenAI API call failed: 403 as it was told"),
        (ask("!leak-refused"), 400, "you sent Bearer [redacted]"),
        (ask("!broken"), 502, "invalid response: not JSON"),
        (ask("!broken", stream=True), 502, "invalid response: not JSON"),
    ],
)
async def test_errors_have_the_form_of_the_api(
    stage: Stage, body: object, status: int, said: str
) -> None:
    # spec L11, L15
    door = await open_door(stage)
    found, text = await door.ask(body)
    assert found == status
    assert said in json.loads(text)["error"]["message"]


async def test_a_text_may_be_long_whatever_it_holds(stage: Stage) -> None:
    door = await open_door(stage)
    text = '[{,\\"' * 100_000
    assert (await door.ask(ask(text)))[0] == 200
    assert stage.provider.served[0].body["messages"][0]["content"] == text


# spec L6: the bound and the model are the smaller ones.
async def test_a_request_cannot_widen_what_the_child_has(stage: Stage) -> None:
    door = await open_door(stage)
    stage.llm.models.section.temperature = 0.25
    await door.ask(ask("a", max_tokens=7, temperature=1.5))
    await door.ask(ask("a", max_completion_tokens=900, model="gpt-99"))
    first, second = (one.body for one in stage.provider.served)
    assert (first["max_tokens"], first["temperature"]) == (7, 1.5)
    assert second["temperature"] == 0.25  # as configured, where nothing is asked for
    assert (second["max_tokens"], second["model"]) == (50, "gpt-4o-mini")
    assert "max_completion_tokens" not in second


# spec L10: the same quota as over FD 3.
async def test_the_quota_is_that_of_the_child(stage: Stage) -> None:
    door = await open_door(stage, quota=30.0)
    other = await open_door(stage)
    await door.ask(ask("!prompt-tokens=30 !words=0"))
    assert await door.puppet.ask(b"LLM_QUOTA\n") == (
        b"OK 30.0/30 weighted tokens (100.0% used, 0.0 remaining)"
    )
    for stream in (False, True):
        status, body = await door.ask(ask("a", stream=stream))
        assert (status, json.loads(body)["error"]["code"]) == (
            429,
            "insufficient_quota",
        )
    assert (await other.ask(ask("a")))[0] == 200


async def refused(
    door: Door, stream: trio.SocketStream, body: object
) -> tuple[int, str | None, str | None, str | None]:
    """Ask on an open connection; return status, code, retry-after, x-should-retry."""
    await stream.send_all(door.request(body))
    status, head, text = await answered_with_head(stream)
    told = {name.decode(): value.decode() for name, value in head.items()}
    code = json.loads(text)["error"]["code"]
    return status, code, told.get("retry-after"), told.get("x-should-retry")


USED_UP = "insufficient_quota"


# spec MD6: from the fourth refusal in a row on the status is 400, until a call is made.
async def test_refusals_in_a_row_become_final(stage: Stage) -> None:
    door = await open_door(stage, quota=30.0)
    await door.ask(ask("!prompt-tokens=30 !words=0"))
    (node,) = (
        n for n in stage.llm.models.accounts.nodes().values() if n.tokens.limit == 30.0
    )
    async with await door.connect() as stream:
        for round_ in range(2):
            statuses = [429, 429, 429, 400, 400]
            found = [await refused(door, stream, ask("a")) for _ in statuses]
            assert found == [(one, USED_UP, None, "false") for one in statuses], round_
            node.forget_spending()
            status, _ = await door.ask(ask("!prompt-tokens=30 !words=0"))
            assert status == 200
    assert len(stage.provider.served) == 3


class EmptyPayer:
    """Pays calls of fleet children from an account that has a number of them.

    Attributes:
        calls: how many it pays yet.
        is_held: present calls hold the rest.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        self.calls = 0
        self.is_held = is_held

    async def reserve(self, worst: float) -> str | None:
        """See `fence.Payer`."""
        assert worst > 0
        if not self.calls:
            text = "the fleet's account has no room"
            raise UnpaidError(text, is_refused=True, is_held=self.is_held)
        self.calls -= 1
        return "1"

    def settle(self, call: str, cost: float) -> None:
        """See `fence.Payer`."""
        assert (call, cost > 0) == ("1", True)


# spec MD6, FL7: also of a child whose fleet has no quota left.
async def test_refusals_of_the_fleet_become_final(stage: Stage) -> None:
    door = await open_door(stage)
    payer = pay(stage, door, EmptyPayer())
    async with await door.connect() as stream:
        for round_ in range(2):
            statuses = [429, 429, 429, 400, 400]
            found = [await refused(door, stream, ask("a")) for _ in statuses]
            assert found == [(one, USED_UP, None, "false") for one in statuses], round_
            payer.calls = 1
            assert (await door.ask(ask("!words=1")))[0] == 200
    assert len(stage.provider.served) == 2


def pay(stage: Stage, door: Door, payer: EmptyPayer) -> EmptyPayer:
    """Make a door's child one of a fleet that pays its calls."""
    fence, child_id = stage.host.fence, door.puppet.child.id
    fence.payer, fence.judge = payer, lambda _: None
    fence.add(child_id, FleetLife("node", child_id, 1))
    return payer


# spec MD6, FL7: calls on other nodes end, and give their room back.
async def test_a_quota_of_the_fleet_that_calls_hold_is_worth_another_attempt(
    stage: Stage,
) -> None:
    door = await open_door(stage)
    pay(stage, door, EmptyPayer(is_held=True))
    async with await door.connect() as stream:
        for _ in range(5):
            found = await refused(door, stream, ask("a"))
            assert found == (429, "rate_limit_exceeded", "1", None)


# spec MD6: `quota_status = 400` gives that status to the first refusal, too.
async def test_the_first_refusal_may_be_final(tmp_path: Path) -> None:
    async with open_door_stage(tmp_path, quota_status=400, max_calls=1) as stage:
        door = await open_door(stage)
        await door.ask(ask("a"))
        async with await door.connect() as stream:
            assert await refused(door, stream, ask("a")) == (
                400, USED_UP, None, "false",
            )  # fmt: skip


# spec MD6: quota that other calls hold comes back, and such a refusal is not counted.
async def test_what_calls_under_way_hold_is_asked_for_again(stage: Stage) -> None:
    door = await open_door(stage, quota=300.0)
    async with await door.connect() as first, await door.connect() as second:
        await first.send_all(door.request(ask("!hang-after=1 !words=2")))
        await stage.provider.wait_for(1)
        for _ in range(6):
            assert await refused(door, second, ask("a")) == (
                429, "rate_limit_exceeded", "1", None,
            )  # fmt: skip
    await eventually(lambda: not stage.llm.models.accounts.root.tokens.reserved)
    assert (await door.ask(ask("a")))[0] == 200


# spec MD6: the provider's 429 is never taken for the child's own quota.
@pytest.mark.parametrize("after", ["1", "soon"])
async def test_a_providers_limit_stays_one(stage: Stage, after: str) -> None:
    door = await open_door(stage)
    order = f"!status=429 !retry-after={after}"
    async with await door.connect() as stream:
        with trio.fail_after(30):
            found = await refused(door, stream, ask(order))
    told = "1" if after == "1" else None
    assert found == (429, "rate_limit_exceeded", told, None)


# spec MD6: the host asks once, so what may pass is the program's to ask again, and it is not
# told to leave that. Charged calls, and calls that would be refused again, are excepted.
@pytest.mark.parametrize(
    ("order", "status", "after", "advice"),
    [
        ("!status=500 !retry-after=soon", 502, None, None),
        ("!status=503 !retry-after=7", 502, "7", None),
        ("!status=529 !retry-after=soon", 529, None, None),
        ("!status=529 !retry-after=7", 529, "7", None),
        ("!status=302", 502, None, "false"),
        ("!status=400", 400, None, "false"),
        ("!status=401 !retry-after=7", 502, None, "false"),
        ("!status=403", 502, None, "false"),
        ("!status=404", 404, None, "false"),
        ("!broken", 502, None, "false"),
        ("!truncated !plain", 502, None, "false"),
    ],
)
async def test_a_failure_that_may_pass_is_asked_again(
    stage: Stage, order: str, status: int, after: str | None, advice: str | None
) -> None:
    door = await open_door(stage)
    async with await door.connect() as stream:
        found = await refused(door, stream, ask(order))
    assert found == (status, None, after, advice)
    assert len(stage.provider.served) == 1


# spec MD6
async def test_a_provider_that_is_away_is_asked_again(tmp_path: Path) -> None:
    async with open_door_stage(tmp_path, base_url="http://127.0.0.1:1/v1") as stage:
        door = await open_door(stage)
        async with await door.connect() as stream:
            found = await refused(door, stream, ask("a"))
    assert found == (502, None, None, None)


# spec MD6, L10: a day's quota is renewed at the endpoint, too, and its end is told.
async def test_a_day_ends_at_the_endpoint(tmp_path: Path) -> None:
    quota = {"max_tokens": 30, "window": "day"}
    async with open_door_stage(tmp_path, quota=quota) as stage:
        now = [1_700_000_000.0 // 86_400 * 86_400 + 86_400 - 61]
        stage.llm.models.accounts.spending.clock = lambda: now[0]
        door = await open_door(stage)
        await door.ask(ask("!prompt-tokens=30 !words=0"))
        async with await door.connect() as stream:
            for left, header in ((61, None), (60, "60"), (0.5, "1")):
                now[0] = (now[0] // 86_400 + 1) * 86_400 - left
                assert await refused(door, stream, ask("a")) == (
                    429, USED_UP, header, "false",
                )  # fmt: skip
        now[0] += 1
        assert (await door.ask(ask("!prompt-tokens=30 !words=0")))[0] == 200


PICTURES = [
    {"type": "text", "text": "!dense !wait=0.5 !words=10 it"},
    {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"description": "\u9f98" * 300}},
}


# attack 45, spec L10, I7: what is not text and what is not a message cost tokens, too.
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": PICTURES}]},
        ask("!dense !wait=0.5 !words=10", response_format=SCHEMA),
        ask("!dense !wait=0.5 !words=10", stop=["\u9f98" * 300]),
    ],
    ids=["images", "schema", "stop"],
)
async def test_many_calls_at_once_do_not_pass_the_quota(
    stage: Stage, body: dict[str, object], stream: bool
) -> None:
    door = await open_door(stage)
    root = stage.llm.models.accounts.root
    root.tokens.limit = 5000.0
    statuses: list[int] = []

    async def call() -> None:
        data = {**body, "model": "m", "max_tokens": 10, "stream": stream}
        statuses.append((await door.ask(data))[0])

    async with trio.open_nursery() as nursery:
        for _ in range(endpoint.PER_CHILD):
            nursery.start_soon(call)
    most = max(one.prompt_tokens for one in stage.provider.served)
    assert most > 900  # the provider counts what it may
    assert root.tokens.used <= root.tokens.limit + most + 40.0
    assert sorted(set(statuses)) == [200, 429]


# spec L10: the policy says what a part that is not text may cost.
async def test_the_tokens_of_an_image_are_a_policys(stage: Stage) -> None:
    cheap, dear = await open_door(stage, image_tokens=100), await open_door(stage)
    content = [{"type": "text", "text": "and?"}, PICTURES[1]]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    stage.llm.models.accounts.root.tokens.limit = 1000.0
    assert (await cheap.ask(body))[0] == 200
    assert (await dear.ask(body))[0] == 200  # alone, with one token of output
    bounds = [one.body["max_tokens"] for one in stage.provider.served]
    assert bounds == [50, 1]


# spec L13, I10: a key in a stream, one character a piece.
@pytest.mark.parametrize("order", ["!leak", "!leak !plain", "!leak !usage=none"])
async def test_a_stream_is_redacted(stage: Stage, order: str) -> None:
    stage.llm.models.section.max_tokens = None
    door = await open_door(stage)
    status, body = await door.ask(ask(order, stream=True))
    assert status == 200
    events = [
        json.loads(line[6:])
        for line in body.decode().splitlines()
        if line.startswith("data: {")
    ]
    text = "".join(
        choice["delta"].get("content") or ""
        for event in events
        for choice in event["choices"]
    )
    assert text == "Bearer [redacted]"
    assert not any(event.get("usage") for event in events)
    assert b"data: [DONE]" in body


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a streamed answer, the last word excepted."""
    lines = body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# spec L13, I10: the same in the arguments of a tool, whose name comes whole.
@pytest.mark.parametrize("stream", [True, False])
async def test_a_tools_arguments_are_redacted(stage: Stage, stream: bool) -> None:
    door = await open_door(stage)
    tools = [{"type": "function", "function": {"name": "tell", "parameters": {}}}]
    _, body = await door.ask(ask("!leak-tool", stream=stream, tools=tools))
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events_of(body)]
        calls = [call for one in deltas for call in one.get("tool_calls") or ()]
        assert {call["index"] for call in calls} == {0}
        names = [call["function"].get("name") for call in calls]
        assert [name for name in names if name] == ["tell"]
    else:
        calls = json.loads(body)["choices"][0]["message"]["tool_calls"]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"key": "Bearer [redacted]"}


# spec L13, I10: in each form, and one character a piece where it comes in pieces.
@pytest.mark.parametrize(
    "order", ["!leak", "!leak !plain", "!leak-tool", "!leak-refused"]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_no_form_of_the_key_passes(
    stage: Stage, order: str, stream: bool
) -> None:
    stage.provider.tell = in_every_form
    stage.llm.models.section.max_tokens = None
    door = await open_door(stage)
    _, body = await door.ask(ask(order, stream=stream))
    found = [json.loads(body)] if body.startswith(b"{") else events_of(body)
    said = "".join(texts_of(found))
    if order == "!leak-tool":
        said = json.loads(said)["key"]
    assert [name for name in NAMES if f"{name}: " not in said] == []
    forms = searched_forms(KEY).items()
    assert [name for name, form in forms if form in said] == []


def texts_of(value: object) -> Iterator[str]:
    """Yield the texts of an answer or its events, and the errors in it."""
    if isinstance(value, list):
        yield from (text for one in value for text in texts_of(one))
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in ("content", "arguments", "message") and isinstance(inner, str):
                yield inner
            else:
                yield from texts_of(inner)


# spec L13, I10: what spells a text out, token by token, goes or stays with it.
@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_do_not_spell_the_key(
    stage: Stage, stream: bool
) -> None:
    door = await open_door(stage)
    for order, told in (("!leak", ""), ("!say=my_sk-ca_is_not_it", None)):
        _, body = await door.ask(ask(order, stream=stream, logprobs=True))
        events = events_of(body) if stream else [json.loads(body)]
        choices = [choice for event in events for choice in event["choices"]]
        part = "delta" if stream else "message"
        text = "".join(choice[part].get("content") or "" for choice in choices)
        tokens = [
            token["token"]
            for choice in choices
            for token in (choice.get("logprobs") or {}).get("content", ())
        ]
        if told is None:
            assert text == "".join(tokens) == "my sk-ca is not it"
        else:
            assert text == "Bearer [redacted]"
            # In a stream the scheme before it may have been told by then.
            assert KEY[0] not in "".join(tokens).removeprefix("Bearer ")
            assert not set("".join(tokens)) - set("Bearer ")


async def test_a_fault_ends_its_connection_and_the_host_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    door = await open_door(stage)
    with monkeypatch.context() as patched:
        patched.setattr(stage.llm.models, "models_of", "no function")
        assert await door.ask(ask("my secret")) == (0, b"")
    log = capfd.readouterr().err
    assert "Fault serving the endpoint: TypeError in " in log
    assert "my secret" not in log
    assert (await door.ask(ask("a")))[0] == 200


async def test_a_stream_that_breaks_says_so(stage: Stage) -> None:
    # spec L15
    door = await open_door(stage)
    _, body = await door.ask(ask("!error !words=8", stream=True))
    assert b"OpenAI API call failed: it broke in two" in body
    assert b"[DONE]" not in body


# attacks 33, 34; spec L13
@pytest.mark.parametrize(
    "head",
    [
        POST + BEARER + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNKED,
        POST + BEARER + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED,
        POST + BEARER + 2 * b"Transfer-Encoding: chunked\r\n" + b"\r\n" + CHUNKED,
        POST
        + BEARER
        + b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n" % len(CHUNKED)
        + CHUNKED,
        POST + BEARER + b"Content-Length: 5\r\nContent-Length: 2\r\n\r\n" + CHUNKED,
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Authorization: Basic TOKEN\r\nContent-Length: 2\r\n\r\n{}",
        POST + BEARER + b"Authorization: Bearer x\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused(stage: Stage, head: bytes) -> None:
    door = await open_door(stage)
    data = head.replace(b"TOKEN", door.env["OPENAI_API_KEY"].encode())
    async with await door.connect() as stream:
        await stream.send_all(data)
        status, _ = await answered(stream)
        assert status in (400, 401, 431, 501)
    assert not stage.provider.served
    assert (await door.ask(ask("a")))[0] == 200


async def until_end(door: Door, line: str, token: str | None) -> bytes:
    """Return all that is answered to a request without a body."""
    lines = [f"{line} HTTP/1.1", "Host: x", "Connection: close"]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    said = b""
    async with await door.connect() as stream:
        await stream.send_all("\r\n".join([*lines, "", ""]).encode())
        while more := await stream.receive_some():
            said += more
    return said


# RFC 9110, 9.3.2: HEAD is GET without a body; what takes POST alone says so.
async def test_head_is_answered_as_get_without_a_body(stage: Stage) -> None:
    door = await open_door(stage)
    own = door.env["OPENAI_API_KEY"]
    for path, token, status in (
        ("/v1/models", own, 200),
        ("/v1/models", None, 401),
        ("/v1/nothing", own, 404),
    ):
        whole = await until_end(door, f"GET {path}", token)
        head = await until_end(door, f"HEAD {path}", token)
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert head == whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    refused = await until_end(door, "HEAD /v1/chat/completions", own)
    assert refused.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nallow: post\r\n" in refused.lower()
    assert refused.endswith(b"\r\n\r\n")


# spec S5, S7: strangers make room for each other, and never for a child.
async def test_strangers_do_not_keep_a_child_out(stage: Stage) -> None:
    door = await open_door(stage)
    strangers = [await door.connect() for _ in range(endpoint.STRANGERS + 20)]
    try:
        assert (await door.ask(ask("a")))[0] == 200
        with trio.fail_after(30):  # the oldest made room
            assert not await strangers[0].receive_some()
    finally:
        for stranger in strangers:
            await stranger.aclose()


# spec S7: one child's connections are bounded, another's are its own.
async def test_a_childs_connections_are_bounded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "PER_CHILD", 2)
    door, other = await open_door(stage), await open_door(stage)
    held = []
    for expected in (200, 200, 200):
        stream = await door.connect()
        await stream.send_all(door.request(ask("a")))
        assert (await answered(stream))[0] == expected
        held.append(stream)
    assert await held[0].receive_some() == b""  # the oldest made room
    for stream in held[1:]:
        await stream.send_all(door.request(ask("!hang")))
    await stage.provider.wait_for(5)
    assert (await door.ask(ask("a")))[0] == 503
    assert (await other.ask(ask("a")))[0] == 200
    for stream in held:
        await stream.aclose()
    served = stage.llm.endpoint
    assert served is not None
    await eventually(lambda: not served.statistics().connections)
    assert (await door.ask(ask("a")))[0] == 200


# attack 18: where the host lacks descriptors a child has one, and its next when it can.
async def test_connections_are_of_the_account_that_files_are_of(stage: Stage) -> None:
    account, door = stage.host.fs.descriptor_account, await open_door(stage)
    account.limit = account.used
    async with await door.connect() as stream:
        await stream.send_all(door.request(ask("!hang")))
        await stage.provider.wait_for(1)
        assert (await door.ask(ask("a")))[0] == 503
    await eventually(lambda: account.used == account.limit)
    assert (await door.ask(ask("a")))[0] == 200


async def test_a_child_that_does_not_start_leaves_no_token(stage: Stage) -> None:
    run_dir = stage.where / "run-x"
    run_dir.mkdir()
    spec = stage.spec(("/no/such/program",), run_dir=str(run_dir))
    child = await stage.host.spawn(spec)
    assert child.failure is not None
    await child.gone.wait()
    assert stage.llm.endpoint is not None
    assert stage.llm.endpoint.statistics().accounts == 0
    assert not os.listdir(run_dir)


# A token that the program before has given out is unknown until its child is entered.
async def test_calls_wait_until_all_that_was_handed_over_is_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await open_door(stage)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    left = EndpointState(listener.detach(), {}, [])
    async with endpoint.open_endpoint(stage.llm.models, left) as following:
        monkeypatch.setattr(stage.llm, "endpoint", following)
        async with await trio.open_tcp_stream(*address) as stream:
            await stream.send_all(door.request({}, token="not-yet"))
            heard = b""
            with trio.move_on_after(0.1):
                heard = await stream.receive_some(100)
            assert heard == b""
            await stage.llm.restore_rest()
            assert b" 401 " in await stream.receive_some(100)
        monkeypatch.undo()


# A client that sends a refused body slowly puts no replacement of the host off.
@pytest.mark.parametrize(
    ("line", "token", "status"),
    [
        ("POST /v1/chat/completions", "nobody-s", 401),
        ("POST /v1/chat/completions", None, 413),
        ("HEAD /", None, 200),
    ],
)
async def test_a_refused_body_delays_no_hand_over(
    stage: Stage, line: str, token: str | None, status: int
) -> None:
    door = await open_door(stage)
    size = 40_000_000 if status == 413 else 1_000_000
    lines = [f"{line} HTTP/1.1", "Host: x", f"Content-Length: {size}"]
    if status != 200:
        own = door.env["OPENAI_API_KEY"] if token is None else token
        lines.append(f"Authorization: Bearer {own}")
    async with await door.connect() as stream, await door.connect() as idle:
        await idle.send_all(b"GET ")
        await stream.send_all("\r\n".join([*lines, "", ""]).encode() + b"x" * 70_000)
        said = await stream.receive_some()
        assert said.startswith(b"HTTP/1.1 %d " % status)
        await stream.send_all(b"x")
        await eventually(lambda: stage.llm.busy() is None)
        assert stage.endpoint.statistics().connections == 2
        # The one that was answered is closed, the other goes on.
        state, _ = stage.endpoint.snapshot()
        assert [one.received for one in state.connections] == [b"GET "]


# spec MD7: a body of which the rest is dropped keeps none from an answer.
async def test_refused_bodies_keep_none_from_an_answer(stage: Stage) -> None:
    door = await open_door(stage)
    long = door.request(b"").replace(b"Content-Length: 0", b"Content-Length: 40000000")
    async with AsyncExitStack() as held:
        for _ in range(endpoint.PER_CHILD):
            stream = await held.enter_async_context(await door.connect())
            await stream.send_all(door.request(b""))
            assert (await answered(stream))[0] == 400
            await stream.send_all(long)
            assert (await answered(stream))[0] == 413
        assert (await door.ask(ask("hello")))[0] == 200


# A client that does not take its refusals puts no replacement of the host off.
async def test_a_refusal_that_is_not_taken_is_interrupted(stage: Stage) -> None:
    door = await open_door(stage)
    request = door.request(b"").replace(b"/v1/chat", b"/none")

    def is_ended() -> bool:
        stage.llm.interrupt()  # as a hand-over does, again and again
        return not stage.endpoint.statistics().connections

    async with await trio.open_unix_socket(door.env["SANDHOST_LLM_SOCKET"]) as stream:
        await stream.send_all(request * 1000)
        await eventually(stage.llm.busy)
        await eventually(is_ended, 10.0)
        assert stage.llm.busy() is None


async def test_a_token_is_looked_at_before_a_body_comes(stage: Stage) -> None:
    # attack 42: nothing of a stranger's body is kept.
    door = await open_door(stage)
    budget = stage.host.budget
    async with await door.connect() as stream:
        head = door.request(b" " * 1_000_000, token="nobody-s")[:-1_000_000]
        await stream.send_all(head)
        status, body = await answered(stream)
        assert status == 401
        assert b"invalid_api_key" in body
    async with await door.connect() as stream:
        await stream.send_all(door.request(b" " * 1_000_000)[:-1_000_000])
        await eventually(lambda: budget.request_memory.used == 5_000_000)
    await eventually(lambda: budget.request_memory.used == 0)


async def test_a_body_for_which_there_is_no_memory_is_taken_and_refused(
    stage: Stage,
) -> None:
    # attack 42: at once, the client is told when to ask again, and can on this connection.
    door = await open_door(stage)
    other = await open_door(stage)
    session = door.puppet.child.session
    assert session is not None
    host = stage.host
    long = door.request(ask("x" * 3_000_000))
    async with await door.connect() as stream:
        with host.budget.reservation(
            session.client.ledger, MOST_MEMORY_BYTES - 9_000_000
        ):
            await stream.send_all(long)
            with trio.fail_after(30):
                reply = await stream.receive_some()
            assert reply.startswith(b"HTTP/1.1 429 ")
            assert b"\r\nretry-after: 1\r\n" in reply
            assert b"x-should-retry" not in reply
            assert b'"code":"too_many_bytes"' in reply
            assert (await other.ask(ask("short")))[0] == 200
        await stream.send_all(door.request(ask("short")))
        assert (await answered(stream))[0] == 200
    await eventually(lambda: host.budget.request_memory.used == 0)


@pytest.mark.parametrize("digits", [5_000, 12_000_000])
async def test_a_number_of_many_digits_is_an_error_of_ours(
    stage: Stage, digits: int
) -> None:
    # attack 43
    door = await open_door(stage)
    status, body = await door.ask(b'{"messages":[1],"seed":' + b"1" * digits + b"}")
    assert status == 400
    said = b"overflows" if digits < 10_000 else b"beside its long texts"
    assert said in body
    status, body = await door.ask(
        b'{"messages":[1],"seed":0.' + b"1" * digits + b"e9999}"
    )
    assert status == 400


async def test_a_length_of_many_digits_is_an_error_of_ours(stage: Stage) -> None:
    # attack 43
    door = await open_door(stage)
    async with await door.connect() as stream:
        token = door.env["OPENAI_API_KEY"].encode()
        request = POST + BEARER.replace(b"TOKEN", token)
        await stream.send_all(
            request + b"Content-Length: " + b"1" * 5_000 + b"\r\n\r\n"
        )
        assert (await answered(stream))[0] == 400


@pytest.mark.parametrize("piece", [b"1\r\n \r\n", b"2\r\n[]\r\n"])
async def test_chunks_of_a_byte_are_taken_in_short_turns(
    stage: Stage, piece: bytes
) -> None:
    # attack 43, spec S5: a receive holds ten thousand of them.
    door = await open_door(stage)
    token = door.env["OPENAI_API_KEY"].encode()
    head = (
        POST + BEARER.replace(b"TOKEN", token) + b"Transfer-Encoding: chunked\r\n\r\n"
    )
    async with await door.connect() as stream:
        with watched() as turns:
            await stream.send_all(head + piece * 100_000 + b"0\r\n\r\n")
            status, _ = await answered(stream)
        assert status == 400
        assert turns.longest_s < 0.03, turns.task


BODIES = {
    "a text": json.dumps(ask("words " * 2_500_000)).encode(),
    "wide characters": json.dumps(ask("中" * 4_000_000), ensure_ascii=False).encode(),
    "escapes": b'{"messages":["' + b"\\u0041" * 2_500_000 + b'"]}',
    "lists": b'{"messages":[' + b"[]," * 5_000_000 + b"1]}",
    "few values": b'{"messages":[' + b"{}," * 49_000 + b'"' + b"a" * 5_000_000 + b'"]}',
    "texts": b'{"messages":[' + b'"",' * 5_000_000 + b"1]}",
    "depth": b'{"messages":' + b"[" * 15_000_000,
    "short lists": b'{"messages":[' + b"[]," * 80_000 + b"1]}",
    "blanks": b" " * 16_000_000,
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_long_body_has_short_turns(tmp_path: Path, name: str) -> None:
    # attack 43, spec S5
    with provider_process() as base_url:
        async with open_door_stage(tmp_path, base_url=base_url, quota={}) as stage:
            door = await open_door(stage)
            await door.ask(ask("hello"))
            async with await door.connect() as stream:
                with watched() as turns:
                    await stream.send_all(door.request(BODIES[name]))
                    status, _ = await answered(stream)
            assert status in (200, 400, 502)
            assert turns.longest_s < 0.03, turns.task
