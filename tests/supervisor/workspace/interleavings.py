"""Random turns of the operator, the child and commits: no line of either is lost.

Each write adds a line that was never written before, so a line that is missing was lost.
"""

import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from supervisor.workspace.workspace import CommitResult, NoMatchError
from tests.supervisor.workspace.scene import Scene, Tree, selection, tree_of

PARTS = 4
MEMORY = Path("/dev/shm")
DIRECTORIES = ("d", "d/e", "f", "g")
FILES = ("a", "b", "d/a", "d/b", "d/e/a", "d/e/b", "f/a", "g/c")


Way = Callable[[Path, bytes, set[bytes]], None]


class Interleaving:
    """One base, one workspace, and what each side has written."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene = scene
        self.rng = random.Random(seed)
        self.removed_by_child: set[bytes] = set()
        self.removed_by_operator: set[bytes] = set()
        self.files: tuple[str, ...] = FILES
        self.lines = 0
        self.commits: list[CommitResult] = []

    def run(self) -> None:
        """Take some turns."""
        for _ in range(self.rng.randint(2, 8)):
            self.edit(self.scene.base, b"operator", self.removed_by_operator)
        self.scene.make()
        for _ in range(self.rng.randint(2, 6)):
            if self.rng.random() < 0.6:
                self.run_child()
            if self.rng.random() < 0.3:
                self.meet()
            for _ in range(self.rng.randint(0, 2)):
                self.edit(self.scene.base, b"operator", self.removed_by_operator)
            if self.rng.random() < 0.7:
                self.commit()
        self.commit()

    def run_child(self) -> None:
        """Let the child work, and sometimes the operator at the same time."""
        with self.scene.run() as top:
            for _ in range(self.rng.randint(1, 5)):
                self.edit(top, b"child", self.removed_by_child)
                if self.rng.random() < 0.3:
                    # Of directories that move under a mount the kernel promises nothing.
                    ways = (self.append, self.replace)
                    self.edit(self.scene.base, b"operator", set(), ways)
        with self.scene.open() as workspace:
            workspace.end_run()

    def meet(self) -> None:
        """Let both sides change one file, one after the other."""
        self.files = (self.rng.choice(FILES),)
        ways = (self.append, self.replace)
        with self.scene.run() as top:
            self.edit(top, b"child", set(), ways)
        with self.scene.open() as workspace:
            workspace.end_run()
        self.edit(self.scene.base, b"operator", set(), ways)
        self.files = FILES

    def edit(
        self, top: Path, by: bytes, removed: set[bytes], ways: tuple[Way, ...] = ()
    ) -> None:
        """Make one change as one side; what cannot be done is not."""
        usual = (self.append, self.append, self.replace, self.remove, self.rename)
        with contextlib.suppress(OSError, shutil.Error):
            way = self.rng.choice(ways or usual)
            way(top, by, removed)

    def append(self, top: Path, by: bytes, _: set[bytes]) -> None:
        """Add a line to a file in place, made if it is not there."""
        path = top / self.rng.choice(self.files)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.write_bytes(self.with_line(path, by))

    def replace(self, top: Path, by: bytes, _: set[bytes]) -> None:
        """Add a line as an editor does: another file, renamed over it."""
        path = top / self.rng.choice(self.files)
        new = path.with_name(".new")
        new.write_bytes(self.with_line(path, by))
        new.rename(path)

    def remove(self, top: Path, _: bytes, removed: set[bytes]) -> None:
        """Remove a file or a directory, of which what is seen was read."""
        path = top / self.rng.choice((*FILES, *DIRECTORIES))
        if path.is_dir():
            seen = lines_in(tree_of(path))
            shutil.rmtree(path)
        else:
            seen = set(path.read_bytes().splitlines())
            path.unlink()
        removed |= seen

    def rename(self, top: Path, _: bytes, __: set[bytes]) -> None:
        """Rename a directory to a name that is free."""
        (top / self.rng.choice(DIRECTORIES)).rename(top / self.rng.choice("xyz"))

    def with_line(self, path: Path, by: bytes) -> bytes:
        """Return a file's content with a line that was never written before."""
        self.lines += 1
        lines = path.read_bytes().splitlines(keepends=True)
        where = self.rng.choice((0, len(lines), len(lines)))
        return b"".join([*lines[:where], b"%s %d\n" % (by, self.lines), *lines[where:]])

    def commit(self) -> None:
        """Commit in a random way, and compare both sides before and after."""
        self.scene.rows()  # a look: pointers to what the operator has moved are cut
        base, seen = tree_of(self.scene.base), self.scene.seen()
        given: dict[str, list[str] | bool] = {
            "skips_conflicts": self.rng.random() < 0.5,
            "merges": self.rng.random() < 0.5,
        }
        if self.rng.random() < 0.3:
            given["only"] = [f"/{self.rng.choice((*FILES, *DIRECTORIES))}"]
        with self.scene.open() as workspace:
            try:
                result = workspace.commit(selection(**given))
            except NoMatchError:
                return
        self.commits.append(result)
        after = tree_of(self.scene.base)
        now = self.scene.seen()
        removed = self.removed_by_child | self.removed_by_operator
        for path in result.merged:
            wanted = lines_in({path: seen.pop(path)}) | lines_in({path: base[path]})
            assert lines_in({path: now[path]}) >= wanted - removed
            assert now.pop(path) == after.pop(path)
        assert now == seen
        if result.is_refused or not result.applied:
            assert after == base
        # What the child has moved may be removed at one path and left at the other.
        kept = (
            lines_in(tree_of(self.scene.base)) | lines_in(seen) | self.removed_by_child
        )
        assert lines_in(base) - kept == set()
        for path, facts in after.items():
            # A renamed directory takes along what the operator has changed in it.
            assert facts == seen.get(path) or facts in base.values(), path


def lines_in(tree: Tree) -> set[bytes]:
    """Return every line of the files of a tree."""
    found: set[bytes] = set()
    for kind, *facts in tree.values():
        if kind == "file" and isinstance(facts[1], bytes):
            found.update(facts[1].splitlines())
    return found


def play(seeds: range, *, has_user_marks: bool, top: Path | None = None) -> None:
    """Play a game for each seed; raise where a line is lost.

    Args:
        seeds: of the games.
        has_user_marks: mounts are made as in a user namespace.
        top: where the trees are; in memory, where that can be, unless given.
    """
    place = top or (MEMORY if os.access(MEMORY, os.W_OK) else None)
    commits: list[CommitResult] = []
    with tempfile.TemporaryDirectory(dir=place) as made:
        scene = Scene(Path(made), has_user_marks=has_user_marks)
        for seed in seeds:
            scene.clear()
            turns = Interleaving(scene, seed)
            try:
                turns.run()
            except BaseException as why:
                why.add_note(f"seed {seed}")
                raise
            commits += turns.commits
    assert sum(bool(one.applied) for one in commits) > len(commits) / 4
    assert sum(bool(one.conflicts) for one in commits) > len(commits) / 20


if __name__ == "__main__":
    play(range(*map(int, sys.argv[1:])), has_user_marks=True)
