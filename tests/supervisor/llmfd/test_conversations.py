"""The tool loop, fork, spawn, summaries, with a model that follows a script."""

import errno
import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from xml.etree import ElementTree as ET

import pytest
import trio
import trio.testing

from supervisor.llm.conversations import MOST_KEPT_CHARS
from supervisor.llm.errors import NO_MEMORY
from supervisor.llmfd import Json, LlmFd, Process, Tool, toolloop
from supervisor.llmfd.service import MOST_COPIES
from supervisor.llmfd.table import FdTable
from supervisor.llmfd.toolloop import (
    INSTRUCTIONS,
    MOST_RESULT_CHARS,
    MOST_ROUNDS,
    ModelError,
    ModelReply,
    enrich,
    instructions,
)
from tests.helpers.contents import asking, failed, text_of
from tests.helpers.sessions import Hall, hall
from tests.supervisor.llmfd.conversing import Make, Message, calling, scene, words
from vfs.ledger import MOST_MEMORY_BYTES
from vfs.payload import ANSWER_BYTES, MemoryReservation

__all__ = ["hall", "scene"]

LOG = "".join(f"line {n}\n" for n in range(3000))


def last(messages: Sequence[Message]) -> str:
    """Return the last message's words."""
    return str(messages[-1]["content"])


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """A task goes on."""
        del task
        self.count += 1


async def test_a_model_reads_what_a_tool_left(scene: Make) -> None:
    made = scene(
        calling(("read_fd", {"fd": "fd:1", "page": 2}), ("list_fds", {})),
        words("done"),
    )
    made.process.add_text(LOG, "tool:log")
    assert await made.chat("look") == "done"
    first, second = made.model.seen
    assert first[0]["role"] == "system"
    assert str(first[0]["content"]).startswith("Be good.\n\n<file_descriptor_instr")
    assert str(second[-2]["content"]).startswith('<fd_content fd="fd:1" page="2"')
    assert last(second).startswith('<fd_list count="1">')
    assert {"read_fd", "fork", "spawn", "summarize_fd"} <= set(made.model.tools)
    assert not {"wrap_output", "keep_fds", "tool_schemas"} & set(made.model.tools)
    assert set(made.model.clients) == {made.client}


async def test_long_input_is_stored_and_the_block_stands_there_once(
    scene: Make,
) -> None:
    made = scene(words("one"), words("two"))
    await made.chat(LOG, "mine")
    assert await made.chat("more", "mine") == "two"
    seen = made.model.seen[-1]
    assert [message["role"] for message in seen] == [
        *("system", "user", "assistant", "user")
    ]
    assert str(seen[1]["content"]).startswith('<fd_result fd="fd:1"')
    assert str(seen).count("<file_descriptor_instructions>") == 1


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (("read_fd", "{"), "invalid_parameter"),
        (("read_fd", "[]"), "invalid_parameter"),
        (("close_fd", {}), "invalid_parameter"),
        (("wrap_output", {"text": "x"}), "invalid_parameter"),
        (("read_fd", {"fd": "fd:9"}), "not_found"),
        (("fork", {"prompts": []}), "invalid_parameter"),
        (("fork", {"prompts": ["x"] * 11}), "invalid_parameter"),
        (("spawn", {"program": "nobody", "query": "x"}), "not_found"),
    ],
)
async def test_whatever_a_model_calls_it_is_answered(
    scene: Make, call: tuple[str, object], kind: str
) -> None:
    made = scene(calling(call), words("done"))
    assert await made.chat("go") == "done"
    assert last(made.model.seen[-1]).startswith(f'<fd_error type="{kind}"')


async def test_a_loop_ends(scene: Make) -> None:
    made = scene(calling(("list_fds", {})))
    with pytest.raises(ModelError, match="no answer after"):
        await made.chat("go")
    assert len(made.model.seen) == MOST_ROUNDS


# One answer of a model may hold thousands of calls.
async def test_answers_of_tools_that_are_too_long_together_end_the_loop(
    scene: Make,
) -> None:
    made = scene(calling(*[("show", {})] * 12))
    shown: list[int] = []

    def show(_: Process) -> bytes:
        shown.append(MOST_RESULT_CHARS)
        return b"x" * MOST_RESULT_CHARS

    made.service.tools["show"] = Tool("show", "", (), show)
    with pytest.raises(ModelError, match="characters, more than"):
        await made.chat("go")
    assert len(shown) == MOST_KEPT_CHARS // MOST_RESULT_CHARS


