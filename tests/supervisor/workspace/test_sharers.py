"""Children that share a workspace.

One that starts while the last one's end is recorded.
"""

import os
import threading
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from supervisor.children import child_workspaces
from supervisor.children.child import Child
from supervisor.sandbox.plan import PROFILES
from supervisor.workspace.changes import Row
from supervisor.workspace.run import prepare_use, record_end
from supervisor.workspace.settings import WorkspaceSettings
from supervisor.workspace.use import WorkspaceUse
from supervisor.workspace.workspace import Workspace
from tests.helpers.stage import Stage, stage

__all__ = ["stage"]


# spec WS19
@pytest.mark.skipif(os.geteuid() != 0, reason="it takes a host that is root")
async def test_a_child_waits_until_the_end_of_the_last_sharer_is_recorded(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    settings = WorkspaceSettings(shared=True)
    state = str(tmp_path / "workspaces")
    use = prepare_use(str(base), "review", state, "w", settings)
    is_recording, may_record = trio.Event(), threading.Event()
    real = record_end

    def record_later(
        use: WorkspaceUse, *, is_last: bool
    ) -> tuple[tuple[Row, ...], str]:
        trio.from_thread.run_sync(is_recording.set)
        may_record.wait()
        return real(use, is_last=is_last)

    monkeypatch.setattr(child_workspaces, "record_end", record_later)

    async def start(script: str) -> Child:
        return await stage.sh(
            script,
            cwd=str(base),
            root=str(base),
            sandbox=PROFILES["auto"],
            workspaces=(use,),
        )

    first = await start("exec sleep 600")
    second: list[Child] = []

    async def start_second() -> None:
        second.append(await start("echo second > a"))

    first.stop(0)
    await is_recording.wait()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(start_second)
            while not first.gone.statistics().tasks_waiting:
                await wait_all_tasks_blocked()
            may_record.set()
    finally:
        may_record.set()
    assert await second[0].wait_gone() == 0
    with Workspace(state, "w") as workspace:
        assert [row.path for row in workspace.changes()] == [b"a"]
