"""Calls without an end: abandoned, cut off, or never sent (L10, L11, attack 46)."""

import ssl
from pathlib import Path

import pytest
import trio

from supervisor.fsproxy.replies import PROCESS_EXIT
from tests.helpers import doors as endpoint
from tests.helpers.certificates import certificate
from tests.helpers.sessions import chat_request
from tests.helpers.stage import eventually, open_model_stage
from tests.supervisor.llm.led_provider import request as whole_request
from tests.supervisor.llm.led_provider import server
from tests.supervisor.llm.test_conversations import PRESETS, configured

FAILED = b"ERROR OpenAI API call failed: "
EXCEEDED = b"ERROR quota exceeded: cannot make LLM call"

SOON = "1s"
"""The time limit of calls that do not end: a request is out long before."""


def estimate(prompt: bytes) -> int:
    """Return what a prompt is charged where nothing is reported."""
    return -(-len(prompt) // 4)


# attack 46, spec L10: a time-out costs the prompt, and counts.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "output"),
    [
        (b"!hang", 0.0),
        (b"!wait=30", 0.0),
        (b"!words=9 !hang-after=3", 4.0 * 5),  # 18 bytes
        (b"!error !words=1", 0.0),  # an event of the stream says that it failed
        (b"!nothing", 0.0),
        (b"!truncated !plain", 0.0),
    ],
)
async def test_a_call_that_was_given_up_is_charged_and_counts(
    tmp_path: Path, order: bytes, output: float
) -> None:
    async with open_model_stage(tmp_path, timeout=SOON, max_calls=1) as stage:
        line = stage.connect()
        assert (await line.chat(order)).line.startswith(FAILED)
        assert stage.llm.models.accounts.root.tokens.used == estimate(order) + output
        assert stage.llm.models.accounts.root.calls.used == 1
        assert (await line.chat(b"a")).line == EXCEEDED
        (told,) = stage.events("llm.called")
        assert (told["outcome"], told["cost"]) == ("failed", estimate(order) + output)


# attack 46: the tool loop's calls are calls like all others.
@pytest.mark.slow
async def test_a_call_of_the_tool_loop_is_charged_too(tmp_path: Path) -> None:
    async with open_model_stage(
        tmp_path, fds=configured(), timeout=SOON, presets=PRESETS, max_calls=1
    ) as stage:
        line = stage.connect()
        reply = await line.chat(b"!hang", b"agent")
        assert reply.line.startswith(FAILED + b"no complete answer within")
        assert stage.llm.models.accounts.root.tokens.used > estimate(b"!hang")
        assert stage.llm.models.accounts.root.calls.used == 1
        assert (await line.chat(b"a", b"agent")).line == EXCEEDED


# attack 46, spec L11: a server that takes the request and hangs up may have answered it.
@pytest.mark.slow
async def test_a_server_that_hangs_up_is_charged(tmp_path: Path) -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        await whole_request(stream)

    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url, max_calls=1) as stage:
            line = stage.connect()
            assert (await line.chat(b"hello")).line.startswith(FAILED)
            assert stage.llm.models.accounts.root.tokens.used == estimate(b"hello")
            assert stage.llm.models.accounts.root.calls.used == 1
            assert (await line.chat(b"a")).line == EXCEEDED


# attack 46: encrypted it is the same, whether the server hangs up or is waited for.
@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
async def test_an_encrypted_request_that_went_out_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    path = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))

    async def handle(stream: trio.abc.Stream) -> None:
        await whole_request(stream)
        if hangs:
            await trio.sleep_forever()

    timeout = SOON if hangs else "60s"
    async with server(handle, context) as port:
        url = f"https://localhost:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url, timeout=timeout) as stage:
            assert (await stage.connect().chat(b"hello")).line.startswith(FAILED)
            assert stage.llm.models.accounts.root.tokens.used == estimate(b"hello")
            assert stage.llm.models.accounts.root.calls.used == 1


