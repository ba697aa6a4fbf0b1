"""Calls and their ends: spec L10 to L15, over real HTTP."""

import os
import threading
from pathlib import Path

import pytest
import trio

from demo.provider import serving
from supervisor.fsproxy.replies import EOF, PROCESS_EXIT
from supervisor.llm import chat, provider
from supervisor.llm.answer import Answer
from tests.helpers.canary import KEY, leave_out
from tests.helpers.delays import NEIGHBOUR_S, kept_waiting_s
from tests.helpers.sessions import Line, chat_request
from tests.helpers.stage import Stage, eventually, open_model_stage
from vfs.ledger import Ledger

EXCEEDED = b"ERROR quota exceeded: cannot make LLM call"
FAILED = b"ERROR OpenAI API call failed: "


# spec L10, I7, attack 21: 64 at once, head-room for one: exactly one.
@pytest.mark.slow
async def test_of_many_callers_with_room_for_one_one_goes_through(
    tmp_path: Path,
) -> None:
    # A byte is a token of 1.0, a message 16, 10 tokens of output cost 40.0.
    async with open_model_stage(
        tmp_path, max_tokens=10, quota={"max_tokens": 75}
    ) as stage:
        parent = stage.connect()
        lines = [stage.nested(parent) for _ in range(32)]
        lines += [stage.connect() for _ in range(32)]
        prompt = b"!wait=0.3 !words=10"  # 19 bytes
        stage.llm.models.accounts.root.tokens.limit = (
            77.0  # the rest cannot be reserved during a call
        )
        replies: list[bytes] = []

        async def call(line: Line) -> None:
            replies.append((await line.chat(prompt)).line)

        async with trio.open_nursery() as nursery:
            for line in lines:
                nursery.start_soon(call, line)
        assert replies.count(EXCEEDED) == 63
        assert len(stage.provider.served) == 1
        assert len(stage.events("quota.denied")) == 63


# spec L10: the maximum is lowered until the worst case fits.
async def test_the_maximum_is_lowered_to_what_is_left(tmp_path: Path) -> None:
    async with open_model_stage(
        tmp_path, max_tokens=50, quota={"max_tokens": 129}
    ) as stage:
        line = stage.connect()
        await line.chat(b"!words=1 ___")  # 12 bytes, 1 message; 101 left: 25 tokens
        assert stage.provider.served[0].body["max_tokens"] == 25
        stage.llm.models.accounts.root.tokens.used = 128.0
        await line.chat(b"!words=0 !prompt-tokens=1")
        assert stage.provider.served[1].body["max_tokens"] == 1
        assert (await line.chat(b"a")).line == EXCEEDED


# spec L10: a large bound of the host's own is not sent, a small one is.
async def test_without_a_maximum_all_that_remains_is_reserved(tmp_path: Path) -> None:
    async with open_model_stage(tmp_path, quota={"max_tokens": 1_000_000}) as stage:
        first, second = stage.connect(), stage.connect()
        await first.send(chat_request(b"!wait=0.2"))
        await stage.provider.wait_for(1)
        assert stage.llm.models.accounts.root.tokens.reserved == 1_000_000
        assert "max_tokens" not in stage.provider.served[0].body
        assert (await second.chat(b"a")).line == EXCEEDED
        assert (await first.chat_reply()).line.startswith(b"OK ")
        stage.llm.models.accounts.root.tokens.used = 1_000_000 - 61
        await second.chat(b"abcd")
        assert stage.provider.served[1].body["max_tokens"] == 10


# spec L10: the last token's worth goes alone, with one token of output.
async def test_what_is_too_little_for_a_token_goes_alone(tmp_path: Path) -> None:
    async with open_model_stage(tmp_path, quota={"max_tokens": 3}) as stage:
        first, second = stage.connect(), stage.connect()
        await first.send(chat_request(b"!wait=0.2 !words=1"))
        await stage.provider.wait_for(1)
        assert stage.provider.served[0].body["max_tokens"] == 1
        assert (await second.chat(b"a")).line == EXCEEDED
        assert (await first.chat_reply()).line.startswith(b"OK ")
        assert (await second.chat(b"a")).line == EXCEEDED


