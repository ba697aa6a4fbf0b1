"""A commit that is refused or cannot go on says truly what the base has."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from supervisor.workspace import commit_steps as steps_module
from supervisor.workspace.commit import UnfinishedCommitError
from supervisor.workspace.commit_journal import STAGING_PREFIX
from supervisor.workspace.directory import WorkspaceDirectory
from supervisor.workspace.verbs import do_verb, word_error
from tests.supervisor.workspace.scene import Scene, selection, tree_of, write


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 15)


def change(scene: Scene, *paths: str) -> Path:
    """Make some files, and edit them in a workspace; return the base."""
    for path in paths:
        write(scene.base / path)
    scene.make()
    with scene.run() as top:
        for path in paths:
            write(top / path, "new\n")
    scene.end_run()
    return scene.base


# spec WS11
@pytest.mark.parametrize("name", ["b", ".envrc"])
def test_a_commit_that_is_refused_drops_nothing(scene: Scene, name: str) -> None:
    base = change(scene, "a", name)
    write(base / "b", "the operator's\n")
    seen = scene.seen()
    with scene.open() as workspace:
        assert workspace.commit(selection(mine=["a"])).is_refused
    assert scene.seen() == seen


# spec WS12
def test_a_commit_that_has_no_room_drops_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(scene, "a", "b")
    seen, rows = scene.seen(), scene.rows()
    with monkeypatch.context() as patch, scene.open() as workspace:
        patch.setattr(steps_module, "rename", full)
        with pytest.raises(OSError, match="No space"):
            workspace.commit(selection(mine=["a"]))
    assert (scene.seen(), scene.rows()) == (seen, rows)
    with scene.open() as workspace:
        workspace.commit(selection(mine=["a"]))
    assert scene.rows() == []
    assert tree_of(scene.base) == scene.seen()
    assert (scene.base / "a").read_text() == "text\n"


# spec WS12
def test_a_commit_that_cannot_stage_leaves_nothing_to_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(scene, "a")
    mkdir = os.mkdir

    def make(path: Any, *mode: int, dir_fd: int | None = None) -> None:
        if os.fsencode(path).startswith(STAGING_PREFIX):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        mkdir(path, *mode, dir_fd=dir_fd)

    with monkeypatch.context() as patch, scene.open() as workspace:
        patch.setattr(os, "mkdir", make)
        with pytest.raises(OSError, match="Read-only file system"):
            workspace.commit(selection())
    assert do_verb(str(scene.state), "list", {}).notes == []


# spec WS11, WS12
def test_a_mode_that_was_set_and_set_back_is_no_conflict(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = change(scene, "b")
    write(base / "a")
    with scene.run() as top:
        (top / "a").chmod(0o600)
    scene.end_run()
    with monkeypatch.context() as patch, scene.open() as workspace:
        patch.setattr(steps_module, "rename", full)
        with pytest.raises(OSError, match="No space"):
            workspace.commit(selection())
    assert (base / "a").stat().st_mode & 0o777 == 0o644
    with scene.open() as workspace:
        assert workspace.commit(selection()).applied == (b"a", b"b")


# spec WS12
def test_a_disk_that_fills_when_the_base_has_all_of_it_is_told_so(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = change(scene, "a")
    real = WorkspaceDirectory.write

    def write_file(
        directory: WorkspaceDirectory, name: str, data: bytes | None
    ) -> None:
        if name == "record" and (base / "a").read_text() == "new\n":
            full()
        real(directory, name, data)

    with monkeypatch.context() as patch, scene.open() as workspace:
        patch.setattr(WorkspaceDirectory, "write", write_file)
        with pytest.raises(UnfinishedCommitError) as raised:
            workspace.commit(selection())
    assert "No space left on device; its changes are in the base" in str(raised.value)
    with scene.open() as workspace:
        assert workspace.finish_commit()
    assert scene.rows() == []


def test_an_error_of_a_descriptor_has_no_name() -> None:
    for path in (15, "/proc/self/fd/15", None):
        line = word_error(OSError(errno.EIO, os.strerror(errno.EIO), path))
        assert line == "cannot use the workspace: Input/output error; nothing changed"
