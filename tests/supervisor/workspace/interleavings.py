"""Random turns of the operator, the child and commits: no line of either is lost.

Each write adds a line that was never written before, so a line that is missing was lost.
The operator edits between the steps of a commit, too. In some games the operator does
nothing: then nothing is in conflict.
"""

import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from supervisor.workspace import commit as commit_module
from supervisor.workspace import commit_settlement as settlement_module
from supervisor.workspace import commit_steps as steps_module
from supervisor.workspace import held_workspace as held_module
from supervisor.workspace.commit import CommitResult
from supervisor.workspace.directory import WorkspaceDirectory, WorkspaceError
from tests.supervisor.workspace.scene import Scene, Tree, layered, selection, tree_of

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
        self.is_alone = self.rng.random() < 0.25  # there is no operator
        self.edit_at = -1  # the step of a commit at which the operator edits
        self.is_mounted = False
        self.had_in_base: list[Tree] = []

    def run(self) -> None:
        """Take some turns."""
        for _ in range(self.rng.randint(2, 8)):
            self.edit(self.scene.base, b"operator", self.removed_by_operator)
        self.scene.make()
        for _ in range(self.rng.randint(2, 6)):
            if self.rng.random() < 0.6:
                self.run_child()
            if not self.is_alone and self.rng.random() < 0.3:
                self.meet()
            for _ in range(0 if self.is_alone else self.rng.randint(0, 2)):
                self.edit(self.scene.base, b"operator", self.removed_by_operator)
            if self.rng.random() < 0.7:
                self.commit()
        self.commit()

    def run_child(self) -> None:
        """Let the child work, and sometimes the operator at the same time."""
        with self.scene.run() as top:
            self.is_mounted = True
            with self.scene.open() as workspace:
                lock = workspace.directory.lock_for("child")
            for _ in range(self.rng.randint(1, 5)):
                self.edit(top, b"child", self.removed_by_child)
                if self.rng.random() < 0.3 and not self.is_alone:
                    self.edit(self.scene.base, b"operator", set(), self.plain_ways)
                if self.rng.random() < 0.2:
                    self.commit(top)
            os.close(lock)
        self.is_mounted = False
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

    @property
    def plain_ways(self) -> tuple[Way, ...]:
        """Return how the operator may edit beneath a mount.

        Of directories that move under one the kernel promises nothing.
        """
        return (self.append, self.replace)

    def edit(
        self, top: Path, by: bytes, removed: set[bytes], ways: tuple[Way, ...] = ()
    ) -> None:
        """Make one change as one side; what cannot be done is not."""
        usual = (self.append, self.append, self.replace, self.remove, self.rename,
                 self.set_mode, self.make_directory)  # fmt: skip
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

    def set_mode(self, top: Path, _: bytes, __: set[bytes]) -> None:
        """Set the mode of a file or of a directory."""
        path = top / self.rng.choice((*FILES, *DIRECTORIES))
        path.chmod(self.rng.choice((0o700, 0o755) if path.is_dir() else (0o600, 0o644)))

    def make_directory(self, top: Path, _: bytes, __: set[bytes]) -> None:
        """Make a directory, where there may be a file."""
        (top / self.rng.choice((*FILES, *DIRECTORIES))).mkdir()

    def edit_within(self) -> None:
        """Count a step of a commit; the operator edits at one of them."""
        self.edit_at -= 1
        if self.edit_at != 0:
            return
        for _ in range(self.rng.randint(1, 2)):
            ways = self.plain_ways if self.is_mounted else ()
            self.edit(self.scene.base, b"operator", self.removed_by_operator, ways)
            self.had_in_base.append(tree_of(self.scene.base))

    def commit(self, top: Path | None = None) -> None:
        """Commit in a random way, and compare both sides before and after.

        Args:
            top: of the mount of a child that has the workspace; None if none has.
        """
        self.edit_at = -1
        self.scene.rows()  # a look: pointers to what the operator has moved are cut
        given: dict[str, list[str] | bool] = {
            "skips_conflicts": self.rng.random() < 0.5,
            "merges": self.rng.random() < 0.5,
        }
        if self.rng.random() < 0.3:
            given["only"] = [f"/{self.rng.choice((*FILES, *DIRECTORIES))}"]
        if self.rng.random() < 0.3:
            given[self.rng.choice(("theirs", "mine"))] = [f"/{self.rng.choice(FILES)}"]
        self.edit_at = -1 if self.is_alone else self.rng.randint(-30, 30)
        before = _Sides(self, top)
        self.had_in_base = [before.base]
        result = None
        with contextlib.suppress(WorkspaceError), self.scene.open() as workspace:
            result = workspace.commit(selection(**given), is_frozen=top is not None)
        if len(self.had_in_base) > 1:
            self.scene.rows()  # a look, as above
        after = _Sides(self, top)
        if result is not None:
            self.commits.append(result)
        self.compare(before, after, given, result)

    def compare(
        self,
        before: "_Sides",
        after: "_Sides",
        given: dict[str, list[str] | bool],
        result: CommitResult | None,
    ) -> None:
        """Look for what a commit has lost or overwritten."""
        is_quiet = len(self.had_in_base) == 1
        was_done = result is not None and bool(result.applied)
        removed = self.removed_by_child | self.removed_by_operator
        merged = result.merged if result is not None else ()
        for path in merged if is_quiet else ():
            wanted = lines_in({path: before.seen[path]}) | lines_in(
                {path: before.base[path]}
            )
            assert lines_in({path: after.base[path]}) >= wanted - removed
            assert after.seen[path] == after.base[path]
        if is_quiet and "mine" not in given:
            assert _without(after.seen, merged) == _without(before.seen, merged)
        if not was_done and is_quiet:
            assert after.base == before.base
        if self.is_alone and result is not None:
            assert not result.conflicts
        # A path that the child has moved may be removed at one path and left at the other.
        kept = lines_in(after.base) | lines_in(after.seen) | removed
        lost = set().union(*map(lines_in, self.had_in_base)) | lines_in(before.seen)
        for side in ("theirs", "mine"):
            for path in map(os.fsencode, _names(given.get(side))):
                trees = [*self.had_in_base, before.seen]
                lost -= set().union(
                    *(lines_in({path: t[path]}) for t in trees if path in t)
                )
        assert lost - kept == set()
        for path, facts in after.base.items():
            # A renamed directory takes along what the operator has changed in it.
            had = (facts in tree.values() for tree in self.had_in_base)
            is_seen = facts in (before.seen.get(path), after.seen.get(path))
            assert is_seen or any(had), path


