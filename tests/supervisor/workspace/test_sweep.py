"""Leftovers of a crash are found, and ended where that is certain."""

import fcntl
import os
from pathlib import Path

import pytest

from supervisor.doctor.leftovers import crashed_workspaces
from supervisor.workspace.directory import WorkspaceDirectory
from supervisor.workspace.sweep import sweep_workspaces
from supervisor.workspace.verbs import do_verb
from tests.supervisor.workspace.scene import Scene, tree_of
from tests.supervisor.workspace.test_commit_crash import (
    is_commit_cut_at,
    kill,
    prepare,
)


# spec WS12, WS18
@pytest.mark.slow
def test_a_commit_that_was_cut_is_ended_and_told(scene: Scene) -> None:
    told: set[bool] = set()
    for number in range(20, 400, 20):
        before, after = prepare(scene)
        if not is_commit_cut_at(scene, number, kill):
            break
        was_cut = (scene.upper.parent / "commit").exists()
        left = crashed_workspaces(str(scene.state))
        lines = list(sweep_workspaces(str(scene.state)))
        assert bool(lines) == bool(left) == was_cut, number
        is_new = tree_of(scene.base) == after
        assert is_new or tree_of(scene.base) == before, number
        if was_cut:
            (line,) = lines
            word = "finished" if is_new else "undone: the base is as it was"
            where = scene.upper.parent
            assert line == f"a commit that was interrupted: {where} ({word})"
            told.add(is_new)
        assert list(sweep_workspaces(str(scene.state))) == []
        scene.clear()
    assert told == {True, False}


# spec WS18
def test_what_was_half_made_goes_unless_somebody_works_on_it(scene: Scene) -> None:
    scene.make()
    where = scene.upper.parent.parent
    half, busy = where / "x.discarded-12ab", where / "y.discarded-34cd"
    for path in (half, busy):
        path.mkdir()
        (path / "upper").mkdir()
    working = WorkspaceDirectory(str(busy), "y")
    try:
        (line,) = sweep_workspaces(str(scene.state))
    finally:
        working.close()
    assert line == f"a workspace that was half made or half discarded: {half} (removed)"
    assert sorted(os.listdir(where)) == ["w", "y.discarded-34cd"]


# spec WS7, WS18
def test_a_list_removes_what_was_half_discarded_and_not_what_is_being_made(
    scene: Scene,
) -> None:
    scene.make()
    where = scene.upper.parent.parent
    gone, made = where / "x.discarded-12ab", where / "y.discarded-new-34cd"
    gone.mkdir()
    made.mkdir()
    (line,) = do_verb(str(scene.state), "list", {}).notes
    assert "x.discarded-12ab (removed)" in line
    assert sorted(os.listdir(where)) == ["w", made.name]
    os.utime(made, (0, 0))
    do_verb(str(scene.state), "list", {})
    assert os.listdir(where) == ["w"]


# spec WS7
def test_a_look_takes_no_lock_of_what_another_command_is_making(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.make()
    made = scene.upper.parent.parent / "y.discarded-new-34cd"
    made.mkdir()
    lock = fcntl.flock

    def lock_beside_the_maker(fd: int, how: int) -> None:
        lock(fd, how)
        if os.path.samestat(os.fstat(fd), made.stat()):
            with monkeypatch.context() as alone:
                alone.setattr(fcntl, "flock", lock)
                WorkspaceDirectory(str(made), "y").close()  # refused if it is locked

    monkeypatch.setattr(fcntl, "flock", lock_beside_the_maker)
    do_verb(str(scene.state), "list", {})
    assert list(sweep_workspaces(str(scene.state))) == []
    assert made.is_dir()


# spec WS18
@pytest.mark.parametrize("name", ["base", "repo.discarded-2024"])
def test_a_stage_that_no_workspace_here_has_is_told_and_left_alone(
    scene: Scene, name: str
) -> None:
    scene.base = scene.base.rename(scene.base.with_name(name))
    scene.make()
    stage = scene.base / ".sandhost-commit-0123456789abcdef"
    stage.mkdir()
    (line,) = sweep_workspaces(str(scene.state))
    assert "left alone" in line
    assert str(stage) in line
    assert Path(stage).is_dir()
