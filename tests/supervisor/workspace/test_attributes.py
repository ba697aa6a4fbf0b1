"""What belongs to an object beside its content comes along with a commit of it."""

import os
from pathlib import Path

from tests.supervisor.workspace.scene import Scene, selection, write

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
