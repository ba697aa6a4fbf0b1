"""A start that is given up keeps its user until its processes are gone."""

import errno
import os
import signal
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from supervisor.sandbox.plan import PROFILES
from tests.helpers.hanging import hanging
from tests.helpers.stage import Stage, eventually, stage

__all__ = ["stage"]

pytestmark = pytest.mark.slow


# The next child may get the user at once: it could signal what is left of this one.
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_start_that_ends_after_exec_keeps_its_user_while_its_processes_live(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    stage.sandbox = PROFILES["auto"]
    children = stage.host.children
    has_exec = trio.Event()

    def end(child_id: str, *_: object) -> None:
        os.kill(stage.launchpad, signal.SIGSTOP)  # it tells of no end
        has_exec.set()
        if not is_cancelled:
            raise OSError(errno.EMFILE, "no descriptor left")
        children[child_id].scope.cancel()

    monkeypatch.setattr(stage.host.forks, "watch", end)
    spec = stage.spec(("/bin/sleep", "1000"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.host.spawn, spec)
        await has_exec.wait()
        (child,) = children.values()
        await wait_all_tasks_blocked(0.05)
        users = stage.host.machine.users
        was_gone = child.gone.is_set()
        os.kill(stage.launchpad, signal.SIGCONT)
    assert not was_gone
    assert users or "uid" in stage.host.machine.lacking
    assert child.gone.is_set()
    assert not stage.host.machine.users


async def test_a_start_that_is_cancelled_before_exec_keeps_its_user_as_long(
    stage: Stage, tmp_path: Path
) -> None:
    stage.sandbox = PROFILES["auto"]
    with hanging(tmp_path) as program:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.host.spawn, stage.spec((str(program),)))
            await eventually(lambda: stage.host.children)
            await wait_all_tasks_blocked(0.05)  # for its exec
            os.kill(stage.launchpad, signal.SIGSTOP)  # it tells of no end
            (child,) = stage.host.children.values()
            child.scope.cancel()
            await wait_all_tasks_blocked(0.05)
            was_gone = child.gone.is_set()
            os.kill(stage.launchpad, signal.SIGCONT)
    assert not was_gone
    assert child.gone.is_set()
    assert not stage.host.machine.users
