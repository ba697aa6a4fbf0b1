"""LLM fds beside one another.

Forks beside calls, turns that fail, what is given up.
"""

import json
import threading
from functools import partial
from xml.etree import ElementTree as ET

import pytest
import trio
import trio.testing
from blake3 import blake3

from supervisor.llm.conversations import ChosenPreset, ConversationTurn
from supervisor.llmfd import (
    Allowance,
    Content,
    FdError,
    LlmFd,
    Process,
    ProcessParts,
    Store,
    store,
)
from supervisor.llmfd.checkpoint_state import read_state, state_of
from supervisor.llmfd.toolloop import MOST_MESSAGES, ModelError
from tests.helpers.contents import asking, failed, holding, process, text_of
from tests.helpers.leaks import give_back
from tests.helpers.sessions import hall
from tests.supervisor.llmfd.conversing import Make, Message, calling, scene, words

__all__ = ["hall", "scene"]

LOG = "".join(f"line {n}\n" for n in range(3000))


# Summaries


@pytest.mark.parametrize("arguments", [{}, {"is_error": True}])
async def test_what_looks_like_a_result_gets_no_summary(
    scene: Make, arguments: dict[str, object]
) -> None:
    made = scene(words("It is a log."), auto_summarize=True)
    text = '<fd_result fd="fd:9">x'
    call = partial(made.process.call, "wrap_output", text=text, **arguments)
    assert await call() == text.encode()
    made.process.add_text("another one", "test")
    assert await call() == text.encode()
    assert not made.model.seen


async def test_binary_content_is_not_sent_to_be_summarized(scene: Make) -> None:
    made = scene(words("It is a log."), auto_summarize=True)
    data = "/w" + "A" * 20_002
    result = ET.fromstring(await made.process.call("wrap_output", base64=data))
    assert (result.get("encoding"), result.find("summary")) == ("base64", None)
    assert not made.model.seen


# Forks beside calls


def test_a_fork_beside_a_call_in_a_thread_holds_what_it_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = holding("first")
    store = made.shared.store
    hold_all = store.hold_all
    adding = threading.Thread(target=made.add_text, args=("second", "test"))

    def hold_slowly(contents: list[object]) -> None:
        hold_all(contents)  # type: ignore[arg-type]
        adding.start()
        adding.join(0.2)  # it has to wait for the fork

    monkeypatch.setattr(store, "hold_all", hold_slowly)
    child = made.fork()
    adding.join()
    assert list(made.table.fds) == [1, 2]
    assert list(child.table.fds) == [1]
    child.close()
    made.close()
    assert not store.blobs
    assert store.memory_bytes == 0


def test_forks_and_calls_side_by_side_lose_no_reference() -> None:
    made = holding("first")
    store = made.shared.store
    done = threading.Event()
    faults: list[BaseException] = []

    def work() -> None:
        try:
            for number in range(1500):
                fd = made.add_text(f"text {number}", "test")
                made.table.rename(fd, f"name {number}")
                if number % 3 == 0:
                    made.table.drop([fd.number])
        except BaseException as why:  # noqa: BLE001 - told below
            faults.append(why)
        finally:
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        child = made.fork()
        for fd in child.table.fds.values():
            assert fd.content.text.refs > 0
        child.close()
    thread.join()
    assert not faults
    made.close()
    give_back()
    assert not store.blobs
    assert store.memory_bytes == 0


def test_what_comes_after_the_end_is_refused_and_freed() -> None:
    made = holding("first")
    made.close()
    with pytest.raises(FdError, match="the process has ended"):
        made.add_text("late", "test")
    assert not made.shared.store.blobs


def test_a_mark_beside_a_fork_is_not_the_forks() -> None:
    made = holding(LOG)
    fd = made.table.fds[1]
    child = made.fork()
    made.table.mark(fd, "here", (1, 2))
    assert made.table.fds[1].sections == {"here": (1, 2)}
    assert not child.table.fds[1].sections
    again = made.fork()
    made.table.unmark(made.table.fds[1], "here")
    assert again.table.fds[1].sections == {"here": (1, 2)}
    for one in (made, child, again):
        one.close()