class _Sides:
    """The base and the child's view at one moment."""

    def __init__(self, game: Interleaving, top: Path | None) -> None:
        self.base = tree_of(game.scene.base)
        if top is None:
            self.seen = game.scene.seen()
            return
        # A mount that is in use may show neither the one nor the other (WS3c).
        with game.scene.open() as workspace, workspace.trees() as trees:
            self.seen = layered(trees.merged, trees.merged.top())


def _without(tree: Tree, paths: Collection[bytes]) -> Tree:
    return {path: facts for path, facts in tree.items() if path not in paths}


def _names(patterns: list[str] | bool | None) -> list[str]:
    return [one.lstrip("/") for one in patterns] if isinstance(patterns, list) else []


@contextlib.contextmanager
def steps_told(turns: list[Interleaving]) -> Iterator[None]:
    """Have the last of some games told of each step of its commits."""

    def told(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **named: object) -> object:
            turns[-1].edit_within()
            return function(*arguments, **named)

        return wrapped

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (steps_module, "rename"),
            (commit_module, "sync_file_system"),
            (held_module, "compare"),
            (settlement_module, "compare"),
            (WorkspaceDirectory, "write"),
        ):
            real = getattr(owner, name)
            setattr(owner, name, told(real))
            stack.callback(setattr, owner, name, real)
        yield


def lines_in(tree: Tree) -> set[bytes]:
    """Return every line of the files of a tree."""
    found: set[bytes] = set()
    for kind, *facts in tree.values():
        if kind == "file" and isinstance(facts[1], bytes):
            found.update(facts[1].splitlines())
    return found


def play(
    seeds: Sequence[int], *, has_user_marks: bool, top: Path | None = None
) -> None:
    """Play a game for each seed; raise where a line is lost.

    Args:
        seeds: of the games.
        has_user_marks: mounts are made as in a user namespace.
        top: where the trees are; in memory, where that can be, unless given.
    """
    place = top or (MEMORY if os.access(MEMORY, os.W_OK) else None)
    games: list[Interleaving] = []
    with (
        tempfile.TemporaryDirectory(dir=place) as made,
        steps_told(games),
    ):
        scene = Scene(Path(made), has_user_marks=has_user_marks)
        for seed in seeds:
            scene.clear()
            games.append(Interleaving(scene, seed))
            try:
                games[-1].run()
            except BaseException as why:
                why.add_note(f"seed {seed}")
                raise
    commits = [one for game in games for one in game.commits]
    assert sum(bool(one.applied) for one in commits) > len(commits) / 4
    assert sum(bool(one.conflicts) for one in commits) > len(commits) / 20


if __name__ == "__main__":
    play([*map(int, sys.argv[1:])], has_user_marks=True)
