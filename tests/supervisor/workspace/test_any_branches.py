"""Random changes between snapshots: their view, report, commit, restore."""

import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from supervisor.workspace import seal as seal_module
from supervisor.workspace.changes import compare, compare_views
from supervisor.workspace.layers import LayeredTree
from tests.helpers.rounds import LONG
from tests.supervisor.workspace.operations import change
from tests.supervisor.workspace.scene import Scene, Tree, layered, selection, tree_of
from tests.supervisor.workspace.test_any_changes import differences, seeds

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

EXAMPLES = settings(
    max_examples=20 if LONG else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge layers after few snapshots."""
    monkeypatch.setattr(seal_module, "MAX_LAYERS", 3)
    monkeypatch.setattr(seal_module, "LAYERS_AFTER_MERGE", 1)


def start(scene: Scene, seed: int) -> random.Random:
    """Make a random base and a workspace on it."""
    subprocess.run(["rm", "-rf", str(scene.base), str(scene.state)], check=True)
    scene.base.mkdir(0o755)
    scene.state.mkdir(0o700)
    rng = random.Random(seed)
    change(rng, scene.base, rng.randint(0, 25))
    scene.make()
    return rng


def work(scene: Scene, rng: random.Random) -> Tree:
    """Change the workspace at random; return what is seen."""
    with scene.run() as top:
        change(rng, top, rng.randint(0, 12))
        seen = tree_of(top)
    if rng.random() < 0.8:  # else its host has died
        scene.end_run()
    return seen


def snapshots(scene: Scene, rng: random.Random) -> dict[str, Tree]:
    """Work and take snapshots, some times; return label -> what was seen then."""
    found = {}
    for _ in range(rng.randint(1, 6)):
        seen = work(scene, rng)
        with scene.open() as workspace:
            found[workspace.snapshot().label] = seen
        assert scene.seen() == seen
    return found


# spec WS15, WS8
@EXAMPLES
@given(seed=seeds)
def test_layers_are_read_as_the_kernel_reads_them(scene: Scene, seed: int) -> None:
    rng = start(scene, seed)
    snapshots(scene, rng)
    seen = work(scene, rng)
    with scene.open() as workspace, workspace.trees() as trees:
        assert layered(trees.merged, trees.merged.top()) == seen
        rows = compare(trees.base, trees.merged, with_renames=False)
    told = {(row.path, row.change.value) for row in rows}
    assert told == differences(tree_of(scene.base), seen)


# spec WS15, WS12a
@EXAMPLES
@given(seed=seeds)
def test_a_restore_shows_what_was_there_whatever_became_of_the_base_s_names(
    scene: Scene, seed: int
) -> None:
    rng = start(scene, seed)
    seen = snapshots(scene, rng)
    work(scene, rng)
    for label in rng.sample(sorted(seen), len(seen)):
        with scene.open() as workspace:
            workspace.restore(label)
        assert scene.seen() == seen[label]
        work(scene, rng)
    with scene.open() as workspace:
        workspace.discard()
    assert os.listdir(scene.state / "layers") == []


# spec WS15
@EXAMPLES
@given(seed=seeds)
def test_forks_are_compared_and_one_is_committed(scene: Scene, seed: int) -> None:
    rng = start(scene, seed)
    snapshots(scene, rng)
    seen = work(scene, rng)
    with scene.open() as workspace:
        names = workspace.fork(2)
    first, second = (Scene(scene.top, name) for name in names)
    assert first.seen() == second.seen() == scene.seen() == seen
    views = [work(first, rng), work(second, rng)]
    assert scene.seen() == seen
    with first.open() as one, second.open() as other:
        rows = one.compare_with(other)
    assert {(row.path, row.change.value) for row in rows} == differences(*views)
    with first.open() as workspace:
        result = workspace.commit(selection(allow=["*"]))
    assert not result.conflicts
    assert tree_of(scene.base) == views[0]
    assert first.seen() == views[0]
    assert first.rows() == []


# spec WS15, WS10
@EXAMPLES
@given(seed=seeds, pick=seeds)
def test_a_commit_takes_what_it_applied_out_of_the_layers(
    scene: Scene, seed: int, pick: int
) -> None:
    rng = start(scene, seed)
    snapshots(scene, rng)
    seen = work(scene, rng)
    with scene.open() as workspace:
        (other,) = workspace.fork()
        rows = workspace.changes()
    before = sealed_files(scene)
    if not rows:
        return
    row = random.Random(pick).choice(rows)
    if not row.path or any(byte in row.path for byte in b'\n"\xff'):
        return
    pattern = "/" + os.fsdecode(row.path).replace(" ", "\\ ")
    with scene.open() as workspace:
        result = workspace.commit(selection(only=[pattern], allow=["*"]))
    assert not result.conflicts
    assert scene.seen() == seen
    assert not {path for path, *_ in scene.rows()} & set(
        map(os.fsdecode, result.applied)
    )
    with scene.open() as workspace:
        workspace.commit(selection(allow=["*"]))
    assert tree_of(scene.base) == seen
    assert scene.rows() == []
    after = sealed_files(scene)
    kept = before.keys() & after.keys()
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert Scene(scene.top, other).seen() == seen


def sealed_files(scene: Scene) -> dict[str, Tree]:
    """Return what each layer has that a fork stands on."""
    found = {}
    for name in os.listdir(scene.state / "layers"):
        found[name] = tree_of(Path(scene.state / "layers" / name))
    return found


# spec WS15
@EXAMPLES
@given(seed=seeds)
def test_two_views_differ_in_what_their_trees_differ(scene: Scene, seed: int) -> None:
    rng = start(scene, seed)
    seen = snapshots(scene, rng)
    now = work(scene, rng)
    with scene.open() as workspace, workspace.trees() as trees:
        for snapshot in workspace.state.snapshots:
            with workspace.store.open_layers(snapshot.layers) as layers:
                old = LayeredTree((*layers, trees.base_fd))
                rows = compare_views(old, trees.merged)
            told = {(row.path, row.change.value) for row in rows}
            assert told == differences(seen[snapshot.label], now)
