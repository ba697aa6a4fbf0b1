"""Presets with tools and kept conversations, over real HTTP (spec L5)."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.config.document import Config
from supervisor.config.fds import FileDescriptorSection, ToolsSection
from supervisor.llm import conversations
from supervisor.llmfd.toolloop import MOST_ROUNDS
from tests.helpers.sessions import chat_request
from tests.helpers.stage import Stage, eventually, open_model_stage

FAILED = b"ERROR OpenAI API call failed: "
EXCEEDED = b"ERROR quota exceeded: cannot make LLM call"
LOG = "".join(f"line {n}\n" for n in range(3000))

PRESETS = {
    "agent": {"system": "You have tools.", "tools": True},
    "expert": {"system": "You know all."},
}


def configured(*tools: str, **section: Any) -> Config:
    """Return a configuration with LLM fds."""
    listed = tools or ("read_fd", "fd_to_file", "fork", "spawn", "summarize_fd")
    return Config(
        tools=ToolsSection(enabled=list(listed)),
        file_descriptor=FileDescriptorSection(**section),
    )


def script(*answers: object) -> bytes:
    """Return a prompt that tells the stand-in what to answer, round by round."""
    text = json.dumps(answers, separators=(",", ":")).replace(" ", "\\u0020")
    return b"!script=" + text.encode()


def messages(stage: Stage, number: int = -1) -> list[dict[str, Any]]:
    """Return what one request to the provider said."""
    found: list[dict[str, Any]] = stage.provider.served[number].body["messages"]
    return found


def said(stage: Stage, number: int = -1) -> list[tuple[str, str]]:
    """Return the roles and words of one request."""
    return [(one["role"], one["content"]) for one in messages(stage, number)]


@pytest.fixture
async def agents(tmp_path: Path, no_leaks: None) -> AsyncIterator[Stage]:
    """A host with tools, and a model for each view."""
    del no_leaks
    models = {"default_model": "big", "restricted_model": "small"}
    async with open_model_stage(
        tmp_path, fds=configured(), presets=PRESETS, max_tokens=50, **models
    ) as stage:
        yield stage


# spec L5, L7, L4: tools until there is an answer; that one is the reply.
async def test_a_preset_with_tools_runs_them_and_replies_with_the_last(
    agents: Stage,
) -> None:
    line = agents.connect()
    (agents.root / "log").write_text(LOG)
    write = ["fd_to_file", {"fd": "fd:1", "file_path": "copy"}]
    read = ["read_fd", {"fd": "fd:1", "page": 2}]
    prompt = script([write, read], "all_is_written")
    reply = await line.chat(prompt, b"agent", b"log", b"answer")
    assert reply.text == "all is written"
    assert (agents.root / "answer").read_text() == "all is written"
    assert (agents.root / "copy").read_text() == LOG
    first, second = (messages(agents, number) for number in (0, 1))
    assert first[0]["content"].startswith("You have tools.\n\n<file_descriptor_instr")
    # The prompt is read as it is; the file that came with it is a descriptor.
    assert first[1]["content"].startswith("!script=")
    assert 'File log:\n<fd_result fd="fd:1"' in first[1]["content"]
    results = [one["content"] for one in second if one["role"] == "tool"]
    assert results[0].startswith('<fd_write fd="fd:1" file_path="copy" success="true"')
    assert results[1].startswith('<fd_content fd="fd:1" page="2"')
    offered = agents.provider.served[0].body["tools"]
    names = {tool["function"]["name"] for tool in offered}
    assert {"read_fd", "fd_to_file", "fork"} <= names
    assert "search_fd" not in names  # it is not listed
    # Both calls are paid by who asked.
    assert (line.client.id, 2) in [
        (row["client_id"], row["calls"]) for row in agents.llm.quota_rows()
    ]


# spec L5: a long prompt is paged; where it is not wanted, it is not.
@pytest.mark.parametrize("pages", [True, False])
async def test_a_long_prompt_is_paged(tmp_path: Path, pages: bool) -> None:
    async with open_model_stage(
        tmp_path, fds=configured(page_user_input=pages), presets=PRESETS
    ) as stage:
        await stage.connect().chat(LOG.encode(), b"agent")
        content = messages(stage)[1]["content"]
        assert content.startswith('<fd_result fd="fd:1"' if pages else "line 0\n")
        # A model without tools could not read a descriptor.
        await stage.connect().chat(LOG.encode(), b"expert")
        assert said(stage)[1] == ("user", LOG)


# spec A1, L6: the loop asks and writes in the effective view.
async def test_the_loop_drops_what_its_caller_drops(agents: Stage) -> None:
    hall = agents.hall
    outside = hall.where / "outside"
    line = agents.connect(hall.policy(top_level=True))
    write = ["fd_to_file", {"fd": "fd:1", "file_path": str(outside)}]
    for flag, model in ((b"false", "small"), (b"true", "big")):
        (hall.root / "log").write_text(LOG)
        name = str(hall.root / "log") if flag == b"true" else "log"
        reply = await line.chat(
            script([write], "done"), b"agent", name.encode(), flag=flag
        )
        assert reply.text == "done"
        assert agents.provider.served[-1].body["model"] == model
        result = messages(agents)[-1]["content"]
        assert ('success="true"' in result) is outside.exists() is (flag == b"true")


# spec L10: every round is paid, and the quota ends the loop.
async def test_the_quota_ends_a_loop(tmp_path: Path) -> None:
    forever = script(*[[["list_fds", {}]]] * 9)
    async with open_model_stage(
        tmp_path, fds=configured(), presets=PRESETS, max_calls=3
    ) as stage:
        line = stage.connect()
        assert (await line.chat(forever, b"agent@a")).line == EXCEEDED
        assert len(stage.provider.served) == 3


# spec L5, L11: a loop without an end is ended, and its conversation is as before.
@pytest.mark.slow
async def test_rounds_are_bounded_and_a_failure_is_not_said_twice(
    agents: Stage,
) -> None:
    line = agents.connect()
    assert (await line.chat(b"!say=hello", b"agent@a")).text == "hello"
    forever = script(*[[["list_fds", {}]]] * (MOST_ROUNDS + 1))
    reply = await line.chat(forever, b"agent@a")
    rounds = b"no answer after %d rounds of tool calls" % MOST_ROUNDS
    assert reply.line == FAILED + rounds
    assert (await line.chat(b"!status=400", b"agent@a")).line.startswith(
        FAILED + b"400"
    )
    assert (await line.chat(b"!say=again", b"agent@a")).text == "again"
    assert said(agents)[1:] == [
        *(("user", "!say=hello"), ("assistant", "hello")),
        ("user", "!say=again"),
    ]


# spec L10: who is gone is asked for no more, in the middle of a loop too.
async def test_a_loop_ends_with_its_client(agents: Stage) -> None:
    line = agents.connect()
    prompts = ["!hang", "!hang"]
    await line.send(chat_request(script([["fork", {"prompts": prompts}]]), b"agent"))
    await agents.provider.wait_for(3)
    line.close()
    await line.gone()
    await eventually(lambda: not agents.llm.models.accounts.root.calls.reservations)
    assert len(agents.provider.served) == 3


# spec L5: children of a fork run at once, each under the caller's quota.
@pytest.mark.slow
async def test_children_of_a_loop_run_side_by_side(agents: Stage) -> None:
    line = agents.connect()
    prompts = ["!wait=0.5 !say=one", "!status=400", "!wait=0.5"]
    spawn = ["spawn", {"program": "expert", "query": "!say=spawned"}]
    summary = ["summarize_fd", {"fd": "fd:1"}]
    (agents.root / "log").write_text("!say=short\n" + LOG)
    fork = ["fork", {"prompts": prompts}]
    reply = await line.chat(script([fork, spawn, summary], "done"), b"agent", b"log")
    assert reply.text == "done"
    forked, spawned, summed = [
        one["content"] for one in messages(agents) if one["role"] == "tool"
    ]
    assert [row.split('"')[3] for row in forked.split("<child ")[1:]] == [
        *("true", "false", "true")
    ]
    assert "400 as it was told" in forked
    assert "spawned" in spawned
    assert '<fd_summary fd="fd:1" available="true">\nshort' in summed
    assert agents.provider.most_at_once >= 2
    assert agents.llm.models.accounts.node_of(line.client).calls.used == 6


async def test_a_result_comes_with_a_summary(tmp_path: Path) -> None:
    fds = configured(auto_summarize=True)
    async with open_model_stage(tmp_path, fds=fds, presets=PRESETS) as stage:
        line = stage.connect()
        text = "!say=short\n" + LOG
        await line.chat(text.encode(), b"agent")
        assert "<summary>short</summary>" in messages(stage)[1]["content"]


# Kept conversations, with LLM fds and without.


@pytest.fixture(params=[True, False], ids=["fds", "plain"])
async def keeping(
    request: pytest.FixtureRequest, tmp_path: Path, no_leaks: None
) -> AsyncIterator[Stage]:
    """A host that keeps conversations."""
    del no_leaks
    presets = PRESETS if request.param else {"expert": PRESETS["expert"]}
    fds = configured() if request.param else None
    async with open_model_stage(tmp_path, fds=fds, presets=presets) as stage:
        yield stage


# spec L5
async def test_a_conversation_goes_on(keeping: Stage) -> None:
    line, other = keeping.connect(), keeping.connect()
    await line.chat(b"!say=one", b"expert@a")
    await line.chat(b"!say=two", b"expert@a")
    know = ("system", "You know all.")
    begun = [know, ("user", "!say=one"), ("assistant", "one"), ("user", "!say=two")]
    assert said(keeping) == begun
    for stranger in (other, keeping.nested(line)):
        await stranger.chat(b"!say=mine", b"expert@a")  # A5: not what another said
        assert said(keeping) == [know, ("user", "!say=mine")]
    await line.chat(b"!say=new", b"expert@b")
    assert said(keeping) == [know, ("user", "!say=new")]
    assert (await line.chat(b"!status=400", b"expert@a")).line.startswith(FAILED)
    # Another preset speaks from now on, in the same conversation.
    await line.chat(b"!say=three", b"general@a")
    assert said(keeping)[1:] == [
        *begun[1:],
        ("assistant", "two"),
        ("user", "!say=three"),
    ]
    assert said(keeping)[0] != know


# spec L5, L2
@pytest.mark.parametrize(
    "preset", [b"expert@", b"@a", b"no@a", b"expert@" + b"n" * 101]
)
async def test_a_name_that_is_none_is_refused(keeping: Stage, preset: bytes) -> None:
    reply = await keeping.connect().chat(b"a", preset)
    assert reply.line == b"ERROR invalid preset: " + preset
    assert not keeping.provider.served


# spec L5, S7, I9
async def test_what_is_kept_is_bounded_for_a_child_and_all_beneath(
    keeping: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MOST_KEPT", 2)
    monkeypatch.setattr(conversations, "MOST_KEPT_CHARS", 3000)
    line, other = keeping.connect(), keeping.connect()
    nested = keeping.nested(line)
    await line.chat(b"a", b"expert@a")
    await nested.chat(b"a", b"expert@b")
    full = b"ERROR invalid preset: expert@c: 2 conversations are kept already; use one"
    for one in (line, nested):
        assert (await one.chat(b"a", b"expert@c")).line == full
    assert (await other.chat(b"a", b"expert@c")).line.startswith(b"OK ")
    reply = await line.chat(b"x" * 3000, b"expert@a")
    assert b"characters of conversations, more than 3000" in reply.line
    assert len(keeping.provider.served) == 3
    # A client's conversations end with it.
    keeping.llm.client_gone(nested.client)
    assert (await line.chat(b"a", b"expert@c")).line.startswith(b"OK ")


# spec L5: messages have descriptors, and a conversation keeps what it was given.
async def test_descriptors_belong_to_a_kept_conversation(tmp_path: Path) -> None:
    fds = configured(conversation_fds=True)
    async with open_model_stage(tmp_path, fds=fds, presets=PRESETS) as stage:
        line = stage.connect()
        await line.chat(b"!say=hello", b"agent@a")
        read = ["read_fd", {"fd": "fd:2"}]
        await line.chat(script([read], "done"), b"agent@a")
        assert said(stage)[1] == ("user", '!say=hello\n<message fd="fd:2"/>')
        result = next(one for one in messages(stage) if one["role"] == "tool")
        assert "\n!say=hello\n" in result["content"]
        system = messages(stage)[0]["content"]
        assert system.count("<file_descriptor_instructions>") == 1
