"""Changes of a child behind a commit of its workspace."""

import contextlib
import itertools
import os
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.workspace.run import record_end
from supervisor.workspace.selection import CommitSelection
from supervisor.workspace.use import WorkspaceUse
from tests.supervisor.workspace.scene import Scene, layered, scene_in, write


class CutError(Exception):
    """The command dies here."""


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    made = scene_in(tmp_path)
    made.make()
    return made


@contextlib.contextmanager
def child(scene: Scene) -> Iterator[Path]:
    """Run a child, which has the lock; gives the top of what it sees."""
    with scene.run() as top:
        with scene.open() as workspace:
            lock = workspace.directory.lock_for("child-1")
        try:
            yield top
        finally:
            os.close(lock)
    scene.end_run()


def commit(scene: Scene) -> None:
    """Commit all while a child has it, which is stopped."""
    with scene.open() as workspace:
        assert workspace.commit(CommitSelection(), is_frozen=True).applied


def cut_commit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, at: str, after: int = 0
) -> None:
    """Commit all while a child has it, and die before something is done.

    Args:
        scene: whose workspace.
        monkeypatch: of the test.
        at: the function that is called then, in ``supervisor.workspace``.
        after: so many calls of it are made.
    """
    real = pkgutil.resolve_name(f"supervisor.workspace.{at.replace('.', ':', 1)}")
    calls = itertools.count()

    def die(*args: object) -> object:
        if next(calls) < after:
            return real(*args)
        raise CutError

    with monkeypatch.context() as patch, scene.open() as workspace:
        patch.setattr(f"supervisor.workspace.{at}", die)
        with pytest.raises(CutError):
            workspace.commit(CommitSelection(), is_frozen=True)


def move(directory: Path, target: Path) -> None:
    """Rename a directory of the base in a workspace; skip where that is refused."""
    try:
        directory.rename(target)
    except OSError:
        pytest.skip("a user's overlay renames no directory of the base")


def paths(scene: Scene) -> set[bytes]:
    """Return the paths that a child would see, and that commands read."""
    seen = scene.seen()
    with scene.open() as workspace, workspace.trees() as trees:
        assert layered(trees.merged, trees.merged.top()) == seen
    return set(seen)


# spec WS12, WS16
@pytest.mark.parametrize("seal", ["fork", "snapshot"])
def test_a_commit_of_before_takes_nothing_from_what_hides_a_snapshots_files(
    scene: Scene, seal: str
) -> None:
    with child(scene) as top:
        write(top / "a", "1\n")
        commit(scene)
        write(top / "a", "2\n")  # so that something of the commit is left to be settled
        write(top / "x/a")
    with scene.open() as workspace:
        getattr(workspace, seal)()
    with child(scene) as top:
        shutil.rmtree(top / "x")
    with scene.open() as workspace:
        getattr(workspace, seal)()
    assert paths(scene) == {b"a"}


# spec WS12
@pytest.mark.parametrize("at", ["commit.settle", "commit.Committer.remove_staging"])
def test_what_a_child_removes_behind_a_commit_that_died_stays_removed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    with child(scene) as top:
        write(top / "d/e/a")
        write(top / "d/e/b")
        (top / "d/e").rename(top / "x")  # which the kernel does not mark as opaque
        cut_commit(scene, monkeypatch, at)
        (top / "x/a").unlink()
    assert paths(scene) == {b"d", b"x", b"x/b"}
    assert (scene.base / "x/a").exists()  # all had been done


# spec WS12
@pytest.mark.parametrize("steps", [0, 1])
def test_a_commit_that_died_before_its_end_is_undone_where_the_child_goes_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    with child(scene) as top:
        write(top / "a")
        write(top / "x/a")
        cut_commit(scene, monkeypatch, "commit_steps.Steps.do", after=steps)
        (top / "a").unlink()
        shutil.rmtree(top / "x")
        write(top / "b")
    assert paths(scene) == {b"b"}
    with scene.open() as workspace:
        assert workspace.finish_commit() is False
    assert not list(scene.base.iterdir())
    assert paths(scene) == {b"b"}
    with scene.open() as workspace:
        workspace.commit(CommitSelection())
    assert [path.name for path in scene.base.iterdir()] == ["b"]


# spec WS11, WS12
def test_an_undone_commit_hides_nothing_that_the_operator_makes_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(scene) as top:
        write(top / "d/x/a")
        (top / "d/x").rename(top / "x")  # which the kernel does not mark as opaque
        cut_commit(scene, monkeypatch, "commit.Committer.apply")
    with scene.open() as workspace:
        assert workspace.finish_commit() is False
    write(scene.base / "x/b")
    assert paths(scene) == {b"d", b"x", b"x/a", b"x/b"}


# spec WS11, WS12
@pytest.mark.parametrize("is_undone_at_once", [True, False])
def test_what_was_removed_behind_an_undone_commit_hides_nothing_made_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, is_undone_at_once: bool
) -> None:
    with child(scene) as top:
        for path in ("a", "b", "d/x/a", "d/x/b"):
            write(top / path)
        cut_commit(scene, monkeypatch, "commit.sync_file_system", after=1)
        for path in ("a", "d/x/a"):  # the base has it, so the kernel hides it
            (top / path).unlink()
        if is_undone_at_once:
            with scene.open() as workspace:
                assert workspace.finish_commit() is False
    with scene.open() as workspace:
        workspace.finish_commit()
    assert not list(scene.base.iterdir())
    for path in ("a", "d/x/a"):
        write(scene.base / path, "operator's\n")
    assert paths(scene) == {b"a", b"b", b"d", b"d/x", b"d/x/a", b"d/x/b"}


