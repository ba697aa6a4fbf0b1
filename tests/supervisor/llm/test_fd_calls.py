"""Calls of LLM fds that ask the model (fork, spawn, summaries), over real HTTP."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import trio

from supervisor.config.document import Config
from supervisor.config.fds import FileDescriptorSection, ToolsSection
from supervisor.fsproxy.replies import PROCESS_EXIT, REPLACED
from supervisor.llm.errors import NO_MEMORY
from supervisor.llmfd.service import FdService
from tests.helpers.sessions import Line
from tests.helpers.stage import Stage, eventually, open_model_stage
from vfs.ledger import MOST_MEMORY_BYTES

TOOLS = ["read_fd", "fork", "spawn", "summarize_fd"]
HANGS = "!hang " * 2000

CALLS = [
    ("fork", {"prompts": ["!hang", "!hang"]}, 2),
    ("spawn", {"program": "general", "query": "!hang"}, 1),
    ("summarize_fd", {"fd": "fd:1"}, 1),
    ("wrap_output", {"text": HANGS}, 1),
    ("wrap_input", {"text": HANGS}, 1),
]
"""Name, arguments, how often the model is asked at once; it never answers."""


@pytest.fixture
async def stage(tmp_path: Path, no_leaks: None) -> AsyncIterator[Stage]:
    """A host with a model and LLM fds."""
    del no_leaks
    fds = Config(
        tools=ToolsSection(enabled=TOOLS),
        file_descriptor=FileDescriptorSection(auto_summarize=True),
    )
    async with open_model_stage(tmp_path, fds=fds) as opened:
        yield opened


async def begin(line: Line, name: str, arguments: object) -> None:
    """Send a call, and wait for nothing."""
    document = json.dumps({"name": name, "arguments": arguments}).encode()
    await line.send(b"FD_CALL %d\n%b" % (len(document), document))


async def connected(stage: Stage) -> Line:
    """Connect a client that has a content, which is stored without a summary."""
    line = stage.connect()
    fds = stage.host.services.fds
    assert isinstance(fds, FdService)
    fds.process_of(line.client).add_text(HANGS, "test")
    return line


# spec L10, S4: the end of its process ends it, as it does an LLM_CHAT.
@pytest.mark.parametrize(("name", "arguments", "asked"), CALLS)
async def test_a_call_that_asks_the_model_ends_with_its_process(
    stage: Stage, name: str, arguments: object, asked: int
) -> None:
    line = await connected(stage)
    await begin(line, name, arguments)
    await stage.provider.wait_for(asked)
    with trio.fail_after(30):  # the model's own time-out comes much later
        await line.session.finish(PROCESS_EXIT)
    await eventually(lambda: not stage.provider.at_once)
    assert {row["outcome"] for row in stage.events("llm.called")} == {"cancelled"}
    assert not stage.llm.models.accounts.root.tokens.reserved
    assert stage.llm.models.accounts.root.tokens.used > 0


# spec L10: and so does the end of its connection.
@pytest.mark.parametrize(("name", "arguments", "asked"), CALLS)
async def test_a_call_that_asks_the_model_ends_with_its_connection(
    stage: Stage, name: str, arguments: object, asked: int
) -> None:
    line = await connected(stage)
    await begin(line, name, arguments)
    await stage.provider.wait_for(asked)
    line.close()
    with trio.fail_after(30):
        await line.gone()
    await eventually(lambda: not stage.provider.at_once)


# spec S5: the request and its copies take 33,000 bytes, those of the model 16,000 more.
async def test_a_call_of_a_copy_for_which_there_is_no_memory_says_so(
    stage: Stage,
) -> None:
    line = await connected(stage)
    budget = stage.llm.models.budget
    with budget.reservation(line.client.ledger, MOST_MEMORY_BYTES - 40_000):
        await begin(line, "fork", {"prompts": ["x" * 8000]})
        answer = ET.fromstring(await line.body())
    assert [str(child.text).strip() for child in answer] == [NO_MEMORY]
    assert not stage.provider.served


# spec L10, S2: for who is gone none begins.
async def test_a_call_that_was_sent_in_the_last_breath_asks_nobody(
    stage: Stage,
) -> None:
    line = await connected(stage)
    for name, arguments, _ in CALLS:
        await begin(line, name, arguments)
    with trio.fail_after(30):
        await line.session.finish(PROCESS_EXIT)
    assert not stage.provider.served


async def test_a_call_that_asks_the_model_does_not_keep_a_program_from_its_next(
    stage: Stage,
) -> None:
    line = await connected(stage)
    await begin(line, "spawn", {"program": "general", "query": "!hang"})
    await stage.provider.wait_for(1)
    line.session.interrupt()
    with trio.fail_after(30):
        assert await line.line() == REPLACED[:-1]
    await begin(line, "list_fds", {})
    assert b'<fd_list count="1">' in await line.body()