async def test_the_memory_of_what_a_loop_says_is_reserved_until_its_end(
    scene: Make,
) -> None:
    reserved: list[int] = []

    def model(messages: list[Message]) -> Message:
        reserved.append(made.client.ledger.memory.used)
        if len(reserved) < 3:
            return calling(("show", {}), ("show", {}))
        return words("x" * 1_000_000)

    made = scene(model)
    made.service.tools["show"] = Tool("show", "", (), lambda _: b"x" * 1_000_000)
    await made.chat("go")
    assert reserved[0] == 0
    assert 2_000_000 < reserved[1] < 2_100_000
    assert 4_000_000 < reserved[2] < 4_100_000
    assert made.client.ledger.memory.used == 0


@pytest.mark.parametrize(
    "call", [("show", {}), ("back", {}), ("list_fds", {"text": "x" * 10_000})]
)
async def test_a_loop_without_memory_ends(
    scene: Make, call: tuple[str, object]
) -> None:
    taken: list[MemoryReservation] = []

    def model(messages: list[Message]) -> Message:
        if len(messages) > 2:
            return words("never asked")
        taken.append(made.model.reservation(made.client))
        taken[0].resize(MOST_MEMORY_BYTES - 1000)
        taken[0].add(ANSWER_BYTES)
        return calling(call)

    def go_back(process: Process) -> bytes:
        process.messages = [{"role": "user", "content": "x" * 10_000}]
        return b"restored"

    made = scene(model)
    made.service.tools |= {
        "show": Tool("show", "", (), lambda _: b"x" * 10_000),
        "back": Tool("back", "", (), go_back),
    }
    with pytest.raises(ModelError, match=NO_MEMORY):
        await made.chat("go")
    assert len(made.model.seen) == 1
    taken[0].close()
    assert made.client.ledger.memory.used == 0


# fork


def prompted(messages: list[Message]) -> Message:
    """Answer what a fork was asked."""
    prompt = last(messages)
    if "broken" in prompt:
        raise ModelError("quota exceeded: cannot make LLM call")
    return words(f"answer to {prompt}")


async def test_the_fork_of_the_design(scene: Make) -> None:
    prompts = [
        "Review the error logs in fd-12345, focusing on lines 100-150",
        "Check the config file in fd-67890, looking for security settings",
        "broken",
    ]

    def model(messages: list[Message]) -> Message:
        if last(messages) == "go":
            return calling(("fork", {"prompts": prompts}), ("list_fds", {}))
        return words("done") if "fork_result" in str(messages) else prompted(messages)

    made = scene(model)
    made.process.add_text(LOG, "tool:log")
    assert await made.chat("go") == "done"
    result = ET.fromstring(str(made.model.seen[-1][-2]["content"]))
    assert [child.get("success") for child in result] == ["true", "true", "false"]
    assert text_of(result[0]) == f"answer to {prompts[0]}"
    assert text_of(result[2]) == "quota exceeded: cannot make LLM call"
    assert set(made.model.clients) == {made.client}


@pytest.mark.parametrize("count", [0, 11])
async def test_a_fork_has_one_to_ten_prompts(scene: Make, count: int) -> None:
    made = scene(words("child"))
    answer = ET.fromstring(await made.process.call("fork", prompts=["x"] * count))
    assert answer.findtext("message") == "Give 1 to 10 prompts"
    assert not made.model.seen
    answer = ET.fromstring(await made.process.call("fork", prompts=["x"] * 10))
    assert [child.get("index") for child in answer] == [str(n) for n in range(1, 11)]


async def test_children_of_a_fork_run_side_by_side(scene: Make) -> None:
    made = scene(words("unused"))
    together = trio.Event()
    waiting = 0

    async def complete(*_: object) -> ModelReply:
        nonlocal waiting
        waiting += 1
        if waiting == 10:
            together.set()
        await together.wait()
        return ModelReply(words("all are here"))

    made.model.complete = complete  # type: ignore[method-assign, assignment]
    answer = await made.process.call("fork", ["x"] * 10)
    assert answer.count(b"all are here") == 10