# spec L10: calls that were refused do not count.
@pytest.mark.slow
async def test_the_number_of_calls_is_bounded(tmp_path: Path) -> None:
    async with open_model_stage(tmp_path, max_calls=2) as stage:
        line, other = stage.connect(), stage.connect()
        assert (await line.chat(b"!status=400")).line.startswith(FAILED)
        assert (await line.llm_config())["max_calls"] == 2
        assert (await line.chat(b"a")).line.startswith(b"OK ")
        await line.send(chat_request(b"!wait=0.2"))
        await stage.provider.wait_for(3)
        assert (await other.chat(b"a")).line == EXCEEDED
        assert (await line.chat_reply()).line.startswith(b"OK ")
        assert (await line.chat(b"a")).line == EXCEEDED
        assert len(stage.provider.served) == 3


# spec L10: a provider that reports no usage is charged by the estimate.
async def test_without_a_report_the_estimate_is_charged(stage: Stage) -> None:
    line = stage.connect()
    for plain in (b"", b" !plain"):
        stage.llm.models.accounts.root.tokens.used = line_spent(stage, line, 0.0)
        prompt = b"!words=10 !usage=none" + plain
        reply = await line.chat(prompt)
        # "word0 " ... "word9 " are 60 bytes, 15 tokens of 4.0.
        assert reply.status.startswith(f"{-(-len(prompt) // 4) + 60.0} ")


def line_spent(stage: Stage, line: Line, spent: float) -> float:
    """Set what a client has spent."""
    stage.llm.models.accounts.node_of(line.client).tokens.used = spent
    return spent


# spec L10: when its client is gone, the call ends, and what came is charged.
@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
async def test_a_call_ends_when_its_client_closes_both_directions(
    stage: Stage, transport: str
) -> None:
    line = stage.connect(transport=transport)
    prompt = b"!words=9 !hang-after=4"
    await line.send(chat_request(prompt))
    await eventually(
        lambda: stage.provider.served and stage.provider.served[0].pieces == 4
    )
    line.close()
    await line.gone()
    assert line.session.why_closed == EOF
    (told,) = stage.events("llm.called")
    assert told["outcome"] == "cancelled"
    assert told["completion_tokens"] == 6  # 24 bytes
    assert stage.llm.models.accounts.root.tokens.used == -(-len(prompt) // 4) + 24.0
    assert not stage.llm.models.accounts.root.tokens.reserved
    await eventually(lambda: not stage.provider.at_once)


# spec L10: a client that only stopped sending still wants its answer.
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
async def test_a_half_closed_client_gets_its_answer(
    stage: Stage, transport: str
) -> None:
    line = stage.connect(transport=transport)
    await line.send(chat_request(b"!wait=0.2"))
    if transport == "socketpair":
        line.shut_down()
    else:
        os.close(line.writer)
        line.writer = -1
    assert (await line.chat_reply()).line.startswith(b"OK ")
    assert stage.provider.served[0].done


# spec L10, S2: the end of the process ends the call, whoever holds the descriptor.
async def test_a_call_ends_with_its_process(stage: Stage) -> None:
    line = stage.connect()
    await line.send(chat_request(b"!hang-after=2 !words=5"))
    await eventually(
        lambda: stage.provider.served and stage.provider.served[0].pieces == 2
    )
    with trio.fail_after(30):
        await line.session.finish(PROCESS_EXIT)
    assert stage.llm.models.accounts.root.tokens.used == 6.0 + 12.0
    await eventually(lambda: not stage.provider.at_once)


# spec L10, S2: what waits behind it never starts.
async def test_a_queued_call_of_a_dead_client_never_starts(stage: Stage) -> None:
    line = stage.connect()
    await line.send(chat_request(b"!hang") * 3)
    await stage.provider.wait_for(1)
    await line.session.finish(PROCESS_EXIT)
    assert len(stage.provider.served) == 1
    assert len(stage.events("llm.called")) == 1


async def test_a_call_that_was_sent_in_the_last_breath_never_starts(
    stage: Stage,
) -> None:
    # spec L10, S2
    line = stage.connect()
    await line.send(chat_request(b"hello"))
    await line.session.finish(PROCESS_EXIT)
    assert not stage.provider.served
    assert stage.llm.models.accounts.root.tokens.used == 0.0


# spec L10, L4: the outputs of a call whose client is gone are as before.
async def test_the_outputs_of_a_cancelled_call_are_as_before(stage: Stage) -> None:
    (stage.root / "old").write_text("old")
    line = stage.connect()
    await line.send(chat_request(b"!hang", outputs=b"old\nnew"))
    await stage.provider.wait_for(1)
    line.close()
    await line.gone()
    assert (stage.root / "old").read_text() == "old"
    assert not (stage.root / "new").exists()


# spec L4: what a check made is removed again, and all outputs of a client that waits are
# written; a call that is cancelled goes on with it for a time only.
@pytest.mark.parametrize("shield_s", [60.0, 0.0])
async def test_outputs_of_a_cancelled_call_are_removed_for_a_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, shield_s: float
) -> None:
    monkeypatch.setattr(chat, "SHIELD_S", shield_s)
    line = stage.connect()
    reply = await line.chat(b"a", outputs=b"one\ntwo")
    assert (stage.root / "one").read_text() == (stage.root / "two").read_text()
    assert (stage.root / "two").read_text() == reply.text
    with trio.CancelScope() as scope:
        async with chat.Outputs(line.session, claim=False) as outputs:
            await outputs.open([b"three", b"four"])
            scope.cancel()
            await trio.sleep_forever()
    assert (stage.root / "four").exists() == (shield_s == 0.0)