# Turns that fail


async def test_a_turn_that_fails_leaves_no_descriptor(scene: Make) -> None:
    def fail(messages: list[Message]) -> Message:
        del messages
        raise ModelError("the provider failed")

    made = scene(words("hello"), conversation_fds=True)
    await made.chat("go", "mine")
    kept = made.conversations.conversation(made.client, "mine")
    before = list(kept.table.fds)
    made.model.script = [calling(("create_temp_file", {"content": "x"})), fail] * 5
    for prompt in ("go on", "long\n" * 3000) * 2:
        with pytest.raises(ModelError):
            await made.chat(prompt, "mine")
        assert list(kept.table.fds) == before
    made.model.script = [words("done")]
    assert await made.chat("again", "mine") == "done"


async def test_a_turn_that_fails_under_another_preset_changes_nothing(
    scene: Make,
) -> None:
    def fail(messages: list[Message]) -> Message:
        del messages
        raise ModelError("the provider failed")

    made = scene(words("hello"), conversation_fds=True)
    await made.chat("go", "mine")
    kept = made.conversations.conversation(made.client, "mine")
    before, messages = list(kept.table.fds), list(kept.messages)

    async def ask(program: str) -> None:
        turn = ConversationTurn(
            made.client, True, ChosenPreset(program, "", True, "mine"), "more", ()
        )
        await made.conversations.answer(turn)

    made.model.script = [fail]
    for program in ("expert", "general", "expert"):
        with pytest.raises(ModelError):
            await ask(program)
        assert (list(kept.table.fds), kept.program) == (before, "general")
        assert kept.messages == messages
    made.model.script = [words("done")]
    await ask("expert")
    assert kept.program == "expert"
    assert kept.messages[0]["content"] != messages[0]["content"]
    assert {str(message["fd"]) for message in kept.messages} == {
        fd.id for fd in kept.table.fds.values()
    }


