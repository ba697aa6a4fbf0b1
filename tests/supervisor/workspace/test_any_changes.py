"""Random changes in a workspace: their view, report, patch, commit."""

import errno
import os
import random
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisor.workspace.changes import Change, compare
from supervisor.workspace.layers import LayeredTree
from tests.helpers.rounds import LONG
from tests.supervisor.workspace.operations import change
from tests.supervisor.workspace.scene import (
    Scene,
    Tree,
    is_in_user_namespace,
    layered,
    run_as_a_user,
    selection,
    tree_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

EXAMPLES = settings(
    max_examples=60 if LONG and not is_in_user_namespace() else 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
seeds = st.integers(0, 1 << 30)


def make(scene: Scene, seed: int) -> Tree:
    """Make a random base, change it at random in the workspace; return what is seen."""
    subprocess.run(["rm", "-rf", str(scene.base), str(scene.state)], check=True)
    scene.base.mkdir(0o755)
    scene.state.mkdir(0o700)
    rng = random.Random(seed)
    change(rng, scene.base, rng.randint(0, 30))
    scene.make()
    with scene.run() as top:
        change(rng, top, rng.randint(1, 25))
        return tree_of(top)


# spec WS8
@EXAMPLES
@given(seed=seeds)
def test_the_layers_are_read_as_the_kernel_reads_them(scene: Scene, seed: int) -> None:
    seen = make(scene, seed)
    upper, base = os.open(scene.upper, os.O_PATH), os.open(scene.base, os.O_PATH)
    try:
        tree = LayeredTree((upper, base), scene.marks)
        assert layered(tree, tree.top()) == seen
    finally:
        os.close(upper)
        os.close(base)


# spec WS8
@EXAMPLES
@given(seed=seeds)
def test_the_rows_are_the_differences(scene: Scene, seed: int) -> None:
    seen = make(scene, seed)
    before = tree_of(scene.base)
    upper, base = os.open(scene.upper, os.O_PATH), os.open(scene.base, os.O_PATH)
    try:
        trees = LayeredTree((base,)), LayeredTree((upper, base), scene.marks)
        rows = compare(*trees, with_renames=False)
    finally:
        os.close(upper)
        os.close(base)
    told = {(row.path, row.change.value) for row in rows}
    assert told == differences(before, seen)
    assert [row.path for row in rows] == sorted(row.path for row in rows)


def differences(before: Tree, after: Tree) -> set[tuple[bytes, str]]:
    """Return (path, change) between two trees, a removed directory as one."""
    found = set()
    for path in before.keys() | after.keys():
        old, new = before.get(path), after.get(path)
        if old == new or (new is None and not _has_directory(after, path)):
            continue
        if new is None:
            kind = Change.DELETED
        elif old is None:
            kind = Change.ADDED
        elif old[0] != new[0]:
            kind = Change.TYPE
        elif old[0] == "link" or (old[0] == "file" and old[2] != new[2]):
            kind = Change.MODIFIED
        else:
            kind = Change.MODE
        found.add((path, kind.value))
    return found


def _has_directory(tree: Tree, path: bytes) -> bool:
    """Tell whether the directory of a path is one in a tree."""
    directory = path.rpartition(b"/")[0]
    return not directory or tree.get(directory, ("",))[0] == "directory"


# spec WS9
@EXAMPLES
@given(seed=seeds)
def test_the_patch_is_git_s_and_git_applies_it(scene: Scene, seed: int) -> None:
    seen = make(scene, seed)
    with scene.open() as workspace:
        plain = b"".join(workspace.patch())
        binary = b"".join(workspace.patch(binary=True))
    old = scene.copy("a", scene.base)
    with scene.mounted() as top:
        scene.copy("b", top)
    command = ["git", "diff", "--no-index", "--no-renames", "--src-prefix="]
    command += ["--dst-prefix=", "a", "b"]
    git = subprocess.run(command, cwd=scene.top, capture_output=True, check=False)
    assert sections(plain) == sections(git.stdout)
    if not binary or _puts_files_over_empty_directories(tree_of(old), seen):
        return
    if _makes_directories_of_looping_links(old, seen):
        return
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(scene.top)}
    subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        input=binary, cwd=old, env=env, check=True,
    )  # fmt: skip
    assert without_modes(tree_of(old)) == without_modes(seen)


