"""Commits while a child works, some of them cut off, against a model.

A game is one base and one workspace. Children take the steps of a seed, and between two
steps, while the child is stopped, a commit is made, or is cut off at some place as by kill -9.
Between children there are commits, snapshots and forks. After each of them the workspace has
to show what the steps make of a plain directory: to commands, and by the kernel's mount.
"""

import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from supervisor.workspace import commit as commit_module
from supervisor.workspace.commit import Committer
from supervisor.workspace.commit_steps import Steps
from supervisor.workspace.directory import InUseError, WorkspaceError
from supervisor.workspace.selection import CommitSelection
from tests.supervisor.workspace.scene import Scene, Tree, layered, tree_of
from tests.system.chaos.steps import Step

MEMORY = "/dev/shm"

RUNS = 5
MOST_STEPS = 60
"""Of one run."""

MOST_DONE = 6
"""Steps of a commit that may be done before it is cut off."""

PLACES = ("before a step", "before the first", "before its end", "settling")


class CutError(Exception):
    """The command is killed here."""


def _die(*_: object) -> None:
    raise CutError


@contextlib.contextmanager
def cut_at(place: str, done: int) -> Iterator[None]:
    """Cut off every commit.

    Args:
        place: one of ``PLACES``; another one cuts nothing.
        done: so many steps are done before.
    """
    places: dict[str, tuple[object, str]] = {
        "before a step": (Steps, "do"),
        "before the first": (Committer, "apply"),
        "before its end": (Committer, "remove_staging"),
        "settling": (commit_module, "settle"),
    }
    if place not in places:
        yield
        return
    owner, name = places[place]
    real, left = getattr(owner, name), iter(range(done))

    def do(*args: object) -> object:
        if next(left, None) is None:
            raise CutError
        return real(*args)

    setattr(owner, name, do if place == "before a step" else _die)
    try:
        yield
    finally:
        setattr(owner, name, real)


class ModelGame:
    """One game.

    Args:
        scene: empty.
        top: of the model, which is made here.
        seed: of the game.
        moves: children rename directories.
    """

    def __init__(self, scene: Scene, top: Path, seed: int, *, moves: bool) -> None:
        self._scene = scene
        self._top = top
        self._seed = seed
        self._moves = moves
        self._rng = random.Random(seed)
        self._done = 0
        self.log: list[str] = []
        top.mkdir()

    def play(self) -> None:
        """Take turns; raise where the workspace does not show what it has to."""
        self._scene.make()
        for _ in range(RUNS):
            self._run_child()
            self._check()
            for _ in range(self._rng.randrange(3)):
                self._ask(self._rng.choice(("commit", "commit", "snapshot", "fork")))
                self._check()

    def _step(self, top: Path) -> None:
        Step(self._seed, self._done, moves=self._moves).take(str(top))

    def _run_child(self) -> None:
        steps = self._rng.randrange(1, MOST_STEPS)
        commits_at = self._rng.randrange(2 * steps)
        self.log.append(f"run from {self._done} to {self._done + steps}")
        with self._scene.run() as top:
            with self._scene.open() as workspace:
                lock = workspace.directory.lock_for("child-1")
            try:
                for number in range(steps):
                    if number == commits_at:
                        self._commit_in_use()
                    self._step(top)
                    self._step(self._top)
                    self._done += 1
            finally:
                os.close(lock)
        self._scene.end_run()

    def _commit_in_use(self) -> None:
        place = self._rng.choice((*PLACES, "nowhere", "nowhere"))
        self.log.append(f"commit at {self._done}, cut {place}")
        done = self._rng.randrange(MOST_DONE)
        with self._scene.open() as workspace, cut_at(place, done):
            # Refused: over snapshots, and what moves a directory.
            with contextlib.suppress(CutError, InUseError):
                workspace.commit(CommitSelection(), is_frozen=True)

    def _ask(self, what: str) -> None:
        self.log.append(what)
        with self._scene.open() as workspace:
            if what == "commit":
                workspace.commit(CommitSelection())
                return
            try:
                getattr(workspace, what)()
            except WorkspaceError as why:
                if "was renamed" not in str(why):
                    raise

    def _check(self) -> None:
        with self._scene.open() as workspace, workspace.trees() as trees:
            read = layered(trees.merged, trees.merged.top())
        wanted = tree_of(self._top)
        shown = self._scene.seen()
        assert shown == wanted, f"the mount: {_differences(shown, wanted)}"
        assert read == wanted, f"commands: {_differences(read, wanted)}"


def _differences(found: Tree, wanted: Tree) -> str:
    return "; ".join(
        f"{os.fsdecode(path)} is {str(found.get(path))[:60]}, not"
        f" {str(wanted.get(path))[:60]}"
        for path in sorted(found.keys() | wanted.keys())
        if found.get(path) != wanted.get(path)
    )


def play(seeds: Iterable[int], *, has_user_marks: bool) -> None:
    """Play a game for each seed.

    Args:
        seeds: of the games.
        has_user_marks: mounts are made as in a user namespace.
    """
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=place) as made:
            top = Path(made)
            scene = Scene(top, has_user_marks=has_user_marks)
            moves = not has_user_marks  # the kernel answers EXDEV there
            game = ModelGame(scene, top / "model", seed, moves=moves)
            try:
                game.play()
            except BaseException as why:
                why.add_note(f"seed {seed}: {'; '.join(game.log)}")
                raise


if __name__ == "__main__":
    play([*map(int, sys.argv[1:])], has_user_marks=True)
