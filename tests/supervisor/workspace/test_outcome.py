"""The end of a run: what it says, and that it waits for a command that looks."""

import os
import select

import pytest

from supervisor.workspace.directory import WorkspaceDirectory
from supervisor.workspace.outcome import end_run
from supervisor.workspace.use import WorkspaceUse
from tests.supervisor.workspace.scene import Scene, write


# spec WS5
def test_a_commit_at_the_end_of_a_run_waits_for_another_command_that_looks(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.make()
    with scene.run() as top:
        write(top / "a")
    looks = WorkspaceDirectory(str(scene.upper.parent), "w")
    wait = select.select

    def end_look(*words: object) -> object:
        monkeypatch.setattr(select, "select", wait)
        looks.close()
        return wait((), (), (), 0)

    monkeypatch.setattr(select, "select", end_look)
    said: list[str] = []
    use = WorkspaceUse("w", os.fspath(scene.base), "review", os.fspath(scene.state))
    end_run(use, 0, "on-success", said.append, lambda *_, **__: None)
    assert said == ["workspace w: 1 of 1 committed"]
    assert (scene.base / "a").read_text() == "text\n"
