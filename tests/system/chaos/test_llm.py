"""Children die by kill -9 in the middle of a call: nothing is overspent or lost."""

import random
from typing import Any

import pytest
import trio

from demo.provider import Provider
from supervisor.llm.quota import tokens_of
from supervisor.llm.service import LlmService
from tests.helpers.rounds import LONG, ROUNDS, SEED
from tests.helpers.sessions import chat_request
from tests.helpers.stage import Stage, eventually, open_stage

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

CALLS = 1000 if LONG else max(10, ROUNDS * 6 // 100)
"""Calls whose child dies."""

PROMPT = b"!words=50 !slow=0.001 please write at some length"
ALONE = tokens_of(len(PROMPT)) + 4.0

OUTPUT = 4
"""Weight of a token of output."""

AT_ONCE = 8
QUOTA_A_CALL = 60.0
"""Less than the calls would take, so that they end in "quota exceeded"."""


async def one(stage: Stage, payload: str, delay_s: float, outside: bool) -> None:
    """Start a child that asks the model, and kill it on the way."""
    script = 'cat "$1" >&3; sleep "$2"; kill -9 $$'
    wait = "60" if outside else f"{delay_s:.4f}"
    child = await stage.spawn("/bin/sh", "-c", script, "sh", payload, wait)
    if outside:
        await trio.sleep(delay_s)
        assert child.process is not None
        child.process.send_signal(9)
    assert await child.wait_gone() == 137


# spec L10, I7, attack 21
async def test_dying_in_the_middle_of_a_call_overspends_nothing(
    tmp_path: Any,
) -> None:
    choice = random.Random(SEED)
    values: dict[str, Any] = {
        "max_tokens": 60,
        "quota": {"max_tokens": QUOTA_A_CALL * CALLS},
    }
    payload = tmp_path / "payload"
    payload.write_bytes(chat_request(PROMPT))
    async with open_stage(tmp_path, model=values) as stage:
        # The library's first call reads what it never closes again.
        limit = trio.CapacityLimiter(AT_ONCE)
        async with trio.open_nursery() as nursery:

            async def attend() -> None:
                async with limit:
                    delay_s = choice.random() * 0.12
                    outside = choice.random() < 0.5
                    await one(stage, str(payload), delay_s, outside)

            for _ in range(CALLS):
                nursery.start_soon(attend)
        await check(stage, stage.provider, stage.llm)


async def check(stage: Stage, provider: Provider, service: LlmService) -> None:
    """Compare what was charged with what was served."""
    root = service.models.accounts.root
    assert not root.calls.reservations
    assert root.tokens.reserved == 0.0
    assert not service.models.accounts.nodes()
    await eventually(lambda: not provider.at_once)
    served = sum(one.prompt_tokens + OUTPUT * one.pieces for one in provider.served)
    told = stage.events("llm.called")
    # Each call is cut off, with a piece on its way: charged is what came (spec L10).
    assert served <= root.tokens.used + OUTPUT * len(told)
    assert sum(row["cost"] for row in told) == pytest.approx(root.tokens.used)
    assert root.tokens.limit is not None
    # Beyond the limit at most by one call's overshoot: the one that goes alone, with its
    # prompt and one token of output, when less than that is left.
    assert root.tokens.used < root.tokens.limit + ALONE
    # The rest is less than a call: it ends in "quota exceeded".
    root.tokens.used = max(root.tokens.used, root.tokens.limit)
    child = await stage.puppet()
    reply = await child.ask(chat_request(b"hello"))
    assert reply == b"ERROR quota exceeded: cannot make LLM call"
    assert len(stage.events("quota.denied")) >= 1
    await child.leave()