async def test_a_turn_that_is_cancelled_before_it_has_its_preset_changes_nothing(
    scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene(words("hello"), conversation_fds=True)
    await made.chat("go", "mine")
    kept = made.conversations.conversation(made.client, "mine")
    before, messages = list(kept.table.fds), list(kept.messages)
    # So long that it is stored in a thread; and the child has none to spare.
    monkeypatch.setattr(made.model, "system", lambda _: "Know all. " * 100_000)
    threads = made.client.ledger.threads
    borrowers = [object() for _ in range(int(threads.total_tokens))]
    for one in borrowers:
        threads.acquire_on_behalf_of_nowait(one)
    turn = ConversationTurn(
        made.client, True, ChosenPreset("expert", "", True, "mine"), "more", ()
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.conversations.answer, turn)
        await trio.testing.wait_all_tasks_blocked(0.05)
        nursery.cancel_scope.cancel()
    for one in borrowers:
        threads.release_on_behalf_of(one)
    assert (list(kept.table.fds), kept.program) == (before, "general")
    assert kept.messages == messages


async def test_a_conversation_has_a_bound_of_messages(scene: Make) -> None:
    made = scene(words("hello"))
    await made.chat("go", "mine")
    kept = made.conversations.conversation(made.client, "mine")
    kept.messages += [{"role": "user", "content": "x"}] * MOST_MESSAGES
    with pytest.raises(ModelError, match=f"messages, more than {MOST_MESSAGES}"):
        await made.chat("more", "mine")


# Contents that are given up


async def test_a_spawn_sees_no_checkpoint_that_it_did_not_make(scene: Make) -> None:
    made = scene(words("hello"))
    parent = made.process
    parent.add_text("secret of the parent", "test")
    first = await asking(parent, "checkpoint_process")
    fork, spawned = parent.fork(), parent.spawn()
    for one, count in ((parent, "1"), (fork, "1"), (spawned, "0")):
        listed = await asking(one, "list_checkpoints")
        assert listed.get("count") == count
    for name in ("restore_process", "delete_checkpoint"):
        answer = await asking(spawned, name, checkpoint_id=first.get("id"))
        assert failed(answer)[::2] == (
            "not_found",
            f"Checkpoint {first.get('id')} not found",
        )
    own = await asking(spawned, "checkpoint_process")
    spawned.add_text("more", "test")
    restored = await asking(spawned, "restore_process", checkpoint_id=own.get("id"))
    assert restored.get("fds") == "0"
    # Giving descriptors up includes those that a checkpoint holds.
    await asking(fork, "keep_fds", fds=[])
    assert (await asking(fork, "list_checkpoints")).get("count") == "0"
    within = spawned.fork()
    assert (await asking(within, "list_checkpoints")).get("count") == "1"
    await asking(within, "keep_fds", fds=[])
    assert (await asking(within, "list_checkpoints")).get("count") == "0"
    for one in (fork, spawned, within):
        one.close()


async def test_who_is_cancelled_before_its_turn_leaves_nothing(scene: Make) -> None:
    made = scene(words("hello"))
    client, service, parent = made.client, made.service, made.process
    pieces = [b"x" * 70_000, b""]

    async def read() -> bytes:
        await trio.lowlevel.checkpoint()
        return pieces.pop(0)

    async with parent.turn, trio.open_nursery() as nursery:
        nursery.start_soon(service.wrap_pieces, client, read, "tool:head")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not pieces
        nursery.cancel_scope.cancel()
    assert not parent.has_begun("t1")
    assert parent.shared.allowance is not None
    assert parent.shared.allowance.used == 0
    assert service.store.memory_bytes == 0


async def test_a_checkpoint_stays_in_sight_however_many_came_and_went(
    scene: Make,
) -> None:
    made = scene(words("hello"))
    parent = made.process
    first = (await asking(parent, "checkpoint_process")).get("id")
    await asking(parent, "keep_fds", fds=[])
    for _ in range(2):
        late = (await asking(parent, "checkpoint_process")).get("id")
        await asking(parent, "delete_checkpoint", checkpoint_id=late)
    assert parent.checkpoints.made == parent.checkpoints.seen == [first]


def test_who_ends_while_a_content_is_finished_does_not_end_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = process()
    kept = made.shared.store
    token = made.begun.put(None, b"whole")
    finish = store.Writer.finish

    def finish_late(writer: store.Writer) -> Content:
        made.begun.close()
        return finish(writer)

    monkeypatch.setattr(store.Writer, "finish", finish_late)
    content = made.begun.take(token)
    assert content.text.data[:] == b"whole"
    kept.drop(content)
    assert not kept.blobs
    made.close()


@pytest.mark.parametrize("other", ["take", "put"])
def test_a_token_is_unknown_while_a_piece_is_added_to_it(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    made = Process(ProcessParts(Store(), {}, allowance=Allowance(100)))
    begun, store = made.begun, made.shared.store
    token = begun.put(None, b"first ")
    reserve = store.reserve

    def interfere(size: int) -> bool:
        monkeypatch.undo()  # once
        with pytest.raises(FdError, match=f"Unknown token: {token}"):
            begun.take(token) if other == "take" else begun.put(token, b"between ")
        return reserve(size)

    monkeypatch.setattr(store, "reserve", interfere)
    assert begun.put(token, b"second") == token
    content = begun.take(token)
    assert content.text[:] == b"first second"
    assert content.keys == [blake3(b"first second").digest()]
    store.drop(content)
    assert made.shared.allowance is not None
    assert made.shared.allowance.used == 0
    made.close()


def test_a_piece_that_comes_while_its_process_ends_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Process(ProcessParts(Store(), {}, allowance=Allowance(100)))
    store = made.shared.store
    token = made.begun.put(None, b"first ")
    reserve = store.reserve

    def end(size: int) -> bool:
        made.close()
        return reserve(size)

    monkeypatch.setattr(store, "reserve", end)
    with pytest.raises(FdError, match="the process has ended"):
        made.begun.put(token, b"second")
    assert not made.has_begun(token)
    assert made.shared.allowance is not None
    assert (made.shared.allowance.used, store.memory_bytes) == (0, 0)


async def test_the_output_of_a_tool_has_no_token_that_its_child_can_add_to(
    scene: Make,
) -> None:
    made = scene(words("hello"))
    parent = made.process
    pieces = [b"x" * 70_000, b""]
    answers: list[bytes | None] = []

    async def read() -> bytes:
        await trio.lowlevel.checkpoint()
        return pieces.pop(0)

    async def wrap() -> None:
        wrapped = made.service.wrap_pieces(made.client, read, "tool:head")
        answers.append(await wrapped)

    async with trio.open_nursery() as nursery:
        async with parent.turn:
            nursery.start_soon(wrap)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not pieces
            assert not parent.has_begun("t1")
            assert await parent.put(None, b"of the child") == "t1"
    assert answers[0] is not None
    assert answers[0].startswith(b"<fd_result ")
    content = parent.table.fds[1].content
    assert content.keys == [blake3(b"x" * 70_000).digest()]
    assert await parent.call("wrap_output", token="t1") == b"of the child"


async def test_a_client_that_goes_while_its_result_is_made_ends_nothing(
    scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scene(words("hello"))
    assert not made.process.table.fds
    pieces = [b"0123456789abcde\n" * 2_000_000, b""]
    add = Process.add

    async def read() -> bytes:
        await trio.lowlevel.checkpoint()
        return pieces.pop(0)

    def add_last(self: Process, content: Content, source: str) -> LlmFd:
        fd = add(self, content, source)
        trio.from_thread.run_sync(made.service.client_gone, made.client)
        return fd

    monkeypatch.setattr(Process, "add", add_last)
    monkeypatch.setattr(store, "in_background", lambda call, *args: call(*args))
    assert await made.service.wrap_pieces(made.client, read, "tool:x") is None
    assert not made.service.store.blobs


# Long conversations


def said(count: int) -> Process:
    """Return a process with a conversation."""
    made = process()
    made.messages = [{"role": "user", "content": f"é\n{n}"} for n in range(count)]
    return made


def test_a_fork_copies_no_message() -> None:
    made = said(3)
    child = made.fork()
    assert child.messages == made.messages
    pairs = zip(child.messages, made.messages, strict=True)
    assert all(one is other for one, other in pairs)
    child.messages.append({"role": "user", "content": "x"})
    assert len(made.messages) == 3


def test_a_state_is_written_and_read_message_by_message() -> None:
    made = said(3)
    state = state_of(made)
    assert len(state.split(b"\n")) == 4
    kept = read_state(state)
    assert kept is not None
    assert kept.messages == made.messages
    # As programs before wrote it: all in one.
    document = json.loads(state.partition(b"\n")[0])
    old = json.dumps({**document, "messages": made.messages}).encode()
    before = read_state(old)
    assert before == kept
    lines = state.split(b"\n")
    for wrong in (lines[:-1], [*lines, b"{}"], [*lines[:-1], b"["], [old, *lines[1:]]):
        assert read_state(b"\n".join(wrong)) is None


async def test_a_process_restored_has_every_message(scene: Make) -> None:
    made = scene(words("hello"))
    parent = made.process
    parent.messages = said(100).messages
    made_id = (await asking(parent, "checkpoint_process")).get("id")
    parent.messages = []
    await asking(parent, "restore_process", checkpoint_id=made_id)
    assert parent.messages == said(100).messages
    fd = parent.add_text("text", "test")
    page = await asking(parent, "read_fd", fd=fd.id)
    assert text_of(page) == "text"
