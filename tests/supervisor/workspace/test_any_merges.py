"""Random changes of both sides to a text: merged if git merges, else a conflict."""

import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.rounds import LONG
from tests.supervisor.workspace.scene import Scene, selection

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

FILES = 30
EXAMPLES = settings(
    max_examples=40 if LONG else 2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ENDS = (b"\n", b"\n", b"\n", b"\r\n", b"")


def edit(rng: random.Random, text: bytes, by: bytes) -> bytes:
    """Return a text with some lines added, replaced, removed.

    New ones are never alike.
    """
    lines = text.splitlines(keepends=True)
    for number in range(rng.choice((0, 1, 1, 2, 5))):
        new = b"%s %d %d" % (by, number, rng.getrandbits(60)) + rng.choice(ENDS)
        start = rng.randint(0, len(lines))
        end = min(len(lines), start + rng.choice((0, 0, 1, 3)))
        lines[start:end] = rng.choice(([new], [new], [new, b"same\n"], []))
    return b"".join(lines)


def merged_by_git(
    where: Path, ours: bytes, begun: bytes, theirs: bytes
) -> bytes | None:
    """Return what git makes of three texts; None for a conflict."""
    for name, text in (("ours", ours), ("begun", begun), ("theirs", theirs)):
        (where / name).write_bytes(text)
    words = ["git", "merge-file", "-p", "ours", "begun", "theirs"]
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(where.parent)}
    done = subprocess.run(words, cwd=where, env=env, capture_output=True, check=False)
    return None if done.returncode else done.stdout


# spec WS11a
@EXAMPLES
@given(seed=st.integers(0, 1 << 30))
def test_what_git_merges_is_merged_and_no_line_of_the_operator_is_lost(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    scene.clear()
    rng = random.Random(seed)
    begun, ours, theirs = {}, {}, {}
    for name in map(str, range(FILES)):
        lines = (b"%d" % rng.choice((number, 7)) + b"\n" for number in range(12))
        begun[name] = edit(rng, b"".join(lines)[: rng.choice((3, 60))], b"begun")
        ours[name] = edit(rng, begun[name], b"operator")
        theirs[name] = edit(rng, begun[name], b"child")
    write_all(scene.base, begun)
    scene.make()
    with scene.run() as top:
        write_all(top, theirs)
    scene.end_run()
    write_all(scene.base, ours)
    with scene.open() as workspace:
        result = workspace.commit(selection(merges=True, skips_conflicts=True))
    conflicts = {os.fsdecode(one.path) for one in result.conflicts}
    merged = set(map(os.fsdecode, result.merged))
    assert conflicts
    assert merged
    where = tmp_path_factory.mktemp("git")
    for name, text in begun.items():
        wanted = merged_by_git(where, ours[name], text, theirs[name])
        found = (scene.base / name).read_bytes()
        assert (name in conflicts) == (wanted is None)
        assert found == (ours[name] if wanted is None else wanted)
        added = set(ours[name].splitlines()) - set(text.splitlines())
        assert added <= set(found.splitlines())
    assert {path for path, *_ in scene.rows()} == conflicts


def write_all(top: Path, texts: dict[str, bytes]) -> None:
    """Write the texts that differ from what is there."""
    for name, text in texts.items():
        path = top / name
        if not path.exists() or path.read_bytes() != text:
            path.write_bytes(text)