# Each may have thousands of descriptors: ten at once held up others for 60 ms.
async def test_others_get_on_between_the_copies_of_a_fork(
    scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene(words("done"))
    fork = Process.fork
    steps = Steps()
    forked: list[int] = []

    def counted(process: Process) -> Process:
        forked.append(steps.count)
        return fork(process)

    monkeypatch.setattr(Process, "fork", counted)
    trio.lowlevel.add_instrument(steps)
    try:
        await made.process.call("fork", ["x"] * 10)
    finally:
        trio.lowlevel.remove_instrument(steps)
    assert len(set(forked)) == len(forked) == 10


async def test_a_fork_sees_the_descriptors_and_leaves_none(scene: Make) -> None:
    def model(messages: list[Message]) -> Message:
        if messages[-1]["role"] == "user":
            return calling(("search_fd", {"fd": "fd:1", "query": "line 7"}))
        return words(LOG)

    made = scene(model)
    made.process.add_text(LOG, "tool:log")
    answer = ET.fromstring(await made.process.call("fork", prompts=["find it"]))
    # A long answer is a descriptor of the one who asked.
    assert text_of(answer[0]).startswith('<fd_result fd="fd:2"')
    assert list(made.process.table.fds) == [1, 2]


async def test_forks_within_forks_end(scene: Make) -> None:
    def model(messages: list[Message]) -> Message:
        if messages[-1]["role"] == "user":
            return calling(("fork", {"prompts": ["deeper"]}))
        return words(last(messages))

    made = scene(model)
    answer = (await made.process.call("fork", prompts=["deeper"])).decode()
    assert "No more than 4 forks and spawns within each other" in answer


async def test_a_copy_that_has_no_thread_stops_no_other(
    scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(messages: list[Message]) -> Message:
        if last(messages) == "long":
            return calling(("show", {}))
        return words("done")

    async def refuse(is_long: bool, call: Callable[[], object]) -> object:
        await trio.lowlevel.checkpoint()
        if is_long:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return call()

    made = scene(model)
    made.service.tools["show"] = Tool("show", "", (), lambda _: b"x" * 1_000_000)
    monkeypatch.setattr(toolloop, "in_thread_if", refuse)
    answer = ET.fromstring(await made.process.call("fork", ["long", "short"]))
    assert [child.get("success") for child in answer] == ["false", "true"]
    assert text_of(answer[0]) == os.strerror(errno.EAGAIN)
    assert text_of(answer[1]) == "done"
    spawned = ET.fromstring(await made.process.call("spawn", "expert", "long"))
    assert text_of(spawned[0]) == os.strerror(errno.EAGAIN)


# spec S7: each has a table, and may have a connection to the provider.
async def test_copies_of_all_clients_of_a_child_are_charged_and_bounded(
    scene: Make, hall: Hall
) -> None:
    made = scene(words("unused"))
    account = hall.fs.descriptor_account
    client = hall.connect(parent=made.client).client
    made.service.client_attached(client)
    nested = made.service.process_of(client)
    asked = 0
    together, is_over = trio.Event(), trio.Event()

    async def complete(*_: object) -> ModelReply:
        nonlocal asked
        asked += 1
        if asked == MOST_COPIES:
            together.set()
        await is_over.wait()
        return ModelReply(words("done"))

    made.model.complete = complete  # type: ignore[method-assign, assignment]
    forks = [made.process.fork() for _ in range(MOST_COPIES // 10)]
    before = account.used
    async with trio.open_nursery() as nursery:
        for one in forks:
            nursery.start_soon(one.call, "fork", ["x"] * 10)
        await together.wait()
        assert account.used == before + MOST_COPIES
        spawn = partial(nested.call, "spawn", "expert", "x")
        for refused in (await nested.call("fork", ["x"]), await spawn()):
            failure = ET.fromstring(refused)
            text = "Cannot copy the conversation: Too many open files"
            assert failure.findtext("message") == text
            details = f"{MOST_COPIES} copies are at work, of {MOST_COPIES} at most"
            assert failure.findtext("details") == details
        assert asked == MOST_COPIES
        is_over.set()
    assert account.used == before
    assert b"done" in await nested.call("fork", ["x"])
    for one in forks:
        one.close()
    made.service.client_gone(client)


async def test_a_fork_is_refused_where_the_host_has_too_few_descriptors(
    scene: Make, hall: Hall
) -> None:
    made = scene(words("done"))
    account = hall.fs.descriptor_account
    assert made.process.table.fds == {}  # its child is there
    account.lower(account.used + 1)
    answer = ET.fromstring(await made.process.call("fork", ["x"] * 2))
    details = "The host has too few descriptors left for it"
    assert answer.findtext("details") == details
    assert b"done" in await made.process.call("fork", ["x"])


# spawn


async def test_the_spawn_of_the_design(scene: Make, hall: Hall) -> None:
    (hall.root / "data").mkdir()
    (hall.root / "data" / "queries.sql").write_text("SELECT 1;\n")
    made = scene(words("optimized"))
    for text in (LOG, "secret", "one\ntwo\nthree\n"):
        made.process.add_text(text, "test")
    await made.process.call("create_temp_file", "This is shared content")
    answer = await made.process.call(
        "spawn",
        program="expert",
        query="Optimize the SQL query in the logs (see preloaded content)",
        additional_preload_files=["data/queries.sql"],
        additional_preload_fds=["fd-1", {"fd": "fd:3", "start_line": 2, "end_line": 2}],
        additional_preload_temp_files=["temp:1"],
    )
    assert text_of(ET.fromstring(answer)[0]) == "optimized"
    system = str(made.model.seen[0][0]["content"])
    assert system.startswith("You know all.\n\n<file_descriptor_instructions>")
    assert '<preload fd="fd:1">\nline 0\n' in system
    assert '<preload fd="fd:2" from="fd:3" lines="2-2">\ntwo\n\n</preload>' in system
    assert 'temp_file="temp:1">\nThis is shared content\n' in system
    assert 'file="data/queries.sql">\nSELECT 1;\n' in system
    assert "secret" not in system
    assert list(made.process.table.fds) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"additional_preload_fds": ["fd:9"]}, "not_found"),
        (
            {"additional_preload_fds": [{"fd": "fd:1", "start_line": 9}]},
            "invalid_range",
        ),
        ({"additional_preload_fds": [{"fd": "fd:1", "lines": 9}]}, "invalid_parameter"),
        ({"additional_preload_files": ["missing"]}, "file_operation"),
        ({"additional_preload_files": ["/etc/passwd"]}, "file_operation"),
        ({"additional_preload_files": ["a\0b"]}, "file_operation"),
        ({"additional_preload_temp_files": ["temp:9"]}, "not_found"),
    ],
)
async def test_a_spawn_with_what_is_not_there_starts_nothing(
    scene: Make, arguments: dict[str, object], kind: str
) -> None:
    made = scene(words("unused"))
    made.process.add_text("one line", "test")
    answer = await made.process.call("spawn", "expert", "query", **arguments)
    assert answer.startswith(b'<fd_error type="%b"' % kind.encode())
    assert not made.model.seen


