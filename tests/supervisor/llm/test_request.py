"""Requests of LLM_CHAT, and their requests to the provider: spec L1 to L9."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from demo.provider import serving
from supervisor.llm.presets import BUILT_IN
from supervisor.llm.provider import DEFAULT_BASE_URL
from tests.helpers.canary import KEY
from tests.helpers.provider import key_file
from tests.helpers.sessions import chat_request
from tests.helpers.stage import Stage, open_model_stage
from vfs.backends.base import RemovedEntry
from vfs.clients import OpenFile
from vfs.ledger import MOST_MEMORY_BYTES, Ledger
from vfs.places import PUBLISH_ON_CLOSE
from vfs.policy import Policy

MAX_BYTES = 8 * 1024 * 1024
OPENAI_FAILED = b"ERROR OpenAI API call failed: "


# spec L1: exact counts, and the three separators that some clients do not count.
async def test_parts_are_split_by_their_counts(stage: Stage) -> None:
    line = stage.connect()
    assert (await line.chat("zwei Wörter".encode())).text == "The message has 2 words."
    # The contract's second example, byte for byte.
    await line.send(b"LLM_CHAT false 0 0 0 7\n\n\n\ngeneral")
    assert (await line.chat_reply()).completion["choices"]
    assert await line.ask(b"PING\n") == b"OK"
    sent = stage.provider.served[-1].body["messages"]
    assert sent == [{"role": "system", "content": BUILT_IN["general"]}]


# spec L1: however the bytes arrive, and with all four parts.
@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("gap", [b"", b"\n"])
async def test_a_request_in_pieces_is_the_same(
    stage: Stage, size: int, gap: bytes
) -> None:
    (stage.root / "in").write_text("text")
    line = stage.connect()
    parts = (b"in\n-", b"out", b"p\n\nq", b"data_proc")
    data = b"LLM_CHAT false %d %d %d %d\n" % tuple(map(len, parts))
    data += gap.join(parts)
    for start in range(0, len(data), size):
        await line.send(data[start : start + size])
    reply = await line.chat_reply()
    system, user = stage.provider.served[-1].body["messages"]
    assert system["content"] == BUILT_IN["data_proc"]
    assert user["content"] == "p\n\nq\n\nFile in:\ntext"
    assert (stage.root / "out").read_text() == reply.text
    assert await line.ask(b"PING\n") == b"OK"


# spec L1: a payload that is spooled to a file is the same.
async def test_a_long_request_is_taken(stage: Stage) -> None:
    line = stage.connect()
    stage.hall.budget.payload_memory.limit = 0
    words = 300_000
    reply = await line.chat(b"word " * words)
    assert stage.hall.budget.spooled
    assert reply.text == f"The message has {words} words."


# spec L1, L2: the end of the stream names the part that is missing.
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"LLM_CHAT false 3 3 3 3\nab", b"input files"),
        (b"LLM_CHAT false 3 3 3 3\nabcd", b"output files"),
        (b"LLM_CHAT false 3 3 3 3\nabcabcab", b"prompt"),
        (b"LLM_CHAT false 3 3 3 3\nabcabcabcab", b"preset"),
        (b"LLM_CHAT false 0 0 0 7\n\n\n\ngene", b"preset"),
    ],
)
async def test_a_part_that_is_cut_off_is_named(
    stage: Stage, sent: bytes, said: bytes
) -> None:
    line = stage.connect()
    await line.send(sent)
    line.shut_down()
    assert await line.rest() == b"ERROR failed to read %b data\n" % said
    assert not stage.provider.served


# spec L2: errors of the header, then encoding, preset, inputs, outputs, quota.
async def test_errors_come_in_the_order_of_the_contract(tmp_path: Path) -> None:
    async with open_model_stage(tmp_path, quota={"max_tokens": 0.001}) as stage:
        line = stage.connect()
        requires = (
            b"ERROR LLM_CHAT requires is_top_level, input_files_count,"
            b" output_files_count, prompt_length, and preset_length"
        )
        too_much = b"ERROR invalid prompt_length: 8388609 exceeds limit 8388608"
        for sent, said in (
            (b"LLM_CHAT false 0 0 0\n", requires),
            (b"LLM_CHAT false 0 0 1 0 0\nx", requires),
            (b"LLM_CHAT maybe 0 0 2 0\nxy", b"ERROR invalid is_top_level: maybe"),
            (b"LLM_CHAT false -1 0 0 0\n", b"ERROR invalid input_files_count: -1"),
            (b"LLM_CHAT false 0 0x1 0 0\n", b"ERROR invalid output_files_count: 0x1"),
            (b"LLM_CHAT false 0 0 1_0 0\n", b"ERROR invalid prompt_length: 1_0"),
            (b"LLM_CHAT false 0 0 0 +1\n", b"ERROR invalid preset_length: +1"),
            (b"LLM_CHAT false 0 0 8388609 0\n" + b"x" * 8_388_609, too_much),
            (
                chat_request(b"\xff", b"no", b"no", b"/no"),
                b"ERROR invalid prompt encoding",
            ),
            (chat_request(b"a", b"no", b"no", b"/no"), b"ERROR invalid preset: no"),
            (
                chat_request(b"a", b"", b"no", b"/no"),
                b"ERROR failed to read input files data",
            ),
            (
                chat_request(b"a", b"", b"", b"/no/x"),
                b"ERROR VFS access denied: '/no/x'",
            ),
            (
                chat_request(b"a", b"", b"", b"no/x"),
                b"ERROR failed to open file 'no/x': No such file or directory",
            ),
        ):
            assert await line.ask(sent) == said
        # Only now the quota: less than a token's worth is left, and it goes alone.
        assert (await line.chat(b"a")).line.startswith(b"OK ")
        assert await line.ask(chat_request(b"a")) == (
            b"ERROR quota exceeded: cannot make LLM call"
        )
        assert len(stage.provider.served) == 1


# spec L3, S5: it may have been removed meanwhile, and what is given back takes long.
async def test_an_input_is_closed_in_a_thread(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage.root / "a").write_text("x")
    closers: list[int] = []
    close = OpenFile.close

    def noted(file: OpenFile) -> RemovedEntry | None:
        closers.append(threading.get_ident())
        return close(file)

    monkeypatch.setattr(OpenFile, "close", noted)
    assert (await stage.connect().chat(b"sum", inputs=b"a")).text
    assert len(closers) == 1
    assert threading.get_ident() not in closers


# spec L3
async def test_input_files_go_into_the_user_message(stage: Stage) -> None:
    root = stage.root
    for name, text in (("a", "A"), ("--", "dashes"), ("#x", "hash"), ("b c", "B\n")):
        (root / name).write_text(text)
    line = stage.connect()
    await line.chat(b"sum", inputs=b"a\n\n-\n--\n#x\nb c\n")
    (user,) = stage.provider.served[-1].body["messages"]
    assert user == {
        "role": "user",
        "content": "sum\n\nFile a:\nA\n\nFile --:\ndashes\n\nFile #x:\nhash\n\n"
        "File b c:\nB\n",
    }


# spec L3, attack 24: under the child's own rights, and any failure is the whole failure.
@pytest.mark.parametrize(
    "name",
    [
        b"/etc/passwd",
        b"../key",
        b"missing",
        b"sub",
        b"latin",
        b"long",
        b"a\0b",
        b"link",
    ],
)
async def test_an_input_that_cannot_be_had_stops_the_call(
    stage: Stage, name: bytes
) -> None:
    root = stage.root
    (root / "sub").mkdir()
    (root / "good").write_text("good")
    (root / "latin").write_bytes("é".encode("latin-1"))
    (root / "long").write_bytes(b"x" * (8 * 1024 * 1024 + 1))
    (root / "link").symlink_to("/etc/passwd")
    line = stage.connect()
    for flag in (b"false", b"true"):
        reply = await line.chat(b"tell me", inputs=b"good\n" + name, flag=flag)
        assert reply.line == b"ERROR failed to read input files data"
    assert not stage.provider.served
    assert await line.quota() == "OK 0.0 weighted tokens (no limit)"
    assert not stage.hall.fs.tables.files


# spec L3: the limit is for all files together.
async def test_files_that_are_too_long_together_stop_the_call(stage: Stage) -> None:
    for name in ("a", "b"):
        (stage.root / name).write_bytes(b"x" * (4 * 1024 * 1024 + 1))
    line = stage.connect()
    reply = await line.chat(b"p", inputs=b"a\nb")
    assert reply.line == b"ERROR failed to read input files data"
    assert not stage.provider.served


# spec L3: bytes are counted, and a character is not cut.
@pytest.mark.slow
async def test_a_file_of_exactly_the_limit_is_taken(stage: Stage) -> None:
    (stage.root / "most").write_bytes("é".encode() * (4 * 1024 * 1024))
    line = stage.connect()
    reply = await line.chat(b"a", inputs=b"most")
    assert reply.line.startswith(b"OK ")
    # A prompt that ends within a character is no text.
    reply = await line.chat("é".encode()[:1])
    assert reply.line == b"ERROR invalid prompt encoding"


# spec L4
async def test_output_files_get_the_answer(stage: Stage) -> None:
    root = stage.root
    (root / "old").write_text("x" * 1000)
    line = stage.connect()
    reply = await line.chat(b"a b", outputs=b"old\nnew\n-\n")
    assert (root / "old").read_text() == (root / "new").read_text() == reply.text
    assert not stage.hall.fs.tables.files


# spec L4: a call that fails leaves them as they were.
async def test_a_failed_call_leaves_the_outputs_alone(stage: Stage) -> None:
    root = stage.root
    (root / "old").write_text("old")
    (root / "sub").mkdir()
    line = stage.connect()
    reply = await line.chat(b"!status=400", outputs=b"old\nnew")
    assert reply.line.startswith(OPENAI_FAILED)
    reply = await line.chat(b"hi", outputs=b"new\nsub")
    assert reply.line == b"ERROR failed to open file 'sub': Is a directory"
    assert (root / "old").read_text() == "old"
    assert not (root / "new").exists()
    assert len(stage.provider.served) == 1


# spec L4: only what the check made is taken away again; another's content is not.
@pytest.mark.slow
@pytest.mark.parametrize("other", ["write", "replace"])
async def test_a_file_that_another_filled_meanwhile_stays(
    stage: Stage, other: str
) -> None:
    root = stage.root
    line = stage.connect()
    await line.send(chat_request(b"!wait=0.2 !status=400", outputs=b"new\nmine"))
    await stage.provider.wait_for(1)
    assert (root / "new").exists()
    if other == "replace":
        (root / "theirs").write_bytes(b"")
        (root / "theirs").rename(root / "new")
    else:
        (root / "new").write_text("theirs")
    assert (await line.chat_reply()).line.startswith(OPENAI_FAILED)
    assert (root / "new").read_text() == ("theirs" if other == "write" else "")
    assert not (root / "mine").exists()


# spec L4: what goes wrong after the call is told, and the call is paid.
async def test_a_write_that_fails_is_told_and_charged(
    stage: Stage, tmp_path: Path
) -> None:
    del tmp_path
    full = stage.hall.place(Path("/dev"), write=True)
    line = stage.connect(stage.hall.policy(full))
    # No regular file: refused before the call.
    reply = await line.chat(b"a", outputs=b"/dev/full")
    assert reply.line.startswith(b"ERROR failed to open file '/dev/full': ")
    assert not stage.provider.served
    stage.hall.ledger.size_bytes.limit = 10
    stage.hall.ledger.bounds_size = True
    line = stage.connect()
    reply = await line.chat(b"a", outputs=b"out")
    assert reply.line == b"ERROR failed to write: Disk quota exceeded"
    assert (await line.quota()).startswith("OK 21.0 ")
    stage.hall.ledger.size_bytes.limit = None


# spec L4, A3b: what is published on close appears whole, or not at all.
async def test_outputs_are_published_as_the_root_says(stage: Stage) -> None:
    (stage.root / "old").write_text("old")
    inode = (stage.root / "old").stat().st_ino
    line = stage.connect(stage.hall.policy(publish=PUBLISH_ON_CLOSE))
    reply = await line.chat(b"a", outputs=b"old\nnew")
    assert (stage.root / "old").read_text() == reply.text
    assert (stage.root / "new").read_text() == reply.text
    assert (stage.root / "old").stat().st_ino != inode
    assert sorted(p.name for p in stage.root.iterdir()) == ["new", "old"]


# spec L5
async def test_preset_and_prompt_make_the_messages(tmp_path: Path) -> None:
    presets = {"pirate": {"system": "Arr."}, "general": {"system": "Mine."}}
    async with open_model_stage(tmp_path, presets=presets) as stage:
        line = stage.connect()
        for prompt, preset, expected in (
            (b"p", b"", [("user", "p")]),
            (b"", b"pirate", [("system", "Arr.")]),
            (b"p", b"pirate", [("system", "Arr."), ("user", "p")]),
            (b"", b"", [("system", "Mine.")]),
            (
                b"p",
                b"code_review",
                [("system", BUILT_IN["code_review"]), ("user", "p")],
            ),
            (b"p", b"diff_patch", [("system", BUILT_IN["diff_patch"]), ("user", "p")]),
        ):
            await line.chat(prompt, preset)
            sent = stage.provider.served[-1].body["messages"]
            assert [(m["role"], m["content"]) for m in sent] == expected
        assert set(BUILT_IN) == {"general", "data_proc", "code_review", "diff_patch"}


# spec L5, F6: a preset that is not there, whatever it is called.
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"nope", b"nope"),
        (b"a\nb", b"a?b"),
        (b"\xff\x1b", b"\xff?"),
        (b"general ", b"general "),
    ],
)
async def test_an_unknown_preset_is_named(
    stage: Stage, name: bytes, shown: bytes
) -> None:
    line = stage.connect()
    assert (await line.chat(b"p", name)).line == b"ERROR invalid preset: " + shown
    assert not stage.provider.served


# spec L6, attack 1: the claim alone gives no model.
async def test_the_model_follows_the_right_and_the_claim(tmp_path: Path) -> None:
    models: dict[str, Any] = {"default_model": "big", "restricted_model": "small"}
    async with open_model_stage(
        tmp_path, **models, temperature=0.5, max_tokens=99
    ) as stage:
        top = stage.connect(stage.hall.policy(top_level=True))
        low = stage.connect()
        for line, flag, model in (
            (top, b"true", "big"),
            (top, b"false", "small"),
            (low, b"true", "small"),
            (low, b"false", "small"),
        ):
            reply = await line.chat(b"a", flag=flag)
            body = stage.provider.served[-1].body
            assert (body["model"], reply.completion["model"]) == (model, model)
            assert (body["temperature"], body["max_tokens"]) == (0.5, 99)
            assert set(body) == {
                "model", "messages", "stream", "stream_options", "temperature",
                "max_tokens",
            }  # fmt: skip
        assert stage.hall.denials == [(low.client.id, "LLM_CHAT", b"true")]


# spec L6, A1: a policy's model is that of the child's own right; who drops that gets what
# every restricted client gets.
async def test_a_policys_model_is_that_of_the_right(tmp_path: Path) -> None:
    models: dict[str, Any] = {"default_model": "big", "restricted_model": "small"}
    async with open_model_stage(tmp_path, **models) as stage:
        for top_level, flag, model in (
            (True, b"true", "own"),
            (True, b"false", "small"),
            (False, b"false", "own"),
            (False, b"true", "own"),
        ):
            policy = stage.hall.policy(top_level=top_level)
            policy.model = "own"
            line = stage.connect(policy)
            reply = await line.chat(b"a", flag=flag)
            assert reply.completion["model"] == model


async def test_the_restricted_model_has_a_default(stage: Stage) -> None:
    # spec L6
    await stage.connect().chat(b"a")
    assert stage.provider.served[-1].body["model"] == "gpt-4o-mini"


# spec L6: more models and providers by name, a policy may name one of them.
async def test_a_model_of_the_configuration_is_usable_by_its_name(
    tmp_path: Path,
) -> None:
    async with open_model_stage(
        tmp_path,
        restricted_model="mine",
        models={"mine": {"model": "vendor/m-1", "weights": {"output": 10.0}}},
    ) as stage:
        line = stage.connect()
        reply = await line.chat(b"!words=3")
        assert stage.provider.served[-1].body["model"] == "vendor/m-1"
        assert reply.status == "32.0 weighted tokens (no limit)"
        assert stage.events("llm.called")[0]["model"] == "mine"


def with_model(stage: Stage, model: str) -> Policy:
    """Return a restricted policy that names a model."""
    policy = stage.hall.policy()
    policy.model = model
    return policy


# spec L6, L10: models that know the bound by another name, on the wire and at the
# endpoint; a model's own word goes before that of the section, which is not another
# server's.
@pytest.mark.slow
async def test_the_bound_is_sent_under_the_name_that_a_model_knows(
    tmp_path: Path,
) -> None:
    newer = "max_completion_tokens"
    async with (
        serving(KEY) as other,
        open_model_stage(
            tmp_path,
            max_tokens=7,
            max_tokens_as=newer,
            models={
                "old": {"max_tokens_as": "max_tokens"},
                "far": {"base_url": other.url, "api_key_file": key_file(tmp_path)},
                "far-new": {
                    "base_url": other.url,
                    "api_key_file": key_file(tmp_path),
                    "max_tokens_as": newer,
                },
            },
        ) as stage,
    ):
        for model, where, name in (
            ("gpt-x", stage.provider, newer),
            ("old", stage.provider, "max_tokens"),
            ("far", other, "max_tokens"),
            ("far-new", other, newer),
        ):
            line = stage.connect(with_model(stage, model))
            order = b"!newer !words=9" if name == newer else b"!words=9"
            reply = await line.chat(order)
            assert reply.completion["usage"]["completion_tokens"] == 7
            found = where.served[-1].body
            assert {key: found[key] for key in found if "tokens" in key} == {name: 7}
        line = stage.connect(with_model(stage, "old"))
        assert (await line.chat(b"!newer")).line == (
            OPENAI_FAILED + b"400 Unsupported parameter: 'max_tokens'"
        )


# spec L13: a key goes to the address that it was given for, and to no other.
@pytest.mark.slow
async def test_another_server_does_not_get_the_key(tmp_path: Path) -> None:
    async with (
        serving() as other,
        open_model_stage(tmp_path, models={"far": {"base_url": other.url}}) as stage,
    ):
        line = stage.connect(with_model(stage, "far"))
        assert (await line.chat(b"!leak")).text == ""
        assert "authorization" not in other.served[0].headers
        assert not stage.provider.served


# The address alone tells nothing else.
@pytest.mark.parametrize(
    ("address", "name"),
    [
        (DEFAULT_BASE_URL, "max_completion_tokens"),
        ("https://api.openai.com.example/v1", "max_tokens"),
        ("http://127.0.0.1:11434/v1", "max_tokens"),
    ],
)
async def test_openai_itself_is_asked_by_the_newer_name(
    tmp_path: Path, address: str, name: str
) -> None:
    async with open_model_stage(tmp_path, base_url=address) as stage:
        assert stage.llm.models.model("any").bound_name == name


# spec L7: the length is true, and nothing follows.
async def test_the_reply_is_a_completion_of_the_length_it_tells(stage: Stage) -> None:
    line = stage.connect()
    for order in (b"!say=gr\xc3\xbc\xc3\x9fe", b"!plain !say=gr\xc3\xbc\xc3\x9fe"):
        await line.send(chat_request(order))
        reply = await line.chat_reply()
        assert reply.text == "grüße"
        assert reply.completion["object"] == "chat.completion"
        (choice,) = reply.completion["choices"]
        assert choice["message"]["role"] == "assistant"
        assert (choice["index"], choice["finish_reason"]) == (0, "stop")
        assert reply.completion["usage"]["completion_tokens"] == 1
        assert await line.ask(b"PING\n") == b"OK"


# spec L7: what is put together from a stream is what would have come whole.
async def test_a_streamed_answer_equals_a_plain_one(stage: Stage) -> None:
    line = stage.connect()
    streamed = (await line.chat(b"!words=20 !cached=1")).completion
    plain = (await line.chat(b"!words=20 !cached=1 !plain")).completion
    for completion in (streamed, plain):
        completion["choices"][0].pop("logprobs", None)
        del completion["usage"]["prompt_tokens"], completion["usage"]["total_tokens"]
    assert streamed == plain


# spec L8
async def test_weighted_tokens(tmp_path: Path) -> None:
    async with open_model_stage(
        tmp_path,
        default_model="dear",
        quota={
            "weights": {"input": 2.0, "cached": 0.5, "output": 3.0},
            "models": {"dear": {"input": 1.0, "cached": 0.0, "output": 100.0}},
        },
    ) as stage:
        line = stage.connect(stage.hall.policy(top_level=True))
        reply = await line.chat(b"!prompt-tokens=10 !cached=4 !words=2")
        assert reply.status == "20.0 weighted tokens (no limit)"  # 6*2 + 4*.5 + 2*3
        for order in (b"", b" !cached=null", b" !cached=99"):
            await line.chat(b"!prompt-tokens=10 !words=0" + order)
        # 20 + 20 + 20 + 10 * 0.5: more than all of it cannot be cached.
        assert await line.quota() == "OK 65.0 weighted tokens (no limit)"
        reply = await line.chat(b"!prompt-tokens=10 !words=1", flag=b"true")
        assert reply.status == "175.0 weighted tokens (no limit)"


async def test_the_usual_weights(stage: Stage) -> None:
    # spec L8
    line = stage.connect()
    reply = await line.chat(b"!prompt-tokens=10 !cached=4 !words=2")
    assert reply.status == "15.0 weighted tokens (no limit)"


# spec L9, L7
async def test_the_quota_is_told_in_the_words_of_the_contract(tmp_path: Path) -> None:
    async with open_model_stage(tmp_path, quota={"max_tokens": 5000}) as stage:
        line = stage.connect()
        stage.llm.models.accounts.root.tokens.used = 1229.5
        reply = await line.chat(b"!prompt-tokens=1 !words=5")
        assert reply.status == "1250.5/5000 weighted tokens"
        assert await line.quota() == (
            "OK 1250.5/5000 weighted tokens (25.0% used, 3749.5 remaining)"
        )
        stage.llm.models.accounts.root.tokens.used = 6000
        assert await line.quota() == (
            "OK 6000.0/5000 weighted tokens (120.0% used, 0.0 remaining)"
        )


# spec L9, A5: a node of its own, or the nearest ancestor's; descendants included.
async def test_a_nested_client_has_a_share_of_its_parents_quota(
    tmp_path: Path,
) -> None:
    async with open_model_stage(tmp_path, quota={"max_tokens": 1000}) as stage:
        parent = stage.connect()
        nested = stage.nested(parent)
        assert await nested.narrow(quota=100) == b"OK"
        inner = stage.nested(nested)
        await inner.chat(b"!prompt-tokens=20 !words=0")
        for line in (inner, nested):
            assert await line.quota() == (
                "OK 20.0/100 weighted tokens (20.0% used, 80.0 remaining)"
            )
        assert (await parent.quota()).startswith("OK 20.0/1000 ")
        # It only shrinks.
        assert await nested.narrow(quota=500) == b"OK"
        assert (await nested.quota()).startswith("OK 20.0/100 ")
        assert await nested.narrow(quota=10) == b"OK"
        assert await nested.ask(chat_request(b"a")) == (
            b"ERROR quota exceeded: cannot make LLM call"
        )
        assert (await parent.chat(b"a")).line.startswith(b"OK ")


# spec A5, L6: a nested client's model is one that its parent may ask, and no other.
async def test_a_nested_clients_model_only_shrinks(tmp_path: Path) -> None:
    models: dict[str, Any] = {"default_model": "big", "restricted_model": "small"}
    async with open_model_stage(tmp_path, **models) as stage:
        parent = stage.connect(stage.hall.policy(top_level=True))
        nested, other = stage.nested(parent), stage.nested(parent)
        assert await nested.narrow(model="big") == b"OK"
        assert await other.narrow(read=[]) == b"OK"
        for line, model in ((nested, "big"), (other, "small")):
            reply = await line.chat(b"a", flag=b"true")
            assert reply.completion["model"] == model
        refusal = b"ERROR invalid rights: not within this client's rights: model '%b'"
        assert await other.narrow(model="big") == refusal % b"big"
        assert await nested.narrow(model="huge") == refusal % b"huge"
        inner = stage.nested(nested)
        assert await inner.narrow(model="small") == refusal % b"small"
        assert await inner.narrow(model="big") == b"OK"
        for quota in (-1, 1e400):
            text = json.dumps({"quota": quota}).replace("Infinity", "1e400").encode()
            said = await inner.ask(b"NARROW %d\n%b" % (len(text), text))
            assert said.startswith(b"ERROR invalid rights: ")


# A host whose user has all the threads it may have: the call fails, the client stays.
async def test_a_long_request_without_a_thread_is_a_failed_call(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    line = stage.connect()
    asked = len(stage.provider.served)
    with monkeypatch.context() as patched:
        patched.setattr(trio.to_thread, "run_sync", none)
        reply = await line.chat(b"w " * 200_000)
    assert reply.line == OPENAI_FAILED + b"Resource temporarily unavailable"
    assert len(stage.provider.served) == asked
    assert (await line.chat(b"a")).line.startswith(b"OK ")


# attack 42, spec W4: what there is no memory for is taken off the stream and refused, for
# every connection of its child and for no other child.
async def test_a_request_without_memory_is_refused_and_the_stream_goes_on(
    stage: Stage,
) -> None:
    line, sibling = stage.connect(), stage.connect()
    other = stage.connect(ledger=Ledger())
    ledger = line.client.ledger
    refused = b"ERROR failed to read data: Cannot allocate memory"
    with stage.hall.budget.reservation(ledger, MOST_MEMORY_BYTES):
        await line.send(chat_request(b"a" * 1_000_000) + b"PING\n")
        assert await line.line() == refused
        assert await line.line() == b"OK"
        # Separated, as the tolerance of spec L1 has it.
        await sibling.send(b"LLM_CHAT false 0 0 0 7\n\n\n\ngeneralPING\n")
        assert await sibling.line() == refused
        assert await sibling.line() == b"OK"
        assert (await sibling.ask(b"LIST false .\n")).startswith(b"OK ")
        assert (await other.chat(b"a")).line.startswith(b"OK ")
    assert not stage.provider.served[1:]
    assert (await line.chat(b"a" * 1_000_000)).line.startswith(b"OK ")


# attack 42, spec L2: the longest text takes all that a child has for requests.
@pytest.mark.slow
async def test_the_longest_prompt_is_answered(stage: Stage) -> None:
    line = stage.connect()
    for words in (1, 5000):
        order, emoji = b"!words=%d " % words, "\N{GRINNING FACE}".encode()
        prompt = order.ljust(MAX_BYTES - len(emoji), b"a") + emoji
        assert (await line.chat(prompt)).text.endswith(f"word{words - 1} "), words
    assert stage.hall.budget.request_memory.used == 0


# attack 42, spec S3
async def test_who_goes_in_the_middle_gives_its_memory_back(stage: Stage) -> None:
    line = stage.connect()
    budget, ledger = stage.hall.budget, line.client.ledger
    await line.send(chat_request(b"a" * 1_000_000)[:500_000])
    while not ledger.memory.used:
        await trio.lowlevel.checkpoint()
    assert ledger.memory.used == budget.request_memory.used == 6_000_000
    line.close()
    await line.gone()
    assert ledger.memory.used == budget.request_memory.used == 0
