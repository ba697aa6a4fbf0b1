"""``hide``: names that a child does not see, and that no commit touches."""

import os
import stat
from pathlib import Path

import pytest

from supervisor.workspace.hidden_files import find_hidden, matches_any_depth
from supervisor.workspace.settings import WorkspaceSettings
from tests.supervisor.workspace.scene import Scene, selection, tree_of, write


def set_hidden(scene: Scene, *patterns: str) -> None:
    """Set what the workspace hides from the next start on."""
    with scene.open() as workspace:
        workspace.state.settings = WorkspaceSettings(hide=patterns)
        workspace.directory.write_state(workspace.state)


@pytest.fixture
def secrets(scene: Scene) -> Scene:
    """Return a base with secrets, and a workspace that hides them."""
    for name in (".env", "a/.env", "a/b/key.pem", "keys/one", "keys/two"):
        write(scene.base / name, "secret\n", 0o600)
    for name in ("a/open", "a/b/open", "open"):
        write(scene.base / name)
    scene.make()
    set_hidden(scene, ".env", "*.pem", "/keys")
    return scene


def names(top: Path) -> set[str]:
    return {os.fsdecode(path) for path in tree_of(top)}


# spec WS6
def test_what_is_hidden_is_absent_and_no_row(secrets: Scene) -> None:
    with secrets.run() as top:
        assert names(top) == {"a", "a/b", "a/b/open", "a/open", "open"}
        with pytest.raises(FileNotFoundError):
            os.stat(top / "keys/one")
    assert secrets.rows() == []


# spec WS6
def test_directories_look_as_in_the_base(secrets: Scene) -> None:
    for name, mode, owner in (("a", 0o751, 12), ("a/b", 0o2770, 13)):
        os.chown(secrets.base / name, owner, owner)
        (secrets.base / name).chmod(mode)
        os.utime(secrets.base / name, (1000, 2000))
    with secrets.run() as top:
        for name in ("a", "a/b"):
            old, new = ((where / name).stat() for where in (secrets.base, top))
            for field in ("st_mode", "st_uid", "st_gid", "st_mtime_ns"):
                assert getattr(new, field) == getattr(old, field)


# spec WS6
def test_a_hidden_file_is_never_written_over(secrets: Scene) -> None:
    with secrets.run() as top:
        write(top / ".env", "forged\n")
        write(top / "keys/one", "forged\n")
        write(top / "new.pem", "made\n")
        write(top / "open", "changed\n")
    everything = selection(allow=["*"])
    with secrets.open() as workspace:
        result = workspace.commit(everything)
        assert result.is_refused
        assert result.guarded == (b".env", b"keys/one")
        assert result.hidden == {b".env", b"keys/one"}
        assert workspace.commit(selection(only=["new.pem"])).guarded == (b"new.pem",)
        result = workspace.commit(selection(only=["open"]))
        assert result.applied == (b"open",)
        result = workspace.commit(selection(but=[".env", "keys"], allow=["new.pem"]))
        assert (result.applied, result.conflicts) == ((b"new.pem",), ())
    assert (secrets.base / ".env").read_text() == "secret\n"
    assert (secrets.base / "keys/one").read_text() == "secret\n"


# spec WS6
def test_a_removed_directory_leaves_what_is_hidden_in_it(secrets: Scene) -> None:
    with secrets.run() as top:
        for name in ("a/open", "a/b/open"):
            (top / name).unlink()
        (top / "a/b").rmdir()
        (top / "a").rmdir()
    assert secrets.rows() == [("a/b/open", "deleted"), ("a/open", "deleted")]
    with secrets.open() as workspace:
        assert workspace.commit(selection()).conflicts == ()
    assert {"a/.env", "a/b/key.pem"} <= names(secrets.base)
    assert not names(secrets.base) & {"a/open", "a/b/open"}
    assert secrets.rows() == []


# spec WS6
def test_a_directory_that_was_made_anew_takes_nothing_hidden_away(
    secrets: Scene,
) -> None:
    with secrets.run() as top:
        for name in ("a/open", "a/b/open"):
            (top / name).unlink()
        (top / "a/b").rmdir()
        (top / "a").rmdir()
        write(top / "a/new")
    assert ("a/.env", "deleted") not in secrets.rows()
    with secrets.open() as workspace:
        assert workspace.commit(selection()).conflicts == ()
    assert names(secrets.base) & {"a/.env", "a/new", "a/open"} == {"a/.env", "a/new"}