# spec L10: nested clients as well, when they go and when their parent does.
async def test_a_nested_clients_call_ends_with_it(stage: Stage) -> None:
    parent = stage.connect()
    nested = stage.nested(parent)
    await nested.send(chat_request(b"!hang"))
    await stage.provider.wait_for(1)
    nested.close()
    await nested.gone()
    await eventually(lambda: not stage.provider.at_once)
    assert (await parent.quota()).startswith("OK 2.0 ")


# spec L11
@pytest.mark.parametrize(
    ("order", "said"),
    [
        (b"!status=400", b"400 as it was told"),
        (b"!status=404", b"404 as it was told"),
        (b"!leak-refused", b"400 you sent Bearer [redacted]"),
    ],
)
async def test_a_refusal_is_one_line_and_free(
    stage: Stage, order: bytes, said: bytes
) -> None:
    line = stage.connect()
    assert (await line.chat(order)).line == FAILED + said
    assert await line.quota() == "OK 0.0 weighted tokens (no limit)"
    assert stage.events("llm.called")[0]["outcome"] == "failed"


# spec L11: retries are the library's, with the pauses that the provider asks for.
@pytest.mark.parametrize("status", [b"429", b"500", b"503"])
async def test_a_passing_refusal_is_tried_again(stage: Stage, status: bytes) -> None:
    line = stage.connect()
    order = b"!once=%b !retry-after=0.05" % status
    assert (await line.chat(order)).line.startswith(b"OK ")
    assert len(stage.provider.served) == 2


async def test_a_lasting_refusal_is_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec L11
    line = stage.connect()
    reply = await line.chat(b"!status=429 !retry-after=0.01")
    assert reply.line == FAILED + b"429 as it was told"
    assert len(stage.provider.served) == 1 + provider.MAX_RETRIES
    del monkeypatch


