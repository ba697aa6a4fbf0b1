"""The directory of a workspace, of which another command has the lock."""

import fcntl
import os

import pytest

import supervisor.workspace
from supervisor.workspace.directory import NoWorkspaceError, look_at_state
from supervisor.workspace.run import prepare_use
from supervisor.workspace.workspace import Workspace
from tests.supervisor.workspace.scene import Scene


@pytest.fixture
def discarded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Return a scene whose workspace is discarded when a second command waits for it."""
    scene.make()
    first = scene.open()

    def discard(*_: object) -> None:
        monkeypatch.undo()
        with first:
            first.discard()

    monkeypatch.setattr("supervisor.workspace.directory.select.select", discard)
    return scene


# spec WS14, WS18
def test_a_command_that_waited_for_a_discard_finds_no_workspace(
    discarded: Scene,
) -> None:
    with pytest.raises(NoWorkspaceError):
        Workspace(str(discarded.state), "w", 10.0)


# spec WS5, WS18
def test_a_run_that_waited_for_a_discard_has_a_new_workspace(discarded: Scene) -> None:
    use = prepare_use(str(discarded.base), "review", str(discarded.state), "w")
    assert use.name == "w"
    assert os.listdir(discarded.state / "workspaces") == ["w"]
    assert discarded.rows() == []


# spec WS18: a host's figures look at the lock of a mount at any moment.
def test_a_look_for_figures_keeps_no_child_from_a_workspace(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.make()
    with scene.open() as workspace:
        os.close(workspace.directory.lock_for("first"))
        look = os.open(scene.upper.parent / "lock", os.O_RDONLY)
        fcntl.flock(look, fcntl.LOCK_SH)  # as long as it lasts
        assert workspace.directory.user() == ""
        ends = "supervisor.workspace.directory.select.select"
        monkeypatch.setattr(ends, lambda *_: os.close(look))
        lock = workspace.directory.lock_for("second")
        assert workspace.directory.user() == "second"
        assert look_at_state(str(scene.state), "w") == "in use"
        os.close(lock)


# spec Forms: the package has the class by the name that the forms say.
def test_the_package_hands_the_class_on() -> None:
    assert supervisor.workspace.Workspace is Workspace
    with pytest.raises(AttributeError, match="has no attribute 'Workspaces'"):
        getattr(supervisor.workspace, "Workspaces")  # noqa: B009 - it is not there
