"""Attributes of an object come along with a commit of it."""

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from supervisor.workspace import commit as commit_module
from supervisor.workspace import commit_steps as steps_module
from supervisor.workspace.linux import rename, sync_file_system
from tests.supervisor.workspace.scene import (
    Scene,
    is_in_user_namespace,
    selection,
    write,
)

LONG_AGO_NS = 10**18


def commit(scene: Scene) -> None:
    """Commit all that was changed."""
    with scene.open() as workspace:
        result = workspace.commit(selection())
    assert not result.left


def attributes(path: Path) -> dict[str, bytes]:
    """Return the attributes that programs gave a path."""
    return {
        name: os.getxattr(path, name)
        for name in os.listxattr(path)
        if name.startswith("user.")
    }


# spec WS12
def test_the_attributes_of_a_new_directory_come_along(scene: Scene) -> None:
    scene.make()
    with scene.run() as top:
        (top / "new").mkdir()
        os.setxattr(top / "new", "user.note", b"\0\xff")
        (top / "new").chmod(0o555)
    commit(scene)
    assert attributes(scene.base / "new") == {"user.note": b"\0\xff"}
    assert (scene.base / "new").stat().st_mode & 0o7777 == 0o555


# spec WS8, WS12
def test_what_else_was_changed_of_a_file_comes_along_with_its_mode(
    scene: Scene,
) -> None:
    for name in ("noted", "dated", "plain"):
        write(scene.base / name)
    plain = (scene.base / "plain").stat().st_ino
    scene.make()
    with scene.run() as top:
        for name in ("noted", "dated", "plain"):
            (top / name).chmod(0o600)
        os.setxattr(top / "noted", "user.note", b"1")
        os.utime(top / "dated", ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert scene.rows() == [(name, "mode") for name in ("dated", "noted", "plain")]
    commit(scene)
    assert attributes(scene.base / "noted") == {"user.note": b"1"}
    assert (scene.base / "dated").stat().st_mtime_ns == LONG_AGO_NS
    assert (scene.base / "plain").stat().st_ino == plain  # it is not written anew
    modes = {(scene.base / name).stat().st_mode for name in ("noted", "dated", "plain")}
    assert modes == {0o100600}


@pytest.fixture
def noted(scene: Scene) -> Scene:
    """Return a workspace that has another mode and other attributes of ``d``.

    Its end is recorded.
    """
    (scene.base / "d").mkdir(mode=0o755)
    for name in ("kept", "changed", "removed"):
        os.setxattr(scene.base / "d", f"user.{name}", b"old")
    write(scene.base / "z")
    scene.make()
    with scene.run() as top:
        os.setxattr(top / "d", "user.changed", b"new")
        os.setxattr(top / "d", "user.made", b"new")
        os.removexattr(top / "d", "user.removed")
        (top / "d").chmod(0o500)
        write(top / "z", "new\n")
    scene.end_run()
    return scene


OLD = {"user.kept": b"old", "user.changed": b"old", "user.removed": b"old"}
NEW = {"user.kept": b"old", "user.changed": b"new", "user.made": b"new"}


# spec WS8, WS12
@pytest.mark.parametrize("name", ["d", "e"])
def test_the_attributes_of_a_directory_come_along_with_its_mode(
    noted: Scene, name: str
) -> None:
    if name == "e":
        if is_in_user_namespace():
            pytest.skip("a user renames no directory of the base")
        with noted.run() as top:
            (top / "d").rename(top / "e")
        noted.end_run()
    inode = (noted.base / "d").stat().st_ino
    commit(noted)
    assert attributes(noted.base / name) == NEW
    status = (noted.base / name).stat()
    assert (status.st_mode & 0o7777, status.st_ino) == (0o500, inode)
    assert noted.rows() == []


# spec WS12
def test_the_attributes_of_a_directory_go_back_with_its_mode(
    noted: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_then_rename(*words: Any) -> None:
        write(noted.base / "z", "operator's\n")
        rename(*words)

    with monkeypatch.context() as patched, noted.open() as workspace:
        patched.setattr(steps_module, "rename", save_then_rename)
        result = workspace.commit(selection())
    assert [one.path for one in result.conflicts] == [b"z"]
    assert attributes(noted.base / "d") == OLD
    assert (noted.base / "d").stat().st_mode & 0o7777 == 0o755
    with noted.open() as workspace:
        assert workspace.commit(selection(only=["d"])).applied == (b"d",)
    assert attributes(noted.base / "d") == NEW


# spec WS11
def test_attributes_of_a_directory_that_the_operator_has_changed_are_a_conflict(
    noted: Scene,
) -> None:
    os.setxattr(noted.base / "d", "user.kept", b"operator's")
    with noted.open() as workspace:
        result = workspace.commit(selection())
        assert [one.path for one in result.conflicts] == [b"d"]
        assert attributes(noted.base / "d") == OLD | {"user.kept": b"operator's"}
        assert workspace.commit(selection(theirs=["d"])).applied == (b"d", b"z")
    assert attributes(noted.base / "d") == NEW


# spec WS11: while the commit goes on, before the step and after the last judgement.
def test_an_attribute_that_is_changed_before_the_step_undoes_the_commit(
    noted: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_then_sync(fd: int) -> None:
        os.setxattr(noted.base / "d", "user.changed", b"operator's")
        sync_file_system(fd)

    with monkeypatch.context() as patched, noted.open() as workspace:
        patched.setattr(commit_module, "sync_file_system", change_then_sync)
        result = workspace.commit(selection())
    assert [one.path for one in result.conflicts] == [b"d"]
    assert attributes(noted.base / "d") == OLD | {"user.changed": b"operator's"}
    assert (noted.base / "z").read_text() == "text\n"


# spec WS11, WS12: what a commit has set is what was seen, also while the child goes on.
def test_attributes_are_judged_by_what_the_last_commit_has_set(noted: Scene) -> None:
    with noted.run() as top:
        with noted.open() as workspace:
            lock = workspace.directory.lock_for("child")
            assert workspace.commit(selection(), is_frozen=True).applied == (b"d", b"z")
        os.setxattr(top / "d", "user.made", b"newer")
        (top / "d").chmod(0o700)
        with noted.open() as workspace:
            assert workspace.commit(selection(), is_frozen=True).applied == (b"d",)
        assert attributes(noted.base / "d") == NEW | {"user.made": b"newer"}
        os.setxattr(noted.base / "d", "user.kept", b"operator's")
        (top / "d").chmod(0o500)
        with noted.open() as workspace:
            result = workspace.commit(selection(), is_frozen=True)
        assert [one.path for one in result.conflicts] == [b"d"]
        os.close(lock)
    assert attributes(noted.base / "d")["user.kept"] == b"operator's"


# spec WS11: a mode that both have set alike has no row, and the layer's attributes stay.
def test_attributes_are_still_judged_when_both_sides_have_set_one_mode(
    noted: Scene,
) -> None:
    (noted.base / "d").chmod(0o500)
    assert noted.rows() == [("z", "modified")]
    os.setxattr(noted.base / "d", "user.kept", b"operator's")
    with noted.run() as top:
        (top / "d").chmod(0o700)
    noted.end_run()
    with noted.open() as workspace:
        result = workspace.commit(selection())
    assert [one.path for one in result.conflicts] == [b"d"]
    assert attributes(noted.base / "d")["user.kept"] == b"operator's"


# spec WS3
def test_the_root_of_the_view_has_the_owner_mode_and_access_list_of_the_base(
    scene: Scene,
) -> None:
    name = "system.posix_acl_access"
    # Version 2; the owner rwx, root rx, the group none, the mask rx, others none.
    entries = ((1, 7, -1), (2, 5, 0), (4, 0, -1), (16, 5, -1), (32, 0, -1))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in entries)
    scene.base.chmod(0o1710)
    os.setxattr(scene.base, name, acl)
    if not is_in_user_namespace():
        os.chown(scene.base, 1234, 1235)
    scene.make()

    def facts(top: Path) -> tuple[object, ...]:
        status = top.stat()
        return status.st_uid, status.st_gid, status.st_mode, os.getxattr(top, name)

    with scene.mounted() as top:
        assert facts(top) == facts(scene.base)
    with scene.run() as top:
        write(top / "new")
    scene.end_run()
    with scene.open() as workspace:
        workspace.snapshot()  # a new upper, above a layer
        [other] = workspace.fork()
    for one in (scene, Scene(scene.top, other)):
        with one.mounted() as top:
            assert facts(top) == facts(scene.base)