@pytest.mark.slow
async def test_a_provider_that_is_not_there_is_told(tmp_path: Path) -> None:
    # spec L11
    async with open_model_stage(tmp_path, base_url="http://127.0.0.1:1/v1") as stage:
        line = stage.connect()
        reply = await line.chat(b"a")
        assert reply.line.startswith(FAILED + b"cannot connect: ")
        assert await line.quota() == "OK 0.0 weighted tokens (no limit)"


# spec L11: the timeout bounds the whole call, retries and their pauses included.
@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [b"!hang", b"!status=429 !retry-after=30", b"!slow=0.25 !words=99"]
)
async def test_the_timeout_bounds_the_whole_call(tmp_path: Path, order: bytes) -> None:
    async with open_model_stage(tmp_path, timeout="2s") as stage:
        line = stage.connect()
        with trio.fail_after(30):
            reply = await line.chat(order)
        assert reply.line == FAILED + b"no complete answer within 2 s"
        # A request that the provider has taken is paid, and what was written until then.
        charged = b"429" not in order
        assert (stage.llm.models.accounts.root.tokens.used > 0) is charged


# spec L12
async def test_a_section_without_a_key_asks_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with open_model_stage(tmp_path, api_key_file=None) as stage:
        stage.provider.key = None
        line = stage.connect()
        assert (await line.llm_config())["api_key_configured"] is False
        assert (await line.chat(b"a")).line.startswith(b"OK ")
        assert "authorization" not in stage.provider.served[0].headers


# spec L12: a key may come by the environment, and does not stay there.
async def test_a_key_of_the_environment_is_taken_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with open_model_stage(tmp_path, api_key_file=None) as stage:
        assert "OPENAI_API_KEY" not in os.environ
        line = stage.connect()
        assert (await line.llm_config())["api_key_configured"] is True
        assert (await line.chat(b"a")).line.startswith(b"OK ")


# spec L13: an address may hold what its server asks for; it is sent, and never shown.
@pytest.mark.parametrize("more", ["", "/"])
async def test_an_address_may_hold_credentials(tmp_path: Path, more: str) -> None:
    async with serving() as provider:
        url = f"http://user:hunter22@127.0.0.1:{provider.port}/v1{more}?token=tok-1234"
        async with open_model_stage(tmp_path, base_url=url, api_key_file=None) as stage:
            line = stage.connect()
            reply = await line.chat(b"!say=tok-1234_hunter22")
            assert reply.text == "[redacted] [redacted]"
            shown = f"http://127.0.0.1:{provider.port}/v1{more}"
            assert (await line.llm_config())["base_url"] == shown
        (served,) = provider.served
        assert served.path == "/v1/chat/completions?token=tok-1234"
        assert served.headers["authorization"] == "Basic dXNlcjpodW50ZXIyMg=="


# spec L13: a value of an address is a secret, also as its server decodes it.
@pytest.mark.parametrize(
    ("query", "secret"),
    [
        ("a=tok%2D1234", "tok-1234"),
        ("a=tok%2D1234", "tok%2D1234"),
        ("a=tok+1234", "tok 1234"),
        ("tok-1234", "tok-1234"),
        ("api-version=2024-05-01&a=tok-1234", "tok-1234"),
        ("a=2024-05-01x", "2024-05-01x"),
    ],
)
async def test_a_secret_of_an_address_is_found_in_each_form(
    tmp_path: Path, query: str, secret: str
) -> None:
    url = f"http://127.0.0.1:1/v1?{query}"
    async with open_model_stage(tmp_path, base_url=url, api_key_file=None) as stage:
        text = stage.llm.models.redactor.text(f"it is {secret}, that is it")
        assert text == "it is [redacted], that is it"


