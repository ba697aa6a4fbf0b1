"""Children, hosts and commands of workspaces die by kill -9.

Nothing synced is lost.

A game is one base and one workspace, in which children take the steps of a seed. After
each kill everything is at rest, and looked at: processes, locks, layers, what the workspace
shows, what the base has.
"""

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.directory import WorkspaceError, read_states
from supervisor.workspace.workspace import Workspace
from tests.helpers.rounds import LONG, ROUNDS, SEED
from tests.supervisor.workspace.scene import Tree, layered, tree_of
from tests.system.attacks.test_unprivileged import file_passed_by_nobody
from tests.system.chaos.commands import PATIENCE_S, Commands, commands
from tests.system.chaos.steps import Step

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

IS_ROOT = os.geteuid() == 0
KILLS = ROUNDS if LONG else 10 if IS_ROOT else 4
"""So many kills make the test, of a host that is root and of one that is not."""

TURNS = 8
"""Runs of a child in one game."""

MOST_STEPS = 60
"""Of a child that is not killed."""

HOST_S, CHILD_S, COMMAND_S = 0.5, 0.1, 0.15
"""Kills come within so long a time of a start; of a command until one has ended."""

ASKS, ODDS = (12, 0.9) if LONG else (3, 0.6)
"""So many commands, less one, come after a run at most; and how likely each is killed.

In the long form there are more of them: such a kill takes less time than that of a run.
"""

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where nobody waits for a disk."""

PROGRAM = Path(__file__).with_name("steps.py").read_text(encoding="utf-8")


class Model:
    """The result of a seed's steps in a directory.

    Args:
        top: of the directory, made here.
        seed: of the steps.
    """

    def __init__(self, top: Path, seed: int) -> None:
        self._top = top
        self._seed = seed
        self._taken = 0
        top.mkdir()

    def trees(self, low: int, high: int) -> Iterator[tuple[int, Tree]]:
        """Yield (number of steps done, tree) for some numbers."""
        if low < self._taken:
            shutil.rmtree(self._top)
            self._top.mkdir()
            self._taken = 0
        for number in range(low, high + 1):
            while self._taken < number:
                Step(self._seed, self._taken, moves=IS_ROOT).take(str(self._top))
                self._taken += 1
            yield number, tree_of(self._top)


class Game:
    """One base with its workspace ``w``.

    Attributes:
        kills: so many there were.
    """

    def __init__(self, top: Path, seed: int, host: Commands, command: Commands) -> None:
        self._top = top
        self._seed = seed
        self._rng = random.Random(seed)
        self._host = host
        self._command = command
        self._state = top / "state"
        self._base = top / "base"
        self._acks = top / "acks"
        self._said = top / "said"
        self._base.mkdir()
        self._state.mkdir(0o700)
        self._acks.touch()
        self.kills = 0
        self._done = 0  # steps that are in the workspace
        # Label -> between which steps; None of those that are older than the base is now.
        self._snapshots: dict[str, tuple[int, int] | None] = {}
        self._in_base: Tree = {}
        self._model = Model(top / "model", seed)
        self._took_s: dict[str, float] = {}  # command -> how long the last one took
        self._log: list[str] = []
        # After how many steps a commit began that was killed while a child worked.
        self._frozen_from: int | None = None

    def play(self) -> None:
        """Let some children work, and kill what moves."""
        try:
            for _ in range(TURNS):
                self._run_child()
                for _ in range(self._rng.randrange(ASKS)):
                    self._ask_idle()
        except BaseException as why:
            why.add_note(f"seed {self._seed}: " + "; ".join(self._log))
            for errors in self._top.glob("*.err"):
                why.add_note(errors.read_text())
            raise

    def _run_child(self) -> None:
        """Run a child; kill it, or its host, or neither; and now and then a command."""
        victim = self._rng.choice(("host", "host", "child", "child", "nothing"))
        commits = self._rng.random() < 0.3
        steps = self._rng.randrange(1, MOST_STEPS) if victim == "nothing" else 100_000
        if commits and victim == "host":
            steps = self._rng.randrange(1, 5)  # so that it is killed while it commits
        self._log.append(f"run from {self._done}, kills {victim}")
        when = "on-success" if commits else "never"
        numbers = map(str, (self._seed, self._done, steps))
        words = [
            "--state-dir", str(self._state), "--workspace", str(self._base),
            "--workspace-name", "w", "--commit", when, "--", sys.executable, "-I", "-S",
            "-c", PROGRAM, *numbers, "moves" if IS_ROOT else "",
        ]  # fmt: skip
        late = self._rng.random() * HOST_S if victim == "host" else None
        first = self._acks.stat().st_size
        self._host.start("run", *words, out=self._acks, kill_after_s=late)
        began = self._done
        if victim == "child":
            self._kill_child(first)
        elif victim == "host" and self._rng.random() < 0.5:
            self._ask_busy(began, first)
        status = self._host.end()
        self._done = self._acked(first, began)
        self.kills += status == -9 or victim == "child"
        assert status in {0, -9, 128 + 9}, status
        self._check(may_commit=commits)

    def _kill_child(self, first: int) -> None:
        """Kill the first process of the child, once it has begun to work."""
        deadline = time.monotonic() + PATIENCE_S
        while self._acks.stat().st_size == first:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(self._rng.random() * CHILD_S)
        if self._rng.random() < 0.5:
            self._ask_busy(self._done, first)
        while not (process := self._first_process()):
            assert time.monotonic() < deadline
        os.kill(process, 9)

    def _first_process(self) -> int:
        """Return the child's first process; 0 if its lock does not tell it yet."""
        lock = (self._state / "workspaces/w/lock").read_bytes()
        found = re.search(rb"^(\d+) \d+$", lock, re.MULTILINE)
        return int(found[1]) if found else 0

    def _acked(self, first: int, began: int) -> int:
        """Return how many steps are done, by what the last child has said."""
        with self._acks.open("rb") as file:
            file.seek(first)
            said = file.read().split()
        return int(said[-1]) + 1 if said else began

    def _ask_busy(self, began: int, first: int) -> None:
        """Ask something while a child works; it may be killed."""
        words = self._rng.choice(
            (("diff", "w", "--freeze", "--stat"), ("commit", "w", "--freeze"),
             ("commit", "w", "--freeze"), ("snapshot", "w"), ("list",))
        )  # fmt: skip
        before = self._acked(first, began)
        status = self._ask(*words)
        after = self._acked(first, began)
        if words[0] == "snapshot":
            self._find_snapshots(before, after)
        if words[0] == "commit" and status == -9:
            self._frozen_from = before  # it may be finished later
        now = tree_of(self._base)
        is_new = now != self._in_base
        if is_new and words[0] == "commit" and status != -9:
            found = self._index_of(now, before, after)
            assert found is not None, "the base is at no step"
            self._in_base = now
            self._snapshots = dict.fromkeys(self._snapshots)

    def _ask_idle(self) -> None:
        """Ask something of a workspace that no child has; it may be killed."""
        if not self._is_there():
            return
        words = [
            ("commit", "w"), ("commit", "w"), ("snapshot", "w"), ("discard", "w", "--yes"),
            ("fork", "w", "-n", "2"), ("diff", "w", "--stat"),
        ]  # fmt: skip
        there = [label for label, steps in self._snapshots.items() if steps]
        words += [("restore", "w", label, "--yes") for label in there]
        chosen = self._rng.choice(words)
        status = self._ask(*chosen)
        assert status in {-9, 0} or (chosen[0] in {"diff", "commit"} and status == 1)
        self._check(may_commit=chosen[0] == "commit", asked=chosen, status=status)

    def _ask(self, *words: str) -> int:
        within_s = self._took_s.get(words[0], COMMAND_S)
        late = self._rng.random() * within_s if self._rng.random() < ODDS else None
        self._log.append(" ".join(words) + (" killed" if late is not None else ""))
        where = ("--state-dir", str(self._state))
        began_s = time.monotonic()
        status = self._command.run(
            "workspace", *words, *where, out=self._said, kill_after_s=late
        )
        if status != -9:
            self._took_s[words[0]] = time.monotonic() - began_s
        self.kills += status == -9
        return status

    def _check(
        self,
        *,
        may_commit: bool,
        asked: tuple[str, ...] = ("run",),
        status: int = 0,
    ) -> None:
        """Look at all that is left, when no process is."""
        rows = self._list()
        where = self._state / "workspaces"
        there = set(os.listdir(where)) if where.exists() else set()
        # One that was cut off in the making has nothing in it, and goes a minute later.
        there = {name for name in there if ".discarded-new-" not in name}
        assert set(rows) == there, "there is what is not listed"
        assert {row["state"] for row in rows.values()} <= {"idle", "left behind"}, rows
        self._check_kernel()
        self._check_layers()
        self._check_base(may_commit=may_commit)
        self._frozen_from = None
        if "w" not in rows:
            self._check_gone(asked)
            return
        self._find_snapshots(self._done, self._done)
        seen = self._seen("w")
        if asked[0] == "restore":
            self._check_restored(seen, self._snapshots[asked[2]], status)
        assert self._index_of(seen, self._done, self._done) is not None, "lost"
        for name in rows.keys() - {"w"}:
            assert self._seen(name) == seen, "a fork is not whole"
            with Workspace(str(self._state), name) as workspace:
                workspace.discard()

    def _check_restored(
        self, seen: Tree, steps: tuple[int, int] | None, status: int
    ) -> None:
        assert steps is not None
        found = self._index_of(seen, *steps)
        assert found is not None or status != 0, "not restored"
        if found is not None:
            self._done = found

    def _check_gone(self, asked: tuple[str, ...]) -> None:
        """Look at the base of a workspace that was committed whole, or dropped."""
        self._snapshots.clear()
        if asked[0] == "discard":
            self._done = self._first_index(self._in_base)
        found = self._index_of(self._in_base, self._done, self._done)
        assert found is not None, f"it is gone after {asked}"

    def _check_kernel(self) -> None:
        """Look for what no directory shows: mounts, and locks of files."""
        mounts = Path("/proc/self/mountinfo").read_text()
        assert f" {self._top}" not in mounts, "a mount"
        found = [
            os.lstat(os.path.join(directory, name)).st_ino
            for directory, names, files in os.walk(self._state)
            for name in (*names, *files)
        ]
        device = os.stat(self._state).st_dev
        place = f"{os.major(device):02x}:{os.minor(device):02x}"
        locks = Path("/proc/locks").read_text().split()
        assert not {f"{place}:{inode}" for inode in found} & {*locks}, "a lock"

    def _check_layers(self) -> None:
        layers = self._state / "layers"
        if not layers.exists():
            return
        named = [state.layers_named() for state in read_states(str(self._state))]
        assert set(os.listdir(layers)) <= set().union(*named), "a layer that none has"

    def _check_base(self, *, may_commit: bool) -> None:
        now = tree_of(self._base)
        assert not [name for name in now if name.startswith(b".sandhost")], "a stage"
        if now == self._in_base:
            return
        assert may_commit or self._frozen_from is not None, "the base has changed"
        low = self._done if self._frozen_from is None else self._frozen_from
        found = self._index_of(now, low, self._done)
        assert found is not None, "the base is neither the old nor the new one"
        self._in_base = now
        self._snapshots = dict.fromkeys(self._snapshots)

    def _is_there(self) -> bool:
        return (self._state / "workspaces/w").exists()

    def _list(self) -> dict[str, dict[str, object]]:
        out = self._top / "list"
        out.unlink(missing_ok=True)
        words = ("workspace", "list", "--json", "--state-dir", str(self._state))
        assert self._command.run(*words, out=out) == 0
        return {row["name"]: row for row in json.loads(out.read_bytes())}

    def _find_snapshots(self, low: int, high: int) -> None:
        """Take in the labels that are new: they were taken between two steps."""
        if not self._is_there():
            return
        try:
            with Workspace(str(self._state), "w", PATIENCE_S) as workspace:
                labels = workspace.state.labels()
        except WorkspaceError:
            return
        known = self._snapshots
        self._snapshots = {label: known.get(label, (low, high)) for label in labels}

    def _seen(self, name: str) -> Tree:
        """Return what a child would see in a workspace."""
        with Workspace(str(self._state), name) as workspace:
            with workspace.trees() as trees:
                return layered(trees.merged, trees.merged.top())

    def _index_of(self, tree: Tree, low: int, high: int) -> int | None:
        """Return after how many steps there is a tree, the next one may be half done."""
        for number, model in self._model.trees(low, high):
            step = Step(self._seed, number, moves=IS_ROOT)
            if _apart(tree, step) == _apart(model, step):
                return number
        return None

    def _first_index(self, tree: Tree) -> int:
        for number, model in self._model.trees(0, self._done):
            if model == tree:
                return number
        found = self._index_of(tree, 0, self._done)
        assert found is not None, "the base is at no step"
        return found


