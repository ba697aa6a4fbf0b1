"""A snapshot, restore, fork or merge that is killed at any call loses nothing."""

import os

import pytest

from supervisor.workspace import seal as seal_module
from tests.helpers.rounds import LONG
from tests.supervisor.workspace.killed import is_killed_at
from tests.supervisor.workspace.scene import Scene, Tree, selection, tree_of, write

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

STEP = 1 if LONG else 4
"""Between two calls at which a command is killed."""


def prepare(scene: Scene, *, renames: bool = False) -> tuple[Tree, Tree]:
    """Take a snapshot ``one``, and work on; return what was seen, and what is."""
    write(scene.base / "edited", "old\n")
    write(scene.base / "gone/file")
    write(scene.base / "moved/file")
    scene.make()
    with scene.run() as top:
        write(top / "edited", "one\n")
        write(top / "new/file")
        first = tree_of(top)
    scene.end_run()
    with scene.open() as workspace:
        workspace.snapshot("one")
    with scene.run() as top:
        write(top / "edited", "two\n")
        (top / "new/file").unlink()
        (top / "gone/file").unlink()
        if renames:
            os.rename(top / "moved", top / "renamed")
        second = tree_of(top)
    scene.end_run()
    return first, second


def leftovers(scene: Scene) -> set[str]:
    """Return the layers that no workspace names, after a sweep."""
    with scene.open() as workspace:
        workspace.store.sweep()
        return set(os.listdir(scene.state / "layers")) - workspace.state.layers_named()


# spec WS15, WS18
@pytest.mark.parametrize("renames", [False, True])
def test_a_killed_snapshot_was_taken_or_was_not(scene: Scene, renames: bool) -> None:
    def take() -> None:
        with scene.open() as workspace:
            workspace.snapshot("two")

    number, outcomes = 0, set()
    while True:
        first, second = prepare(scene, renames=renames)
        if not is_killed_at(number, take):
            break
        assert scene.seen() == second, number
        assert leftovers(scene) == set()
        with scene.open() as workspace:
            labels = [one.label for one in workspace.state.snapshots]
            outcomes.add(tuple(labels))
            workspace.restore("one")
        assert scene.seen() == first, number
        if "two" in labels:
            with scene.open() as workspace:
                workspace.restore("two")
            assert scene.seen() == second, number
        scene.clear()
        number += STEP
    assert outcomes == {("one",), ("one", "two")}
    assert number > 15


# spec WS15, WS18
def test_a_killed_restore_shows_one_or_the_other(scene: Scene) -> None:
    def restore() -> None:
        with scene.open() as workspace:
            workspace.restore("one")

    number, outcomes = 0, []
    while True:
        first, second = prepare(scene)
        if not is_killed_at(number, restore):
            break
        seen = scene.seen()
        assert seen in (first, second), number
        outcomes.append(seen == first)
        assert leftovers(scene) == set()
        with scene.open() as workspace:
            workspace.restore("one")
        assert scene.seen() == first, number
        scene.clear()
        number += STEP
    assert {False, True} <= set(outcomes)
    assert number > 15


# spec WS15, WS18
def test_a_killed_fork_leaves_whole_workspaces(scene: Scene) -> None:
    def fork() -> None:
        with scene.open() as workspace:
            workspace.fork(3)

    number, counts = 0, set()
    while True:
        _, second = prepare(scene)
        if not is_killed_at(number, fork):
            break
        forks = sorted(set(os.listdir(scene.state / "workspaces")) - {"w"})
        forks = [name for name in forks if ".discarded-" not in name]
        counts.add(len(forks))
        for name in ("w", *forks):
            assert Scene(scene.top, name).seen() == second, number
        with scene.open() as workspace:
            workspace.discard()
        for name in forks:
            assert Scene(scene.top, name).seen() == second, number
        scene.clear()
        number += STEP
    assert counts >= {0, 1, 2}


# spec WS15, WS18
def test_a_killed_merge_of_layers_changes_nothing_that_is_seen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal_module, "MAX_LAYERS", 1)
    monkeypatch.setattr(seal_module, "LAYERS_AFTER_MERGE", 0)

    def take() -> None:
        with scene.open() as workspace:
            workspace.snapshot("two")

    number = 0
    while True:
        _, second = prepare(scene)
        if not is_killed_at(number, take):
            break
        assert scene.seen() == second, number
        assert leftovers(scene) == set()
        with scene.open() as workspace:
            workspace.snapshot("three")
        assert scene.seen() == second, number
        scene.clear()
        number += STEP
    assert number > 20


# spec WS10, WS12, WS18
@pytest.mark.parametrize("part", range(3))
def test_a_killed_commit_of_a_workspace_with_layers(scene: Scene, part: int) -> None:
    def commit() -> None:
        with scene.open() as workspace:
            workspace.commit(selection())

    number, bases = part, []
    while True:
        _, second = prepare(scene, renames=True)
        before = tree_of(scene.base)
        if not is_killed_at(number, commit):
            break
        with scene.open() as workspace:
            workspace.finish_commit()
        assert scene.seen() == second, number
        base = tree_of(scene.base)
        assert base in (before, second), number
        bases.append(base == second)
        assert leftovers(scene) == set()
        with scene.open() as workspace:
            result = workspace.commit(selection())
        assert not result.conflicts
        assert tree_of(scene.base) == second, number
        assert scene.seen() == second, number
        scene.clear()
        number += 3 if LONG else 9
    assert {False, True} <= set(bases)
