"""A child that asks for a tool before the host has heard of its own start."""

import trio
import trio.testing

from tests.helpers.toolscene import Reply, Scene


# spec E19: a tool has the walls of its child, which are known once that has begun.
async def test_a_tool_is_started_once_the_walls_of_its_child_are_known(
    scene: Scene,
) -> None:
    child = scene.child.puppet.child
    child.begun = trio.Event()
    replies: list[Reply] = []

    async def ask() -> None:
        replies.append(await scene.run("tool=sh", "arg=-c", "arg=>ran"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked(0.2)
        assert not replies
        assert not (scene.workspace / "ran").exists()
        child.begun.set()
    assert replies[0].code == 0
    assert (scene.workspace / "ran").exists()