# Settings that cannot be keys stay where an answer has them: a version, a date, true.
@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("api-version=2024-05-01-preview", "2024-05-01-preview"),
        ("api-version=preview", "a preview"),
        ("since=2024-05-01", "on 2024-05-01"),
        ("beta=true&a=1&b=&c=false", '{"a":true,"b":1,"c":false}'),
        ("true", "true"),
    ],
)
async def test_a_setting_in_an_address_is_no_secret(
    tmp_path: Path, query: str, text: str
) -> None:
    url = f"http://127.0.0.1:1/v1?{query}"
    async with open_model_stage(tmp_path, base_url=url, api_key_file=None) as stage:
        assert stage.llm.models.redactor.text(text) == text


# spec L13: nothing of the host's environment goes to a provider but the key that is its.
async def test_headers_of_the_environment_are_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "X-Team: canary-team\nauthorization: Bearer canary-other\nno header"
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", text)
    monkeypatch.setenv("OPENAI_ORG_ID", "canary-organization")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "canary-project")
    async with open_model_stage(tmp_path) as stage:
        assert (await stage.connect().chat(b"a")).line.startswith(b"OK ")
        headers = stage.provider.served[0].headers
        assert headers["authorization"] == f"Bearer {KEY}"
        assert not [name for name in headers if "stainless" in name]
        assert not [
            name for name in headers if "canary" in headers[name].replace(KEY, "")
        ]


# spec L13
async def test_the_configuration_has_the_contracts_keys_and_no_secret(
    tmp_path: Path,
) -> None:
    address = "https://user:hunter22@api.example/v1?token=s3cret-token"
    async with open_model_stage(
        tmp_path,
        base_url=address,
        default_model="m",
        quota={"max_tokens": 5000},
        max_calls=50,
    ) as stage:
        assert await stage.connect().llm_config() == {
            "default_model": "m",
            "api_key_configured": True,
            "base_url": "https://api.example/v1",
            "max_calls": 50,
            "quota_max_tokens": 5000,
            "quota_weights": {"input": 1.0, "cached": 0.25, "output": 4.0},
        }


# spec L13, L7, I10: a provider that gives the key away.
@pytest.mark.slow
@pytest.mark.parametrize("order", [b"!leak", b"!leak !plain", b"!leak-refused"])
async def test_the_key_is_blotted_out(stage: Stage, order: bytes) -> None:
    line = stage.connect()
    reply = await line.chat(order, outputs=b"out")
    assert b"[redacted]" in reply.line + reply.body
    texts = [reply.line, reply.body, (stage.where / "journal").read_bytes()]
    if (stage.root / "out").exists():
        texts.append((stage.root / "out").read_bytes())
    assert not any(KEY.encode() in text for text in texts)


# spec L13, attack 24: not even a top-level child may read where the key is. Files that show
# the host's memory are refused with a model and without: `tests/system/attacks/test_host_proc.py`.
async def test_files_that_hold_the_key_are_nobodys(stage: Stage) -> None:
    where = stage.where
    (where / "link").hardlink_to(where / "key")
    leave_out(str(where / "link"))
    line = stage.connect(stage.hall.policy(top_level=True))
    for name in (
        os.fsencode(where / "key"),
        os.fsencode(where / "link"),
    ):
        for mode in (b"r", b"r+", b"w"):
            reply = await line.ask(b"OPEN %b %b true\n" % (name, mode))
            assert reply.startswith(
                (b"ERROR VFS access denied", b"ERROR failed to open")
            )
        reply = (await line.chat(b"a", inputs=name, flag=b"true")).line
        assert reply == b"ERROR failed to read input files data"
    assert (where / "key").read_text() == KEY + "\n"
    assert (await line.ask(b"OPEN /proc/version r true\n")).startswith(b"OK ")
    assert stage.hall.ledger.open_files.used == 1


# spec L13, attack 24: an OPEN that is sent again and again is answered in fewer steps.
async def test_a_link_that_is_turned_to_the_key_shows_nothing(stage: Stage) -> None:
    where = stage.where
    link = where / "turned"
    link.symlink_to("/proc/version")
    ledger = Ledger(open_files=256)  # as a child's
    line = stage.connect(stage.hall.policy(top_level=True), ledger=ledger)
    request = b"OPEN %b r true\n" % os.fsencode(link)
    for _ in range(4):
        assert (await line.ask(request)).startswith(b"OK ")
    link.unlink()
    link.symlink_to(where / "key")
    for _ in range(2):
        assert (await line.ask(request)).startswith(b"ERROR VFS access denied")
    assert ledger.open_files.used == 4


