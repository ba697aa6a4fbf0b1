"""The reservation for a prompt is more than any provider counts (spec L10)."""

import base64
import random
from pathlib import Path
from typing import Any

import pytest
import trio

from supervisor.llm.prompt_size import PromptSize, size_of_body
from tests.helpers.sessions import ChatReply, Line
from tests.helpers.stage import open_model_stage

EXCEEDED = b"ERROR quota exceeded: cannot make LLM call"

AT_ONCE = 64
QUOTA = 5_000
OUTPUT = 4.0 * 10

DENSE = {
    "Chinese": "\u9f98\u9750" * 150,
    "emoji": "\U0001f9ff\U0001faac" * 110,
    "random": base64.b64encode(random.Random(1).randbytes(700)).decode(),
}
"""About 900 bytes each, of which a tokenizer may make as many tokens."""


# attack 45, spec L10, I7: 64 at once whose prompts have a token for each byte.
@pytest.mark.slow
@pytest.mark.parametrize("text", DENSE.values(), ids=DENSE)
async def test_dense_prompts_at_once_do_not_pass_the_quota(
    tmp_path: Path, text: str
) -> None:
    quota = {"max_tokens": QUOTA}
    async with open_model_stage(tmp_path, max_tokens=10, quota=quota) as stage:
        prompt = f"!dense !wait=0.5 !words=10 {text}".encode()
        lines = [stage.connect() for _ in range(AT_ONCE)]
        replies: list[ChatReply] = []

        async def call(line: Line) -> None:
            replies.append(await line.chat(prompt))

        async with trio.open_nursery() as nursery:
            for line in lines:
                nursery.start_soon(call, line)
        most = max(one.prompt_tokens for one in stage.provider.served)
        assert most > len(prompt)  # the provider counts what it may
        assert stage.llm.models.accounts.root.tokens.used <= QUOTA + most + OUTPUT
        refused = [reply for reply in replies if reply.line == EXCEEDED]
        assert len(refused) + len(stage.provider.served) == AT_ONCE
        assert refused


# spec L10: one token a byte, and 16 for the message.
async def test_the_worst_case_is_a_token_for_each_byte(tmp_path: Path) -> None:
    async with open_model_stage(
        tmp_path, max_tokens=50, quota={"max_tokens": 112}
    ) as stage:
        line = stage.connect()
        await line.chat(b"!words=1 ___")  # 12 bytes, 1 message: 84 left
        assert stage.provider.served[0].body["max_tokens"] == 21
        assert stage.llm.models.accounts.root.tokens.used == 3 + 4.0  # as reported


# spec L10: what is charged without a report stays the estimate.
async def test_the_charge_without_a_report_is_four_bytes_a_token(
    tmp_path: Path,
) -> None:
    quota = {"max_tokens": QUOTA}
    async with open_model_stage(tmp_path, max_tokens=10, quota=quota) as stage:
        prompt = b"!usage=none !words=1 " + b"x" * 79
        await stage.connect().chat(prompt)
        assert stage.llm.models.accounts.root.tokens.used == 25.0 + 8.0


def body(*content: Any, **more: Any) -> dict[str, Any]:
    """Return a request of one message with these parts."""
    return {"messages": [{"role": "user", "content": list(content)}], **more}


TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/1.png"}}


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (body(TEXT), 0),
        (body("plain", TEXT), 0),
        (body({**TEXT, "cache_control": {"type": "ephemeral"}}), 0),
        (body(TEXT, IMAGE, IMAGE), 2),
        (body({"type": "file", "file": {"file_id": "f"}}), 1),
        (body({"type": "input_audio", "input_audio": {"data": "AA=="}}), 1),
        # A word does not make a text of it.
        (body({**IMAGE, "type": "text", "text": ""}), 1),
        ({"messages": [{"role": "user", "content": IMAGE}]}, 1),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, 1),
        ({"messages": ["no message", {"role": "user", "content": None}]}, 0),
        # Images in a tool's result, beneath other names, in a list of addresses.
        (body({"type": "tool_result", "content": [IMAGE, TEXT, IMAGE]}), 3),
        (body({"type": "x", "content": [{"type": "y", "content": [IMAGE]}]}), 3),
        (body({"type": "both", "first": IMAGE, "second": IMAGE}), 2),
        (body({"type": "images", "urls": ["https://a/1", "https://a/2"]}), 3),
        ({"messages": [{"role": "user", "images": ["aGk=", "aGk="]}]}, 2),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, 0),
    ],
)
def test_what_is_not_text_is_counted(request_: dict[str, Any], parts: int) -> None:
    # attack 45
    assert size_of_body(request_).other_parts == parts


# attack 45, spec L10: whatever reaches the provider counts.
@pytest.mark.parametrize(
    "name",
    ["tools", "functions", "response_format", "stop", "user", "logit_bias", "seed"],
)
def test_every_field_is_counted(name: str) -> None:
    less = size_of_body(body(TEXT)).most_tokens()
    more = size_of_body(body(TEXT, **{name: {"x": "y" * 1000}})).most_tokens()
    assert more >= less + 1000


def test_a_policy_says_what_an_image_may_cost() -> None:
    size = PromptSize(100, 2, 3)
    assert size.estimated_tokens == 25
    assert size.most_tokens() == 100 + 32 + 6000
    assert size.most_tokens(500) == 100 + 32 + 1500
