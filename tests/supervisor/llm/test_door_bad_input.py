"""Bad input of each API, from child and provider (MD1 to MD3, MD6, L13, L15)."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from hostlib.documents import MOST_DEPTH
from tests.helpers.doors import (
    answered_with_head,
    open_door,
    open_door_stage,
    unchunked,
)
from tests.helpers.stage import eventually
from tests.supervisor.llm.led_provider import WAYS, opened, raw, request, server, told

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
PATHS = (CHAT, RESPONSES, MESSAGES)


def asking(path: str, text: str, **more: Any) -> dict[str, Any]:
    """Return a request of a door."""
    if path == RESPONSES:
        return {"input": text, **more}
    bound = {} if path == CHAT else {"max_tokens": 999}
    return {"messages": [{"role": "user", "content": text}], **bound, **more}


def check_form(path: str, answer: Any, kind: str = "invalid_request_error") -> None:
    """Check that an error has the form of the API that was asked by."""
    if path.startswith(MESSAGES):
        assert set(answer) == {"type", "error"}, answer
        assert answer["type"] == "error"
        assert set(answer["error"]) == {"type", "message"}
    else:
        assert set(answer) == {"error"}, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == kind
    assert answer["error"]["message"]


DEEP = b"[" * (MOST_DEPTH + 50) + b"]" * (MOST_DEPTH + 50)
TEXTS = {
    "nothing": b"",
    "a list": b"[]",
    "a text": b'"a"',
    "a key twice": b'{"model":"a","model":"b"}',
    "a key twice beneath": b'{"metadata":{"a":1,"\\u0061":2}}',
    "a comma more": b'{"model":"a",}',
    "two objects": b"{}{}",
    "deep": b'{"metadata":' + DEEP + b"}",
    "digits": b'{"top_p":' + b"1" * 100_000 + b"}",
    "an overflow": b'{"top_p":1e999}',
    "Infinity": b'{"top_p":-Infinity}',
    "half a pair": b'{"user":"\\ud800"}',
    "no UTF-8": b'{"user":"\xff"}',
    "a zero": b'{"user":"\0"}',
    "a mark before": b"\xef\xbb\xbf{}",
}
NAMELESS: dict[str, list[dict[str, object]]] = {
    CHAT: [{"type": "function", "function": {}}, {"type": "custom", "custom": {}}],
    RESPONSES: [{"type": "function"}, {"type": "custom"}],
    MESSAGES: [{"input_schema": {"type": "object"}}, {"type": "custom"}],
}


# spec MD2: each in the API's own form, and nobody is asked or charged.
@pytest.mark.slow
@WAYS
async def test_what_no_reader_takes_is_refused_at_each_door(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    async with opened(tmp_path, **way) as (stage, door):
        for path in (*PATHS, COUNT):
            for name, text in TEXTS.items():
                status, _, answer = await told(door, "POST", path, text)
                assert status == 400, (path, name)
                check_form(path, answer)
        for path, tools in NAMELESS.items():
            for tool in tools:
                body = asking(path, "a", tools=[tool])
                status, _, answer = await told(door, "POST", path, body)
                assert status == 400, (path, tool)
                assert "name" in answer["error"]["message"]
                check_form(path, answer)
        # spec MD1: what is wrong with a count of tokens is told in the form of Messages.
        status, _, answer = await told(door, "POST", COUNT, {}, x_api_key="wrong")
        assert status == 401
        check_form(COUNT, answer, "authentication_error")
        status, head, answer = await told(door, "GET", COUNT)
        assert (status, head[b"allow"]) == (405, b"post")
        check_form(COUNT, answer)
        assert not stage.provider.served
        assert not stage.host.budget.request_memory.used


# spec MD2: a body that ends anywhere is no other request.
@pytest.mark.slow
async def test_a_body_is_cut_at_every_byte(tmp_path: Path) -> None:
    async with opened(tmp_path) as (stage, door):
        for path in (*PATHS, COUNT):
            body = json.dumps(asking(path, "a{}")).encode()
            async with await door.connect() as stream:
                for size in range(len(body)):
                    await stream.send_all(raw(door, "POST", path, body[:size]))
                    status, _, text = await answered_with_head(stream)
                    assert status == 400, (path, size)
                    check_form(path, json.loads(text))
            # Its length was told, and its end never comes.
            for size in range(0, len(body), 9):
                async with await door.connect() as stream:
                    left = len(body) - size
                    await stream.send_all(raw(door, "POST", path, body)[:-left])
                    await stream.send_eof()
                    while await stream.receive_some():
                        pass
        assert not stage.provider.served
        await eventually(lambda: not stage.host.budget.request_memory.used)


# spec MD1: Claude Code would ask about it; the host's own stays the host's.
async def test_no_child_has_an_anthropic_api_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-the-host-0123456789")
    async with opened(tmp_path) as (_, door):
        env = await door.puppet.do("dict(os.environ)")
        assert env["ANTHROPIC_AUTH_TOKEN"] == env["OPENAI_API_KEY"]
        assert "ANTHROPIC_API_KEY" not in env


# spec L13, MD6: the key goes where it is meant to go, and the child is not sent elsewhere.
@pytest.mark.slow
@WAYS
async def test_a_provider_that_redirects_has_failed(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    asked: list[bytes] = []

    async def handle(stream: trio.abc.Stream) -> None:
        asked.append(await request(stream))

    async with server(handle) as port, opened(tmp_path, **way) as (stage, door):
        for path in PATHS:
            for stream in (False, True):
                order = f"!redirect=http://127.0.0.1:{port}/v1"
                body = asking(path, order, stream=stream)
                status, head, answer = await told(door, "POST", path, body)
                assert status == 502, path
                assert b"location" not in head
                kind = "api_error" if path == MESSAGES else "provider_error"
                check_form(path, answer, kind)
        assert not stage.llm.models.accounts.root.tokens.used
    assert not asked


# spec L15: told apart by what comes, not by what the headers claim.
@pytest.mark.slow
@WAYS
async def test_a_wrong_content_type_changes_nothing(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    async with opened(tmp_path, **way) as (_, door):
        for path in PATHS:
            for kind in ("text/html", "application/json", "text/event-stream"):
                order = f"!words=3 !kind={kind}"
                body = asking(path, order)
                status, head, answer = await told(door, "POST", path, body)
                assert (status, head[b"content-type"]) == (200, b"application/json")
                assert "word2" in json.dumps(answer)
                async with await door.connect() as stream:
                    await stream.send_all(
                        raw(door, "POST", path, {**body, "stream": True})
                    )
                    status, head, text = await answered_with_head(stream)
                assert (status, head[b"content-type"]) == (200, b"text/event-stream")
                assert b"word2" in text


# spec L15, I9: what never ends is ended, as the API has it; what is too long is no answer.
@pytest.mark.slow
@WAYS
async def test_an_answer_without_end_is_a_failure(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    ends = {CHAT: b'data: {"error"', RESPONSES: b"event: response.failed"}
    ends[MESSAGES] = b"event: error"
    async with open_door_stage(tmp_path, max_tokens=None, timeout="1s", **way) as stage:
        door = await open_door(stage)
        for path in PATHS:
            body = asking(path, "!endless !slow=0.01", stream=True)
            async with await door.connect() as stream:
                await stream.send_all(raw(door, "POST", path, body))
                status, _, text = await answered_with_head(stream)
            last = unchunked(text).rstrip().rpartition(b"\n\n")[2]
            assert status == 200
            assert last.startswith(ends[path]), last
            assert b"no complete answer within 1 s" in last
    long = tmp_path / "long"
    long.mkdir()
    async with opened(long, **way) as (stage, door):
        for path in PATHS:
            body = asking(path, "!huge=20")
            status, _, answer = await told(door, "POST", path, body)
            assert status == 502, path
            assert "longer than" in answer["error"]["message"]
        assert not stage.llm.models.accounts.root.tokens.reserved