# Checkpoints, descriptors of messages, references, summaries


async def test_a_model_goes_back_in_the_middle_of_its_calls(scene: Make) -> None:
    ids: list[str] = []

    def model(messages: list[Message]) -> Message:
        text = last(messages)
        if text == "go":
            return calling(("list_fds", {}), ("checkpoint_process", {"label": "a"}))
        if text.startswith("<checkpoint "):
            ids.append(ET.fromstring(text).get("id", ""))
            back = ("restore_process", {"checkpoint_id": ids[0]})
            return calling(back, ("list_fds", {}))
        return words("back")

    made = scene(model)
    assert await made.chat("go", "mine") == "back"
    seen = made.model.seen[-1]
    assert [message["role"] for message in seen] == [
        *("system", "user", "assistant", "tool", "tool")
    ]
    assert last(seen).startswith(f'<restore checkpoint_id="{ids[0]}" fds="0" ')


async def test_a_restored_conversation_goes_on(scene: Make) -> None:
    made = scene(calling(("checkpoint_process", {})), words("kept"), words("on"))
    await made.chat("go", "mine")
    kept = made.conversations.conversation(made.client, "mine")
    listed = ET.fromstring(await kept.call("list_checkpoints"))
    await kept.call("restore_process", listed[0].get("id"))
    assert await made.chat("again", "mine") == "on"
    assert [message["role"] for message in made.model.seen[-1]] == [
        *("system", "user", "assistant", "tool", "user")
    ]


