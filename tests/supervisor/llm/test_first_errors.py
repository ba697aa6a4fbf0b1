"""A provider accepts a request, and its first word is an error (MD3, MD6)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.helpers.doors import answered_with_head
from tests.supervisor.llm.led_provider import EVENTS_HEAD, opened_with, raw, request

FORMS: dict[str, Callable[[dict[str, str]], dict[str, object]]] = {
    "chat": lambda error: {"error": error},
    "responses": lambda error: {"type": "error", **error},
    "failed": lambda error: {
        "type": "response.failed",
        "response": {"id": "r", "status": "failed", "error": error},
    },
    "messages": lambda error: {
        "type": "error",
        "error": {"type": error["code"], "message": error["message"]},
    },
}
"""The error of each API as an event."""

PATHS = {
    "chat": "chat/completions",
    "responses": "responses",
    "failed": "responses",
    "messages": "messages",
}
ROWS: dict[str, tuple[int, str | None, str, bool]] = {
    # status, code of Chat and Responses, kind of Messages, told not to ask again
    "rate_limit_exceeded": (429, "rate_limit_exceeded", "rate_limit_error", False),
    "rate_limit_error": (429, "rate_limit_exceeded", "rate_limit_error", False),
    "insufficient_quota": (429, "rate_limit_exceeded", "rate_limit_error", False),
    "context_length_exceeded": (
        400,
        "context_length_exceeded",
        "invalid_request_error",
        True,
    ),
    "overloaded_error": (529, "overloaded_error", "overloaded_error", False),
    "server_error": (502, "server_error", "api_error", True),
    "invalid_api_key": (502, None, "api_error", True),
}


def asked(path: str, word: str, *, stream: bool) -> dict[str, Any]:
    """Return a request of a door that names an error."""
    if path == "responses":
        return {"input": word, "stream": stream}
    messages = [{"role": "user", "content": word}]
    return {"messages": messages, "max_tokens": 9, "stream": stream}


# spec MD3, MD6: the status keeps the class, for agents obey it; Codex and Claude Code stop at 400.
# The operator's account is never told as the child's.
@pytest.mark.parametrize("way", ["native", "chat"])
async def test_a_first_error_is_told_by_its_status(tmp_path: Path, way: str) -> None:
    form = ""

    async def handle(stream: trio.abc.Stream) -> None:
        data = await request(stream)
        word = next(one for one in ROWS if one.encode() in data)
        event = FORMS[form]({"code": word, "message": f"it said {word}"})
        await stream.send_all(
            EVENTS_HEAD + b"data: %b\n\n" % json.dumps(event).encode()
        )

    async with opened_with(tmp_path, handle, way) as (_, door):
        for name, path in PATHS.items():
            form = name if way == "native" else "chat"
            for word, (status, code, kind, is_final) in ROWS.items():
                body = asked(path, word, stream=True)
                async with await door.connect() as stream:
                    await stream.send_all(raw(door, "POST", f"/v1/{path}", body))
                    got, head, text = await answered_with_head(stream)
                error = json.loads(text)["error"]
                assert got == status, (name, word)
                assert f"it said {word}" in error["message"]
                told = error["type"] if path == "messages" else error["code"]
                assert told == (kind if path == "messages" else code), (name, word)
                assert (b"x-should-retry" in head) is is_final, (name, word)
