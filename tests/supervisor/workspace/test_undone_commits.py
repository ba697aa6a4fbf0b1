"""Undoing a commit ends, whatever the operator has put in its way."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from supervisor.workspace import commit_steps as steps_module
from supervisor.workspace.commit import CommitResult, Committer
from supervisor.workspace.directory import WorkspaceDirectory, WorkspaceError
from supervisor.workspace.linux import rename
from supervisor.workspace.outcome import drop_unused, end_run
from supervisor.workspace.run import drop_ended, mount_for_child, record_end
from supervisor.workspace.sweep import sweep_workspaces
from supervisor.workspace.use import WorkspaceUse
from supervisor.workspace.verbs import VerbError, do_verb, end_cut
from tests.supervisor.workspace.scene import Scene, selection, tree_of, write

pytestmark = pytest.mark.slow


class PowerCutError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def changed(scene: Scene) -> Scene:
    """Return a workspace with ``d/a`` removed, ``e`` renamed ``f``, ``z`` edited."""
    for path in ("d/a", "e/b", "z"):
        write(scene.base / path, "old\n")
    scene.make()
    with scene.run() as top:
        (top / "d/a").unlink()
        (top / "e").rename(top / "f")
        write(top / "z", "new\n")
    scene.end_run()
    return scene


def make_file(base: Path) -> None:
    write(base / "d/a", "operator's\n")


def make_directory(base: Path) -> None:
    write(base / "e/b", "operator's\n")


def remove_directory(base: Path) -> None:
    shutil.rmtree(base / "d")


def commit_and_undo(
    changed: Scene,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Path], None],
    *,
    is_cut: bool = False,
) -> CommitResult:
    """Commit while the operator saves ``z``, which undoes all, after another edit."""
    saved = write(changed.top / "saved", "operator's\n")
    is_undone = False

    def edit_then_rename(directory: int, name: bytes, *words: Any) -> None:
        nonlocal is_undone
        if words[1] == b"z" and not is_undone:
            is_undone = True
            edit(changed.base)
            os.rename(saved, changed.base / "z")
        elif is_undone and is_cut and b"z" not in (name, words[1]):
            raise PowerCutError
        rename(directory, name, *words)

    with monkeypatch.context() as patched, changed.open() as workspace:
        patched.setattr(steps_module, "rename", edit_then_rename)
        return workspace.commit(selection())


# spec WS12
@pytest.mark.parametrize(
    ("edit", "made", "path", "aside"),
    [
        (make_file, "d/a", "d/a", "d/a.undone-*"),
        (make_directory, "e/b", "e", "e.undone-*/b"),
        (remove_directory, "z", "d/a", "a.undone-*"),
    ],
)
def test_what_cannot_go_back_to_its_place_gets_a_name_near_it(
    changed: Scene,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[Path], None],
    made: str,
    path: str,
    aside: str,
) -> None:
    result = commit_and_undo(changed, monkeypatch, edit)
    assert result.applied == ()
    [found] = changed.base.glob(aside)
    assert found.read_text() == "old\n"
    reasons = {os.fsdecode(one.path): one.reason for one in result.conflicts}
    assert aside.partition("*")[0] in reasons[path]
    assert (changed.base / made).read_text() == "operator's\n"
    assert (changed.base / "z").read_text() == "operator's\n"
    with changed.open() as workspace:
        assert workspace.finish_commit() is None


# spec WS12
def test_a_commit_that_is_undone_after_a_crash_says_what_could_not_go_back(
    changed: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PowerCutError):
        commit_and_undo(changed, monkeypatch, make_file, is_cut=True)
    assert tree_of(changed.base)[b"d/a"][2] == b"operator's\n"
    with changed.open() as workspace:
        [note] = end_cut(workspace)
    assert "a commit that was interrupted was undone" in note
    [aside] = changed.base.rglob("*.undone-*")
    assert aside.read_text() == "old\n"
    assert str(aside.relative_to(changed.base)) in note
    assert (changed.base / "e/b").read_text() == "old\n"
    with changed.open() as workspace:
        assert workspace.finish_commit() is None


def move_directories(base: Path) -> None:
    (base / "d").rename(base / "moved")
    (base / "d").mkdir()
    (base / "g/h").rename(base / "d/h")


# spec WS12
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_was_done_in_a_directory_is_undone_where_the_operator_has_moved_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, is_cut: bool
) -> None:
    for path in ("d/edited", "d/mode", "d/removed", "g/h/i/edited", "z"):
        write(scene.base / path, "old\n")
    (scene.base / "d/mode").chmod(0o755)
    scene.make()
    with scene.run() as top:
        (top / "d/removed").unlink()
        (top / "d/mode").chmod(0o700)
        for path in ("d/edited", "d/new", "d/n/new", "g/h/i/edited", "z"):
            write(top / path, "new\n")
    scene.end_run()
    scene.copy("expected", scene.base)
    move_directories(scene.top / "expected")
    write(scene.top / "expected/z", "operator's\n")
    if is_cut:
        with pytest.raises(PowerCutError):
            commit_and_undo(scene, monkeypatch, move_directories, is_cut=True)
        with scene.open() as workspace:
            assert workspace.finish_commit() is False
            assert workspace.text_of_undone() == "undone: the base is as it was"
    else:
        result = commit_and_undo(scene, monkeypatch, move_directories)
        assert result.applied == ()
        assert [one.path for one in result.conflicts] == [b"z"]
    assert tree_of(scene.base) == tree_of(scene.top / "expected")


# spec WS12
@pytest.mark.parametrize("old", ["d/edited", "d/replaced"])
def test_what_was_replaced_is_kept_where_the_operator_has_moved_what_replaced_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    for path in ("d/edited", "d/replaced/old", "z"):
        write(scene.base / path, "old\n")
    scene.make()
    with scene.run() as top:
        shutil.rmtree(top / "d/replaced")
        for path in ("d/edited", "d/replaced", "z"):
            write(top / path, "new\n")
    scene.end_run()

    def move(base: Path) -> None:
        (base / old).rename(base / "moved")

    result = commit_and_undo(scene, monkeypatch, move)
    assert result.applied == ()
    [aside] = scene.base.glob(f"{old}.undone-*")
    kept = aside / "old" if aside.is_dir() else aside
    assert kept.read_text() == "old\n"
    assert (scene.base / "moved").read_text() == "new\n"
    reasons = {os.fsdecode(one.path): one.reason for one in result.conflicts}
    assert aside.name in reasons[old]


@pytest.fixture
def edited(scene: Scene) -> Scene:
    """Return a workspace with ``a`` and ``b`` edited, and ``r`` removed."""
    for path in ("a", "b", "r"):
        write(scene.base / path, "old\n")
    scene.make()
    with scene.run() as top:
        for path in ("a", "b"):
            write(top / path, "new\n")
        (top / "r").unlink()
    scene.end_run()
    return scene


def save_by_rename(path: Path) -> None:
    """Save a file as most editors do."""
    write(path.with_name("saved"), "operator's\n").rename(path)


def save_in_place(path: Path) -> None:
    write(path, "operator's\n")


def cut_commit(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    at: bytes,
    edit: Callable[[], None] | None = None,
    *,
    is_in_use: bool = False,
) -> None:
    """Commit all, and die before the step of a path; or right after it, and an edit."""

    def cut(directory: int, name: bytes, to: int, to_name: bytes, flags: int) -> None:
        if at in (name, to_name):
            if edit is not None:
                edit()
                rename(directory, name, to, to_name, flags)
            raise PowerCutError
        rename(directory, name, to, to_name, flags)

    with monkeypatch.context() as patched, scene.open() as workspace:
        patched.setattr(steps_module, "rename", cut)
        lock = workspace.directory.lock_for("child") if is_in_use else None
        with pytest.raises(PowerCutError):
            workspace.commit(selection(), is_frozen=is_in_use)
        if lock is not None:
            os.close(lock)


# spec WS12
@pytest.mark.parametrize(
    ("save", "is_undone"), [(save_by_rename, True), (save_in_place, False)]
)
def test_a_file_that_is_saved_after_a_cut_stays(
    edited: Scene,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Path], None],
    *,
    is_undone: bool,
) -> None:
    cut_commit(edited, monkeypatch, b"b")
    assert (edited.base / "a").read_text() == "new\n"
    save(edited.base / "a")
    with edited.open() as workspace:
        notes = end_cut(workspace)
    assert bool(notes) is is_undone
    assert (edited.base / "a").read_text() == "operator's\n"
    assert (edited.base / "b").read_text() == ("old\n" if is_undone else "new\n")
    assert (edited.base / "r").exists() is is_undone
    assert not list(edited.base.glob(".sandhost-*"))


# spec WS12
@pytest.mark.parametrize("is_in_use", [False, True])
@pytest.mark.parametrize("path", ["a", "r"])
@pytest.mark.parametrize("save", [save_by_rename, save_in_place])
def test_a_file_that_is_saved_just_before_its_step_comes_back_after_a_cut(
    edited: Scene,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Path], None],
    path: str,
    *,
    is_in_use: bool,
) -> None:
    file = edited.base / path
    cut_commit(
        edited, monkeypatch, path.encode(), lambda: save(file), is_in_use=is_in_use
    )
    with edited.open() as workspace:
        [note] = end_cut(workspace)
    assert note.endswith(
        "a commit that was interrupted was undone: the base is as it was"
    )
    texts = {one: (edited.base / one).read_text() for one in "abr"}
    assert texts == dict.fromkeys("abr", "old\n") | {path: "operator's\n"}


# spec WS12
@pytest.mark.parametrize("path", ["d/a", "d/r"])
@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_file_that_is_saved_just_before_its_step_is_kept_where_its_directory_goes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str, *, is_in_use: bool
) -> None:
    for name in ("d/a", "d/r"):
        write(scene.base / name, "old\n")
    scene.make()
    with scene.run() as top:
        write(top / "d/a", "new\n")
        (top / "d/r").unlink()
    scene.end_run()
    name = os.path.basename(path)
    edit = partial(save_by_rename, scene.base / path)
    cut_commit(scene, monkeypatch, name.encode(), edit, is_in_use=is_in_use)
    shutil.rmtree(scene.base / "d")
    with scene.open() as workspace:
        [note] = end_cut(workspace)
    [aside] = scene.base.glob(f"{name}.undone-*")
    assert aside.read_text() == "operator's\n"
    assert f"'{path}': " in note
    assert aside.name in note


def find_stage(scene: Scene) -> Path:
    """Return the staging directory of a commit that was cut."""
    places = (scene.base, scene.upper.parent)
    [stage] = [one for place in places for one in place.glob(".sandhost-commit-*")]
    return stage


def stage_in(monkeypatch: pytest.MonkeyPatch, holder: str) -> None:
    """Have commits stage in the base, as where that is a mount of its own, or not."""
    monkeypatch.setattr(Committer, "find_holder", lambda _: holder)


def given_up(stage: Path) -> str:
    """Return how a commit is told whose staging directory is gone."""
    text = f"a commit that was interrupted was given up: '{stage}': it is gone"
    what = "with what the commit had replaced"
    return f"{text}, {what}; the base may have a part of the commit"


# spec WS12, WS14
@pytest.mark.parametrize("holder", ["base", "own"])
@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_cut_commit_whose_stage_is_gone_is_given_up_and_told(
    edited: Scene, monkeypatch: pytest.MonkeyPatch, holder: str, *, is_in_use: bool
) -> None:
    stage_in(monkeypatch, holder)
    cut_commit(edited, monkeypatch, b"b", is_in_use=is_in_use)
    stage = find_stage(edited)
    shutil.rmtree(stage)
    [note] = do_verb(str(edited.state), "list", {}).notes
    assert note == f"w: {given_up(stage)}"
    assert edited.rows() == [("b", "modified"), ("r", "deleted")]
    with edited.open() as workspace:
        assert workspace.commit(selection()).applied == (b"b", b"r")
    assert (edited.base / "a").read_text() == "new\n"
    assert tree_of(edited.base) == edited.seen()


def start_child(use: WorkspaceUse) -> list[str]:
    with pytest.raises(WorkspaceError) as raised:
        mount_for_child(use, "child-1")
    mount_for_child(use, "child-1").close()
    return [str(raised.value)]


def end_child(use: WorkspaceUse) -> list[str]:
    rows, text = record_end(use, is_last=True)
    assert [row.path for row in rows] == [b"b", b"r"]
    return [text]


def drop_with_child(use: WorkspaceUse) -> list[str]:
    with pytest.raises(WorkspaceError) as raised:
        drop_ended(replace(use, drop="always"))
    assert drop_ended(replace(use, drop="always")) == 2
    return [str(raised.value)]


def end_command(use: WorkspaceUse) -> list[str]:
    said: list[str] = []
    end_run(use, 0, "never", said.append, lambda *_, **__: None)
    assert said.pop() == "workspace w: 2 changed; 'sandhost workspace diff w'"
    return [one.removeprefix("workspace w: ") for one in said]


def discard(use: WorkspaceUse) -> list[str]:
    notes = do_verb(use.state_dir, "discard", {"name": "w"}).notes
    return [one.removeprefix("w: ") for one in notes]


def sweep(use: WorkspaceUse) -> list[str]:
    path = os.path.join(use.state_dir, "workspaces/w")
    start = f"a commit that was interrupted: {path} ("
    return [
        one.removeprefix(start).removesuffix(")")
        for one in sweep_workspaces(use.state_dir)
    ]


# spec WS12
@pytest.mark.parametrize(
    "work", [start_child, end_child, drop_with_child, end_command, discard, sweep]
)
def test_each_that_gives_up_a_cut_commit_tells_it(
    edited: Scene,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[WorkspaceUse], list[str]],
) -> None:
    stage_in(monkeypatch, "base")
    cut_commit(edited, monkeypatch, b"b")
    stage = find_stage(edited)
    shutil.rmtree(stage)
    use = WorkspaceUse("w", str(edited.base), "review", str(edited.state))
    assert work(use) == [given_up(stage)]


# spec WS12
def test_a_discard_tells_what_a_commit_that_it_undoes_could_not_bring_back(
    changed: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PowerCutError):
        commit_and_undo(changed, monkeypatch, make_file, is_cut=True)
    [note] = do_verb(str(changed.state), "discard", {"name": "w"}).notes
    [aside] = changed.base.rglob("*.undone-*")
    assert str(aside.relative_to(changed.base)) in note


# spec WS12
def test_a_refused_run_leaves_a_cut_commit_to_a_command_that_tells_its_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(scene.base / "a", "old\n")
    scene.make()
    with scene.run() as top:
        write(top / "a", "new\n")
    scene.end_run()
    stage_in(monkeypatch, "base")
    cut_commit(scene, monkeypatch, b"a", lambda: None)
    stage = find_stage(scene)
    shutil.rmtree(stage)
    drop_unused(WorkspaceUse("w", str(scene.base), "review", str(scene.state)))
    assert do_verb(str(scene.state), "list", {}).notes == [f"w: {given_up(stage)}"]


# spec WS12
def test_a_commit_whose_stage_goes_while_it_is_done_is_a_conflict(
    edited: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_in(monkeypatch, "base")
    with monkeypatch.context() as patched, edited.open() as workspace:
        write_file = WorkspaceDirectory.write

        def remove_stage(
            own: WorkspaceDirectory, name: str, data: bytes | None
        ) -> None:
            write_file(own, name, data)
            if name == "commit" and data is not None and b"applying" in data:
                shutil.rmtree(find_stage(edited))

        patched.setattr(WorkspaceDirectory, "write", remove_stage)
        [conflict] = workspace.commit(selection()).conflicts
    assert conflict.path.startswith(os.fsencode(edited.base / ".sandhost-commit-"))
    assert {one: (edited.base / one).read_text() for one in "abr"} == dict.fromkeys(
        "abr", "old\n"
    )


def refuse(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


# spec WS14
@pytest.mark.parametrize("holder", ["base", "own"])
def test_a_discard_gives_up_a_commit_unless_it_would_remove_what_that_replaced(
    edited: Scene, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    stage_in(monkeypatch, holder)
    cut_commit(edited, monkeypatch, b"b")
    stage = find_stage(edited)
    monkeypatch.setattr(steps_module, "rename", refuse)
    if holder == "own":
        with pytest.raises(
            VerbError, match="Read-only file system; a part of it is in"
        ):
            do_verb(str(edited.state), "discard", {"name": "w"})
    else:
        [note] = do_verb(str(edited.state), "discard", {"name": "w"}).notes
        where = f"a part of it is in the base, and what it replaced in '{stage}'"
        assert note == f"w: its commit was given up: Read-only file system; {where}"
    assert edited.upper.exists() is (holder == "own")
    assert "old\n" in {one.read_text() for one in stage.iterdir()}