async def test_a_model_goes_back_to_what_nobody_has_spoken_in(scene: Make) -> None:
    def model(messages: list[Message]) -> Message:
        if last(messages) == "go":
            return calling(("restore_process", {"checkpoint_id": made_id}))
        return words("back")

    made = scene(model)
    made.process.add_text("what the child left", "test")
    made_id = ET.fromstring(await made.process.call("checkpoint_process")).get("id")
    for name in ("", "mine"):
        assert await made.chat("go", name) == "back"
        first, second = made.model.seen[-1]
        assert (first["role"], second["role"]) == ("system", "user")
        assert str(first["content"]).startswith("Be good.\n\n<file_descriptor_instr")
        assert str(second["content"]).startswith(f'<restore checkpoint_id="{made_id}"')
    kept = made.conversations.conversation(made.client, "mine")
    assert (kept.program, list(kept.table.fds)) == ("general", [1])
    assert await made.chat("and on", "mine") == "back"
    assert len(made.model.seen[-1]) == 4


async def test_every_message_may_have_a_descriptor(scene: Make) -> None:
    made = scene(
        calling(("list_fds", {})), words("hello"), words("bye"), conversation_fds=True
    )
    await made.chat("first words", "mine")
    await made.chat("more", "mine")
    kept = made.conversations.conversation(made.client, "mine")
    assert [message.get("fd") for message in kept.messages] == [
        f"fd:{number}" for number in range(1, 8)
    ]
    rows = ET.fromstring(await kept.call("list_fds"))
    assert [row.get("source") for row in rows][:4] == [
        *("message:system", "message:user", "message:assistant", "message:tool")
    ]
    calls = ET.fromstring(await kept.call("read_fd", fd="fd-3"))
    assert json.loads(text_of(calls)) == calling(("list_fds", {}))["tool_calls"]
    page = ET.fromstring(await kept.call("read_fd", fd="fd-2"))
    assert text_of(page) == "first words"
    sent = made.model.seen[-1][1]
    assert sent["content"] == 'first words\n<message fd="fd:2"/>'


async def test_every_message_of_a_fork_may_have_a_descriptor(scene: Make) -> None:
    fork = calling(("fork", {"prompts": ["go on"]}))
    made = scene(fork, words("one"), words("done"), conversation_fds=True)
    await made.chat("go")
    copy = made.model.seen[1]
    marks = [str(message["content"]).rpartition("\n")[2] for message in copy]
    assert marks[3:] == ['<message fd="fd:4"/>', '<message fd="fd:5"/>']


async def test_marked_parts_of_a_reply_are_descriptors_by_name(scene: Make) -> None:
    reply = 'See <ref id="code">x = 1 <ref id="fd:1">y</ref></ref>. <ref id="open">'
    made = scene(words(reply), words('<ref id="code">x = 2</ref>'))
    assert await made.chat("go", "mine") == reply
    await made.chat("again", "mine")
    kept = made.conversations.conversation(made.client, "mine")
    found = ET.fromstring(await kept.call("read_fd", name="code"))
    assert text_of(found) == "x = 2"
    first = ET.fromstring(await kept.call("read_fd", fd="fd:2"))
    assert text_of(first) == "x = 1 y"
    info = ET.fromstring(await kept.call("fd_info", fd="fd:2"))
    assert (info.get("source"), info.get("name")) == ("ref:code", "")


