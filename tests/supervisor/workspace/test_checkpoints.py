"""Snapshots that belong to checkpoints.

Counted apart, dropped, gone back to later.
"""

import os

import pytest

from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.settings import WorkspaceSettings
from supervisor.workspace.verbs import VerbError, do_verb
from tests.supervisor.workspace.scene import Scene, write


@pytest.fixture
def made(scene: Scene) -> Scene:
    """A workspace that keeps two snapshots, with one of the operator's."""
    scene.make()
    write(scene.upper / "file", "operator\n")
    with scene.open() as workspace:
        workspace.state.settings = WorkspaceSettings(keep=2)
        workspace.snapshot("mine")
    return scene


def labels(scene: Scene) -> list[str]:
    with scene.open() as workspace:
        return workspace.state.labels()


# spec WS15, WS16: a child that makes many drives none of the operator's out
def test_snapshots_of_checkpoints_are_counted_apart(made: Scene) -> None:
    for number in range(4):
        write(made.upper / "file", f"{number}\n")
        with made.open() as workspace:
            workspace.snapshot(f"ckpt-{number}", of_checkpoint=True)
    assert labels(made) == ["mine", "ckpt-2", "ckpt-3"]
    for label in ("yours", "theirs"):
        with made.open() as workspace:
            workspace.snapshot(label)
    assert labels(made) == ["ckpt-2", "ckpt-3", "yours", "theirs"]
    with made.open() as workspace:
        assert workspace.drop_snapshot("ckpt-2")
        assert not workspace.drop_snapshot("ckpt-2")
    assert labels(made) == ["ckpt-3", "yours", "theirs"]
    assert not (made.upper.parent / "seen-ckpt-2").exists()


# spec WS16
def test_a_workspace_goes_back_later_and_keeps_what_it_goes_back_to(
    made: Scene,
) -> None:
    with made.open() as workspace:
        with pytest.raises(WorkspaceError, match="cannot find snapshot 'none'"):
            workspace.restore_later("none")
        workspace.restore_later("mine")
    for label in ("two", "three"):
        write(made.upper / "file", f"{label}\n")
        with made.open() as workspace:
            workspace.snapshot(label)
    write(made.upper / "new")
    # It is the oldest of three, of which two are kept.
    assert labels(made) == ["mine", "two", "three"]
    with made.open() as workspace:
        done = workspace.finish_restore()
        assert done is not None
        assert (done.label, done.lost) == ("mine", 2)
        assert workspace.finish_restore() is None
        (row,) = workspace.changes()
        assert (row.path, row.size_bytes) == (b"file", len("operator\n"))
        (name,) = workspace.fork()
    assert name == "w-1"


# spec WS16: what the operator has chosen since goes before what the child has asked
def test_a_restore_by_hand_ends_what_the_child_has_asked(made: Scene) -> None:
    with made.open() as workspace:
        workspace.snapshot("second")
        workspace.restore_later("mine")
        workspace.restore("second")
    with made.open() as workspace:
        assert workspace.finish_restore() is None
        workspace.restore_later("mine")
        workspace.drop_snapshot("mine")
    with made.open() as workspace:
        assert workspace.finish_restore() is None


# spec WS15: before a person is asked whether what was changed since is to be dropped
@pytest.mark.parametrize("is_dry", [True, False])
def test_a_workspace_that_a_child_has_is_not_restored(
    made: Scene, *, is_dry: bool
) -> None:
    words = {"name": "w", "label": "mine", "dry_run": is_dry}
    with made.run() as top:
        with made.open() as workspace:
            lock = workspace.directory.lock_for("child-1")
        write(top / "file", "child\n")
        with pytest.raises(VerbError, match="child child-1 has it; wait for its end"):
            do_verb(str(made.state), "restore", words)
        write(top / "new", "child\n")
        os.close(lock)
    made.end_run()
    assert made.rows() == [("file", "added"), ("new", "added")]
    assert labels(made) == ["mine"]
    assert do_verb(str(made.state), "restore", words).result == {"lost": 2}