# spec WS11, WS12
def test_the_end_of_a_run_undoes_a_commit_that_died_and_then_looks(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene.run() as top:
        with scene.open() as workspace:
            lock = workspace.directory.lock_for("child-1")
        write(top / "a")
        write(top / "b")
        cut_commit(scene, monkeypatch, "commit_steps.Steps.do", after=1)
        os.close(lock)
    state = os.fspath(scene.state)
    use = WorkspaceUse("w", os.fspath(scene.base), "review", state)
    rows, _ = record_end(use, is_last=True)
    assert {row.path for row in rows} == {b"a", b"b"}
    with scene.open() as workspace:
        assert workspace.commit(CommitSelection()).conflicts == ()


# spec WS12
def test_a_commit_that_is_undone_takes_nothing_that_another_had_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(scene) as top:
        write(top / "a", "1\n")
        commit(scene)  # whose file is still in the layer
        write(top / "a", "22\n")
        write(top / "b")
        cut_commit(scene, monkeypatch, "commit_steps.Steps.do", after=1)
        assert (scene.base / "a").read_text() == "22\n"
    with scene.open() as workspace:
        assert workspace.finish_commit() is False
    assert (scene.base / "a").read_text() == "1\n"
    with scene.mounted() as top:
        assert (top / "a").read_text() == "22\n"


# spec WS12
def test_what_a_child_removes_twice_around_a_commit_that_died_stays_removed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(scene.base / "a")
    write(scene.base / "b/a")
    write(scene.base / "d/a")
    with child(scene) as top:
        (top / "a").unlink()
        shutil.rmtree(top / "b")
        (top / "d/a").unlink()
        cut_commit(scene, monkeypatch, "commit_steps.Steps.do", after=2)
        assert not (scene.base / "a").exists()
        assert not (scene.base / "b").exists()
        (top / "b").mkdir()
        for path in (top / "a", top / "d/a"):
            write(path)
            path.unlink()  # over nothing
    with scene.open() as workspace:
        assert workspace.finish_commit() is False
    assert (scene.base / "a").exists()
    assert (scene.base / "b/a").exists()
    assert paths(scene) == {b"b", b"d"}


# spec WS11
def test_directories_that_a_commit_moves_and_puts_anew_are_no_others(
    scene: Scene,
) -> None:
    write(scene.base / "f/g/c")
    write(scene.base / "d/a")
    with child(scene) as top:
        move(top / "f", top / "x")
        (top / "x/g").rename(top / "e")
        write(top / "f/g/c", "new\n")
    with scene.open() as workspace:
        assert not workspace.commit(CommitSelection()).conflicts
    assert (scene.base / "f/g/c").read_text() == "new\n"
    assert (scene.base / "e/c").exists()


# spec WS11, WS12
@pytest.mark.parametrize("more", [(), ("d/b",)], ids=["alone", "beside"])
def test_a_directory_that_was_moved_into_a_new_one_is_there_behind_its_commit(
    scene: Scene, more: tuple[str, ...]
) -> None:
    write(scene.base / "f/g/c")
    with child(scene) as top:
        (top / "d").mkdir()
        move(top / "f/g", top / "d/e")
        for path in more:
            write(top / path)
    with scene.open() as workspace:
        assert workspace.commit(CommitSelection()).applied
    assert paths(scene) == {b"d", b"d/e", b"d/e/c", b"f", *map(os.fsencode, more)}
    assert not scene.rows()


# spec WS11, WS12
def test_a_directory_that_took_a_removed_one_s_place_keeps_what_it_has(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(scene.base / "d/a")
    write(scene.base / "x/b")
    with child(scene) as top:
        shutil.rmtree(top / "x")
        cut_commit(scene, monkeypatch, "commit.Committer.apply")
        move(top / "d", top / "x")
    with scene.open() as workspace:
        assert workspace.finish_commit() is False
    assert paths(scene) == {b"x", b"x/a"}
    with scene.open() as workspace:
        assert workspace.commit(CommitSelection()).applied
    assert (scene.base / "x/a").exists()


# spec WS11, WS12
def test_a_directory_that_took_a_committed_one_s_place_keeps_what_it_has(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(scene.base / "d/a")
    with child(scene) as top:
        write(top / "x/b")
        cut_commit(scene, monkeypatch, "commit.settle")
        shutil.rmtree(top / "x")
        move(top / "d", top / "x")
    with scene.open() as workspace:
        assert workspace.finish_commit()
    assert paths(scene) == {b"x", b"x/a"}


# spec WS12, WS18
@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_removal_stays_whenever_the_commit_that_died_is_undone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_looked_at: bool
) -> None:
    write(scene.base / "a")
    with child(scene) as top:
        (top / "a").unlink()
        write(top / "z")
        cut_commit(scene, monkeypatch, "commit_steps.Steps.do", after=1)
        write(top / "a")
        (top / "a").unlink()
        if is_looked_at:
            with scene.open() as workspace:
                assert workspace.finish_commit() is False
            assert not (top / "a").exists()
    with scene.open() as workspace:
        workspace.finish_commit()
    assert paths(scene) == {b"z"}


# spec WS12, WS12a
def test_a_removal_stays_in_a_directory_that_was_moved_behind_a_commit_that_died(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(scene.base / "d/a")
    write(scene.base / "d/k")
    with child(scene) as top:
        (top / "d/a").unlink()
        write(top / "z")
        cut_commit(scene, monkeypatch, "commit_steps.Steps.do", after=1)
        assert not (scene.base / "d/a").exists()
        write(top / "d/a")
        (top / "d/a").unlink()
        move(top / "d", top / "e")
    with scene.open() as workspace:
        assert workspace.finish_commit() is False
    assert paths(scene) == {b"e", b"e/k", b"z"}
