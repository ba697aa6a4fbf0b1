"""Changes of another machine, committed to their base by the usual rules."""

import errno
import io
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.workspace.commit import Committer
from supervisor.workspace.commit_steps import Steps
from supervisor.workspace.layer_import import PackedBase, commit_layer
from supervisor.workspace.verbs import VerbError


class Scene:
    """A base that was packed, and a layer that comes back."""

    def __init__(self, where: Path) -> None:
        self.base = where / "base"
        (self.base / "src").mkdir(parents=True)
        (self.base / "src" / "a").write_text("one\n")
        self.state = where / "state"
        self.state.mkdir()
        until_newer(self.base / "src" / "a")
        self.packed_ns = time.clock_gettime_ns(5)
        self.layer = io.BytesIO()

    def change(self, **files: str | None) -> None:
        """Make the layer: contents by path with `__` for '/', None for a removal."""
        self.layer = io.BytesIO()
        with tarfile.open(fileobj=self.layer, mode="w") as tar:
            for key, text in sorted(files.items()):
                *above, name = key.split("__")
                name = f".wh.{name}" if text is None else name
                member = tarfile.TarInfo("/".join([*above, name]))
                data = (text or "").encode()
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))

    def commit(self, **words: Any) -> Any:
        """Commit the layer; return the row."""
        self.layer.seek(0)
        paths = frozenset((b"", b"src", b"src/a"))
        base = PackedBase(str(self.base), self.packed_ns, paths)
        done = commit_layer(str(self.state), base, self.layer, words)
        assert os.listdir(self.state / "workspaces") == []
        return done.result


def until_newer(path: Path) -> None:
    """Wait until what is changed now has a later time of change than a file."""
    while time.clock_gettime_ns(5) <= path.stat().st_ctime_ns:
        pass


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A base with one file."""
    return Scene(tmp_path)


# spec FL10
def test_changes_are_applied_to_the_base(scene: Scene) -> None:
    scene.change(src__a=None, src__b="two\n", c="three\n")
    assert scene.commit()["applied"] == ["c", "src/a", "src/b"]
    assert sorted(os.listdir(scene.base / "src")) == ["b"]
    assert (scene.base / "c").read_text() == "three\n"
    owners = {(scene.base / name).stat().st_uid for name in ("src", "src/b", "c")}
    assert owners == {scene.base.stat().st_uid}


# spec FL10
def test_some_of_them_can_be_chosen(scene: Scene) -> None:
    scene.change(src__a="two\n", c="three\n")
    row = scene.commit(only=["src/"])
    assert (row["applied"], row["left"]) == (["src/a"], ["c"])
    assert not (scene.base / "c").exists()
    # The layer comes again: what is in the base already is no change.
    assert scene.commit()["applied"] == ["c"]


# spec FL10
@pytest.mark.parametrize("how", ["edited", "removed", "added"])
def test_what_has_changed_since_it_was_packed_is_in_conflict(
    scene: Scene, how: str
) -> None:
    scene.change(src__a="two\n", src__new="three\n")
    path = scene.base / "src" / ("new" if how == "added" else "a")
    if how == "removed":
        path.unlink()
    else:
        path.write_text("mine\n")
    before = sorted(os.listdir(scene.base / "src"))
    row = scene.commit()
    assert [one["path"] for one in row["conflicts"]] == [f"src/{path.name}"]
    assert row["applied"] == []
    assert sorted(os.listdir(scene.base / "src")) == before
    assert how == "removed" or path.read_text() == "mine\n"


# spec FL10
def test_a_removal_of_what_has_changed_is_in_conflict(scene: Scene) -> None:
    scene.change(src__a=None)
    (scene.base / "src" / "a").write_text("mine\n")
    assert scene.commit()["conflicts"]
    assert (scene.base / "src" / "a").read_text() == "mine\n"


# spec FL10
def test_guarded_paths_stay_guarded(scene: Scene) -> None:
    scene.layer = io.BytesIO()
    scene.change(**{".envrc": "evil\n"})
    assert scene.commit()["guarded"] == [".envrc"]
    assert not (scene.base / ".envrc").exists()
    assert scene.commit(allow=[".envrc"])["applied"] == [".envrc"]


# spec FL10
def test_half_a_layer_changes_nothing(scene: Scene) -> None:
    scene.change(src__a="x" * 5000)
    scene.layer = io.BytesIO(scene.layer.getvalue()[:2000])
    with pytest.raises(VerbError, match="cannot unpack"):
        scene.commit()
    assert (scene.base / "src" / "a").read_text() == "one\n"
    assert os.listdir(scene.state / "workspaces") == []


# The workspace is gone then: it cannot be ended later.
def test_a_commit_that_can_be_neither_done_nor_undone_is_told_as_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.change(a="one\n", b="two\n")
    do = Steps.do

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def do_first(steps: Steps, number: int, step: Any) -> None:
        (fail if number else do)(steps, number, step)

    monkeypatch.setattr(Committer, "find_holder", lambda _: "base")
    monkeypatch.setattr(Steps, "do", do_first)
    monkeypatch.setattr(Steps, "undo", fail)
    with pytest.raises(VerbError, match="its commit was given up: Input/output error"):
        scene.commit()
    assert os.listdir(scene.state / "workspaces") == []