# spec WS6
@pytest.mark.parametrize("is_file", [False, True])
def test_a_directory_with_something_hidden_is_not_moved_nor_replaced(
    secrets: Scene, is_file: bool
) -> None:
    with secrets.run() as top:
        if is_file:
            for name in ("a/open", "a/b/open"):
                (top / name).unlink()
            (top / "a/b").rmdir()
            (top / "a").rmdir()
            write(top / "a")
        else:
            (top / "a").rename(top / "moved")
            assert names(top / "moved") == {"b", "b/open", "open"}
    with secrets.open() as workspace:
        result = workspace.commit(selection(allow=["*"]))
    assert result.is_refused
    assert set(result.guarded) == {b"a/.env", b"a/b/key.pem"}
    assert {"a/.env", "a/b/key.pem"} <= names(secrets.base)


# spec WS6
def test_a_name_that_is_made_later_is_hidden_from_the_next_start_on(
    secrets: Scene,
) -> None:
    with secrets.run() as top:
        write(secrets.base / "later.pem")
        write(top / "a/open", "changed\n")
    with secrets.run() as top:
        assert "later.pem" not in names(top)
        assert (top / "a/open").read_text() == "changed\n"
    with secrets.open() as workspace:
        assert workspace.commit(selection()).applied == (b"a/open",)


# spec WS6
def test_what_is_not_hidden_any_more_is_still_not_removed(secrets: Scene) -> None:
    with secrets.run() as top:
        write(top / "a/open", "changed\n")
        (top / "a/b/open").unlink()
        (top / "a/b").rmdir()
        (top / "a/b").mkdir()
    set_hidden(secrets)
    with secrets.run() as top:
        assert ".env" in names(top)
    with secrets.open() as workspace:
        result = workspace.commit(selection())
        assert (result.conflicts, result.guarded) == ((), ())
        assert result.applied == (b"a/b/open", b"a/open")
    assert {"a/.env", "a/b/key.pem"} <= names(secrets.base)


# spec WS6, WS11
def test_a_change_in_a_directory_of_the_layer_is_no_conflict_later(
    secrets: Scene,
) -> None:
    with secrets.run() as top:
        write(top / "a/b/new")
    with secrets.run():
        pass
    (secrets.base / "a/b").rename(secrets.base / "a/other")
    (secrets.base / "a/b").mkdir()
    with secrets.open() as workspace:
        (conflict,) = workspace.commit(selection()).conflicts
    assert conflict.reason == "its directory 'a/b' is another one"


# spec WS6
def test_what_hides_at_a_known_place_does_not_walk(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x/1.key", "x/2.key", "x/deep/3.key", "y/1.key", "z"):
        write(scene.base / name)
    (scene.base / "link").symlink_to("x")
    read: list[int] = []
    scan = os.scandir

    def count(fd: int) -> object:
        read.append(os.fstat(fd).st_ino)
        return scan(fd)

    monkeypatch.setattr(os, "scandir", count)
    base = os.open(scene.base, os.O_RDONLY)
    try:
        assert find_hidden(base, ["/z", "x/1.key", "link/2.key", "no/where"]) == [
            b"x/1.key",
            b"z",
        ]
        assert read == []
        assert find_hidden(base, ["x/*.key", "!x/2.key"]) == [b"x/1.key"]
        assert read == [(scene.base / "x").stat().st_ino]
        assert find_hidden(base, ["**/3.key"]) == [b"x/deep/3.key"]
        assert find_hidden(base, ["x/", "x/1.key"]) == [b"x"]
    finally:
        os.close(base)
    assert not matches_any_depth(["/z", "x/*.key", "x/y/"])
    assert matches_any_depth(["*.key"])
    assert matches_any_depth(["x/**/y"])


# spec WS6
def test_a_name_that_is_not_utf_8_is_hidden(scene: Scene) -> None:
    odd = os.fsencode(scene.base) + b"/\xff\n.pem"
    os.close(os.open(odd, os.O_CREAT | os.O_WRONLY))
    write(scene.base / "seen")
    scene.make()
    set_hidden(scene, "*.pem")
    with scene.run() as top:
        assert names(top) == {"seen"}
    layer = scene.upper.parent / "hidden"
    (whiteout,) = layer.iterdir()
    assert stat.S_ISCHR(whiteout.lstat().st_mode)