# spec L11: what asks a proxy for a way is no request.
@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_proxy_that_gives_no_way_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    asked: list[bytes] = []

    async def handle(stream: trio.abc.Stream) -> None:
        asked.append(bytes(await stream.receive_some(65_536)))
        if hangs:
            await trio.sleep_forever()
        await stream.send_all(b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n")

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    timeout = SOON if hangs else "60s"
    async with server(handle) as port:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        url = "https://model.invalid/v1"
        async with open_model_stage(tmp_path, base_url=url, timeout=timeout) as stage:
            assert (await stage.connect().chat(b"hello")).line.startswith(FAILED)
            assert (
                stage.llm.models.accounts.root.tokens.used,
                stage.llm.models.accounts.root.calls.used,
            ) == (0.0, 0)
    assert asked[0].startswith(b"CONNECT model.invalid:443 ")


# spec L10: before the request is out nothing was asked, whichever way it ends.
@pytest.mark.slow
@pytest.mark.parametrize("end", ["time-out", "exit", "hung up"])
async def test_a_request_that_is_not_out_is_free(tmp_path: Path, end: str) -> None:
    async def handle(stream: trio.abc.Stream) -> None:
        await stream.receive_some(1)
        begun.set()
        if end != "hung up":
            await trio.sleep_forever()

    begun = trio.Event()
    timeout = SOON if end == "time-out" else "60s"
    async with server(handle) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with open_model_stage(tmp_path, base_url=url, timeout=timeout) as stage:
            line = stage.connect()
            prompt = b"x" * 8_000_000  # more than the sockets hold
            with trio.fail_after(60):
                await line.send(chat_request(prompt))
                await begun.wait()
                if end == "exit":
                    await line.session.finish(PROCESS_EXIT)
                else:
                    said = (await line.chat_reply()).line
                    why = b"no complete" if end == "time-out" else b"cannot connect"
                    assert said.startswith(FAILED + why)
            assert stage.llm.models.accounts.root.tokens.used == 0.0
            assert stage.llm.models.accounts.root.calls.used == 0


# spec L11: what a provider refuses is free, also while it is to be tried again.
@pytest.mark.slow
async def test_a_refusal_before_a_time_out_is_free(tmp_path: Path) -> None:
    async with open_model_stage(tmp_path, timeout=SOON, max_calls=1) as stage:
        line = stage.connect()
        reply = await line.chat(b"!status=429 !retry-after=30")
        assert reply.line.startswith(FAILED + b"no complete answer within")
        assert (
            stage.llm.models.accounts.root.tokens.used,
            stage.llm.models.accounts.root.calls.used,
        ) == (0.0, 0)
        assert (await line.chat(b"a")).line.startswith(b"OK ")


# attack 46, spec L10: where reasoning was asked for nobody knows how much there was.
@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("effort", "is_whole"), [("high", True), ("none", False), (None, False)]
)
async def test_reasoning_that_was_given_up_costs_its_reservation(
    tmp_path: Path, effort: str | None, is_whole: bool, stream: bool
) -> None:
    async with endpoint.open_door_stage(tmp_path, timeout=SOON) as stage:
        door = await endpoint.open_door(stage)
        body = endpoint.ask("!hang", reasoning_effort=effort, stream=stream)
        status, _ = await door.ask(body)
        assert status == 502
        root = stage.llm.models.accounts.root
        assert root.calls.used == 1
        # A byte is a token at most, 16 are a message, and 50 tokens of output.
        assert (root.tokens.used > 16 + 50 * 4) is is_whole
        assert 0 < root.tokens.used < 500


# attack 46, spec MD5: a model that reasons may do so unasked.
@pytest.mark.slow
@pytest.mark.parametrize("is_reasoning", [True, False])
async def test_a_reasoning_model_costs_its_reservation(
    tmp_path: Path, is_reasoning: bool
) -> None:
    async with endpoint.open_door_stage(tmp_path, reasoning=is_reasoning) as stage:
        door = await endpoint.open_door(stage)
        line = await door.connect()
        await line.send_all(door.request(endpoint.ask("!hang", stream=True)))
        await stage.provider.wait_for(1)
        reserved = stage.llm.models.accounts.root.tokens.reserved
        assert reserved > 16 + 50 * 4
        await line.aclose()
        await eventually(lambda: not stage.llm.models.accounts.root.calls.reservations)
        assert (stage.llm.models.accounts.root.tokens.used == reserved) is is_reasoning
        assert stage.llm.models.accounts.root.tokens.used > 0
        assert stage.llm.models.accounts.root.calls.used == 1


# attack 46, spec MD5: LLM_CHAT asks no effort, and pays the same.
@pytest.mark.slow
async def test_a_reasoning_model_of_llm_chat_costs_its_reservation(
    tmp_path: Path,
) -> None:
    async with open_model_stage(
        tmp_path, timeout=SOON, reasoning=True, max_tokens=50
    ) as stage:
        line = stage.connect()
        assert (await line.chat(b"!hang")).line.startswith(FAILED)
        assert stage.llm.models.accounts.root.tokens.used > 50 * 4
        assert stage.llm.models.accounts.root.calls.used == 1


# attack 46: the same for a client that closes its connection.
@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_closing_the_connection_costs_the_reservation(
    tmp_path: Path, stream: bool
) -> None:
    async with endpoint.open_door_stage(tmp_path) as stage:
        door = await endpoint.open_door(stage)
        body = endpoint.ask("!hang", reasoning_effort="low", stream=stream)
        line = await door.connect()
        await line.send_all(door.request(body))
        await stage.provider.wait_for(1)
        reserved = stage.llm.models.accounts.root.tokens.reserved
        assert reserved > 16 + 50 * 4
        await line.aclose()
        await eventually(lambda: not stage.llm.models.accounts.root.calls.reservations)
        assert stage.llm.models.accounts.root.tokens.used == reserved
        assert stage.llm.models.accounts.root.calls.used == 1