def sections(patch: bytes) -> dict[bytes, bytes]:
    """Return the path of each section -> what it says, without ``index``."""
    found: dict[bytes, bytes] = {}
    for section in re.split(rb"(?m)^diff --git ", patch)[1:]:
        header, _, body = section.partition(b"\n")
        lines = [line for line in body.split(b"\n") if not line.startswith(b"index ")]
        path = _path_of(header)
        found[path] = found.get(path, b"") + b"\n".join(lines)
    return found


def _path_of(header: bytes) -> bytes:
    """Return the path that both halves of a header name, after ``a/`` or ``b/``."""
    quoted = re.match(rb'"[ab]/((?:[^"\\]|\\.)*)"', header)
    return quoted[1] if quoted else header[2 : len(header) // 2]


def _puts_files_over_empty_directories(before: Tree, after: Tree) -> bool:
    """Tell whether git cannot say it: a file where a directory with an empty one was."""
    return any(
        facts[0] == "directory" and after.get(path, ("directory",))[0] != "directory"
        for path, facts in before.items()
    )


def _makes_directories_of_looping_links(old: Path, after: Tree) -> bool:
    """Tell whether git cannot apply it: it looks through a link that ends nowhere."""
    for path, facts in tree_of(old).items():
        if facts[0] != "link" or after.get(path, ("",))[0] != "directory":
            continue
        try:
            os.stat(os.path.join(os.fsencode(old), path))
        except OSError as why:
            if why.errno == errno.ELOOP:
                return True
    return False


def without_modes(tree: Tree) -> dict[bytes, object]:
    """Return what git knows of a tree: files and links, and whether they execute."""
    return {
        path: (facts[0], facts[-1])
        for path, facts in tree.items()
        if facts[0] != "directory"
    }


# spec WS10, WS12, WS12a
@EXAMPLES
@given(seed=seeds)
def test_a_commit_makes_the_base_what_was_seen(scene: Scene, seed: int) -> None:
    seen = make(scene, seed)
    with scene.open() as workspace:
        rows = workspace.changes()
        result = workspace.commit(selection(allow=["*"]))
    assert not result.conflicts
    assert not result.guarded
    assert set(result.applied) == {row.path for row in rows}
    assert tree_of(scene.base) == seen
    assert scene.seen() == seen
    assert scene.rows() == []
    assert not [name for name in os.listdir(scene.base) if name.startswith(".sand")]


# spec WS10, WS12a
@EXAMPLES
@given(seed=seeds, pick=seeds)
def test_a_commit_of_a_part_changes_nothing_that_is_seen(
    scene: Scene, seed: int, pick: int
) -> None:
    seen = make(scene, seed)
    with scene.open() as workspace:
        rows = workspace.changes()
        if not rows:
            return
        row = random.Random(pick).choice(rows)
        if not row.path or any(byte in row.path for byte in b'\n"\xff'):
            return
        pattern = "/" + os.fsdecode(row.path).replace(" ", "\\ ")
        result = workspace.commit(selection(only=[pattern], allow=["*"]))
    assert not result.conflicts
    assert row.path in result.applied
    assert scene.seen() == seen
    left = {path for path, *_ in scene.rows()}
    assert not left & set(map(os.fsdecode, result.applied))
    with scene.open() as workspace:
        workspace.commit(selection(allow=["*"]))
    assert tree_of(scene.base) == seen
    assert scene.seen() == seen


# spec WS3a, WS8, WS9, WS10
def test_a_user_s_workspace_is_told_and_brought_back_the_same(
    tmp_path: Path,
) -> None:
    if is_in_user_namespace():
        pytest.skip("this is such a user")
    options = ("-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/inner")
    run_as_a_user("pytest", *options, __file__)