def _apart(tree: Tree, step: Step) -> Tree:
    """Return what a step does not touch of a tree."""
    touched = [os.fsencode(path) for path in step.touched]
    return {
        path: facts
        for path, facts in tree.items()
        if not any(
            path == one
            or path.startswith(one + b"/")
            or (one.startswith(path + b"/") and facts[0] == "directory")
            for one in touched
        )
    }


TIMEOUT_S = 300 + KILLS * 10


# spec WS12, WS15, WS18
@pytest.mark.timeout(TIMEOUT_S)
def test_what_was_synced_outlives_every_kill(tell: Callable[[str], None]) -> None:
    seed = SEED or secrets.randbits(32)
    tell(f"CHAOS_SEED={seed}")
    kills = games = 0
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        host, command = (stack.enter_context(commands(top)) for _ in range(2))
        while kills < KILLS:
            place = top / "game"
            place.mkdir(0o755)
            game = Game(place, seed + games, host, command)
            game.play()
            kills += game.kills
            games += 1
            if LONG and kills // 500 > (kills - game.kills) // 500:
                tell(f"{kills} kills in {games} games so far")
            assert (
                remove_tree(place) is None
            )  # overlayfs makes what a user cannot enter
    tell(f"{kills} kills in {games} games of workspaces; nothing was lost or left")


# spec WS18
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(not IS_ROOT, reason="this is that user's")
def test_a_host_that_is_not_root_loses_nothing(request: pytest.FixtureRequest) -> None:
    passed = file_passed_by_nobody(request, rounds=ROUNDS, timeout_s=TIMEOUT_S)
    assert len(passed) == 1