# spec L14, S5: one waits for a provider, another reads.
@pytest.mark.slow
async def test_nobody_waits_for_anothers_model(stage: Stage) -> None:
    (stage.root / "f").write_bytes(b"x" * 4096)
    asking, reading = stage.connect(), stage.connect()
    times = []
    await asking.send(chat_request(b"!slow=0.01 !words=300"))  # three seconds
    await stage.provider.wait_for(1)
    while not stage.provider.served[0].done:
        began, kept = trio.current_time(), kept_waiting_s()
        fileno = await reading.open(b"f")
        assert len(await reading.read(fileno, 4096)) == 4096
        times.append(trio.current_time() - began - (kept_waiting_s() - kept))
        assert await reading.ask(b"CLOSE %d\n" % fileno) == b"OK"
        await trio.sleep(0.01)
    assert (await asking.chat_reply()).line.startswith(b"OK ")
    assert len(times) > 20
    assert sorted(times)[len(times) * 95 // 100] < NEIGHBOUR_S


# spec L15
@pytest.mark.parametrize(
    ("order", "said"),
    [
        (b"!broken", b"not JSON: "),
        (b"!nothing", b"nothing came"),
        (b"!empty", b"no choices"),
        (b"!huge=17", b"longer than 16777216 bytes"),
        (b"!usage=bad", b"usage: prompt_tokens is no number of tokens"),
        (b"!usage=bad !plain", b"usage: prompt_tokens is no number of tokens"),
        (b"!truncated !words=8", b"broken off: "),
        (b"!truncated !plain", b"broken off: "),
    ],
)
async def test_what_is_no_answer_is_told_and_charged(
    stage: Stage, order: bytes, said: bytes
) -> None:
    line = stage.connect()
    (stage.root / "out").write_text("old")
    reply = await line.chat(order, outputs=b"out")
    assert reply.line.startswith(FAILED + b"invalid response: " + said)
    # Charged as in L10: the estimate for the prompt at least, and what was received.
    assert stage.llm.models.accounts.root.tokens.used >= -(-len(order) // 4)
    assert stage.llm.models.accounts.root.calls.used == 1
    assert (stage.root / "out").read_text() == "old"
    assert (await line.chat(b"a")).line.startswith(b"OK ")


# spec L15, L11: a provider that fails in the middle of its stream.
async def test_an_error_within_the_stream_is_one_line(stage: Stage) -> None:
    line = stage.connect()
    reply = await line.chat(b"!error !words=8")
    assert reply.line == FAILED + b"it broke in two"
    assert stage.llm.models.accounts.root.tokens.used > 0  # half of it was written


# spec L14
async def test_what_comes_of_a_large_piece_is_taken_in_by_a_thread(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    receive = Answer.receive

    def noted(answer: Answer, data: bytes) -> None:
        threads.append(threading.current_thread())
        receive(answer, data)

    monkeypatch.setattr(Answer, "receive", noted)
    assert (await stage.connect().chat(b"!plain !words=100000")).line.startswith(b"OK ")
    first, *_, last = threads
    assert first is threading.main_thread() is not last


# spec L15, I9
@pytest.mark.slow
async def test_a_gigabyte_is_not_read(stage: Stage) -> None:
    line = stage.connect()
    with trio.fail_after(30):
        reply = await line.chat(b"!huge=1024")
    assert reply.line.startswith(FAILED + b"invalid response: longer than")
    # The host did not wait for the rest: it closed the connection.
    await eventually(lambda: not stage.provider.connections)
    assert not stage.provider.served[0].done
