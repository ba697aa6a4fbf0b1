"""The memory of an endpoint's call is freed with its reservation (MD7)."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import httpcore2
import pytest

from supervisor.llm.answer_reader import AnswerReader
from supervisor.llm.json_request import JsonRequest
from tests.helpers.stage import eventually
from tests.supervisor.llm.led_provider import opened, raw, told

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Have nothing freed but what nothing holds: a circle would stay."""
    gc.freeze()  # a look at the objects of other tests takes a second
    gc.disable()
    yield
    gc.enable()


def held() -> int:
    """Return how many requests and answers there are, those of the library with them."""
    kinds = AnswerReader | JsonRequest | httpcore2.Request
    return sum(isinstance(one, kinds) for one in gc.get_objects())


# spec MD7, attack 42: the memory of calls that fail or are refused is not reserved any more.
@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("order", "is_paid"),
    [
        ("!words=2", True),
        ("!status=400", True),
        ("!words=9 !error", True),
        ("!huge=20 !plain", True),
        ("!words=2", False),
    ],
    ids=["answered", "refused", "broken", "too long", "unpaid"],
)
async def test_nothing_of_a_call_is_left(
    tmp_path: Path, no_collector: None, order: str, *, is_paid: bool, stream: bool
) -> None:
    del no_collector
    limit = {} if is_paid else {"max_tokens": 1e9}
    async with opened(tmp_path, quota=limit) as (stage, door):
        stage.llm.models.accounts.root.tokens.used = 1e9
        for path in PATHS:
            body: dict[str, object] = {"model": "m", "stream": stream}
            if path == "/v1/responses":
                body["input"] = order
            else:
                said = [{"role": "user", "content": order}]
                body |= {"max_tokens": 99, "messages": said}
            await told(door, "POST", path, body)
            await eventually(lambda: not stage.host.budget.request_memory.used)
            assert not held(), path


# spec MD7, attack 42
@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_nothing_of_a_call_is_left_whose_client_is_gone(
    tmp_path: Path, no_collector: None, *, stream: bool
) -> None:
    del no_collector
    async with opened(tmp_path, quota={}) as (stage, door):
        said = [{"role": "user", "content": "!words=3 !hang"}]
        body = json.dumps({"model": "m", "stream": stream, "messages": said}).encode()
        async with await door.connect() as one:
            await one.send_all(raw(door, "POST", PATHS[0], body))
            await eventually(lambda: bool(stage.provider.served))
        await eventually(lambda: not stage.host.budget.request_memory.used)
        await eventually(lambda: not stage.llm.models.accounts.root.calls.reservations)
        assert not held()