# A thousand in one step held up others for 20 ms.
async def test_others_get_on_between_the_marked_parts_of_a_reply(
    scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene(words("".join(f'<ref id="r{n}">{n}</ref>' for n in range(20))))
    rename = FdTable.rename
    steps = Steps()
    named: list[int] = []
    scope = trio.CancelScope()

    def counted(table: FdTable, fd: LlmFd, name: str) -> None:
        named.append(steps.count)
        scope.cancel()  # the reply is there: it is not lost, nor half of its parts
        rename(table, fd, name)

    monkeypatch.setattr(FdTable, "rename", counted)
    trio.lowlevel.add_instrument(steps)
    try:
        with scope:
            await made.chat("go", "mine")
    finally:
        trio.lowlevel.remove_instrument(steps)
    assert len(set(named)) == len(named) == 20
    assert not scope.cancelled_caught


async def test_a_summary_comes_with_a_result(scene: Make) -> None:
    made = scene(words("It is a log."), auto_summarize=True)
    result = ET.fromstring(await made.process.call("wrap_output", text=LOG))
    assert result.findtext("summary") == "It is a log."
    answer = ET.fromstring(await made.process.call("summarize_fd", fd="fd:1"))
    assert (answer.get("available"), text_of(answer)) == ("true", "It is a log.")
    shown = made.model.seen[0]
    assert shown[1]["content"] == LOG[:40_000]


async def test_without_a_summary_the_result_goes_without(
    scene: Make, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    made = scene(words("unused"), auto_summarize=True)

    async def fail(*_: object) -> ModelReply:
        raise ModelError("quota exceeded")

    for complete in (fail, trio.sleep_forever):
        made.model.complete = lambda *_, c=complete: c()  # type: ignore[method-assign]
        result = ET.fromstring(await made.process.call("wrap_output", text=LOG))
        assert result.tag == "fd_result"
        assert result.find("summary") is None
        answer = await made.process.call("summarize_fd", fd="fd:1")
        assert answer == b'<fd_summary fd="fd:1" available="false"/>'


# The prompt


def test_the_block_is_the_designs_and_knows_what_is_enabled() -> None:
    assert instructions(None) == INSTRUCTIONS
    assert instructions({"read_fd", "fd_to_file"}) == INSTRUCTIONS
    without = instructions({"read_fd"})
    assert "fd_to_file" not in without
    assert INSTRUCTIONS.count("\n") - without.count("\n") == 2
    once = enrich("Be good.", {"read_fd"})
    assert enrich(once, {"read_fd"}) == once
    assert enrich("", None) == INSTRUCTIONS


async def test_a_spawn_is_given_each_descriptor_once(scene: Make) -> None:
    made = scene(words("ok"))
    for text in ("one whole\n", "two\nlines\n", "three\n"):
        made.process.add_text(text, "test")
    parts = [{"fd": "fd:2", "end_line": 1}, "fd:1", "fd:1", "fd:3"]
    await made.process.call(
        "spawn", program="expert", query="q", additional_preload_fds=parts
    )
    system = str(made.model.seen[0][0]["content"])
    assert system.count("<preload ") == 3
    assert system.count('<preload fd="fd:1"') == system.count('<preload fd="fd:3"') == 1
    assert '<preload fd="fd:4" from="fd:2" lines="1-1">\ntwo\n' in system


async def test_a_spawn_finds_what_is_named_often_in_a_thread(
    scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene(words("done"))
    made.process.add_text("text", "test")
    threads: list[threading.Thread] = []
    find = Process.find_named

    def note(process: Process, parts: list[Json]) -> object:
        threads.append(threading.current_thread())
        return find(process, parts)

    monkeypatch.setattr(Process, "find_named", note)
    parts = ["fd:1"] * 30_000
    spawn = {"program": "expert", "query": "x", "additional_preload_fds": parts}
    answer = await made.process.call("spawn", **spawn)
    assert b'success="true"' in answer
    assert threading.main_thread() not in threads
    prompt = str(made.model.seen[-1][0]["content"])
    assert prompt.count("<preload ") == 1


async def test_a_spawn_shows_no_more_than_a_conversation_holds(scene: Make) -> None:
    made = scene(words("ok"))
    made.process.add_text("line\n" * 100_000, "test")
    parts = [{"fd": "fd:1", "start_line": 1} for _ in range(200)]
    answer = await asking(
        made.process,
        "spawn",
        program="expert",
        query="q",
        additional_preload_fds=parts,
    )
    assert failed(answer)[0] == "invalid_parameter"
    assert not made.model.seen
