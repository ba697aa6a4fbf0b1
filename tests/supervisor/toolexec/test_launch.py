"""A tool's start, as its child pays for it."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from supervisor.sandbox.plan import PROFILES
from supervisor.toolexec.backends.launch import launch
from supervisor.toolexec.routes import SpawnPlan
from tests.helpers.stage import Stage, stage

__all__ = ["stage"]

pytestmark = pytest.mark.slow


@pytest.fixture
def in_walls(stage: Stage) -> Stage:
    """A stage whose children have walls, as their tools have."""
    stage.sandbox = PROFILES["auto"]
    return stage


# attack 3: it looks at what the child has made, as often as the child asks for a tool.
@pytest.mark.attack
async def test_starts_of_a_childs_tools_take_its_threads(in_walls: Stage) -> None:
    child = await in_walls.sh("sleep 100")
    threads = child.threads
    assert threads is not None
    others = [object() for _ in range(int(threads.total_tokens))]
    for one in others:
        threads.acquire_on_behalf_of_nowait(one)
    owner: Any = SimpleNamespace(host=in_walls.host, child=child, lacks_doors=False)
    where = str(in_walls.where)
    plan = SpawnPlan("/bin/true", ("true",), cwd=where, is_walled=True)
    fds = tuple((in_walls.null, number) for number in range(3))
    cwd_fd = os.open(where, os.O_PATH | os.O_DIRECTORY)
    ended: list[int] = []

    async def start_tool() -> None:
        tool = await launch(owner, plan, cwd_fd, fds, with_doors=False)
        await tool.wait_swept()
        tool.close()
        ended.append(tool.pid)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start_tool)
        while not threads.statistics().tasks_waiting:
            assert not ended, "it took no thread of its child's"
            await trio.lowlevel.checkpoint()
        for one in others:
            threads.release_on_behalf_of(one)
    os.close(cwd_fd)
    assert len(ended) == 1
    child.stop(0.0)
    await child.wait_gone()
