"""Starts of a child that fail leave a workspace as it was."""

import errno
import os

import pytest

from supervisor.workspace import run as run_module
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.run import mount_for_child
from supervisor.workspace.use import WorkspaceUse
from supervisor.workspace.verbs import do_verb
from tests.supervisor.workspace.scene import Scene


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


# spec WS7
@pytest.mark.parametrize("is_left", [False, True])
def test_a_start_that_fails_leaves_no_workspace_behind(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, is_left: bool
) -> None:
    scene.make()
    use = WorkspaceUse("w", str(scene.base), "review", str(scene.state))
    if is_left:  # by a host that died before
        mount_for_child(use, "child-1").close()
    monkeypatch.setattr(run_module, "hold_overlay", refuse)
    with pytest.raises(WorkspaceError, match="cannot mount workspace 'w'"):
        mount_for_child(use, "child-2")
    [row] = do_verb(str(scene.state), "list", {}).result
    assert row["state"] == ("left behind" if is_left else "idle")
