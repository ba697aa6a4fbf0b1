"""Whatever is committed, and wherever that is cut.

All of what was chosen, or nothing.

Each commit is a process of its own that is killed at one of its system calls, or to which
the disk is full from there on, or for that call alone. The expected base is known from
the same commit without a cut.
"""

import contextlib
import ctypes
import errno
import json
import os
import random
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from supervisor.workspace.verbs import (
    VerbError,
    commit_row,
    do_verb,
    path_in,
    word_errors,
)
from tests.helpers.figures import tell
from tests.helpers.rounds import LONG, ROUNDS, SEED
from tests.supervisor.workspace.change_sets import WAYS, ChangeSet
from tests.supervisor.workspace.cutting import KILL, Cut, run_cut
from tests.supervisor.workspace.scene import (
    Scene,
    Tree,
    is_in_user_namespace,
    run_as_a_user,
    scene_in,
    selection,
)

__all__ = ["tell"]

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

MIB = 1 << 20
CUTS = ROUNDS // 5 if LONG else 16
"""So many cuts make the test."""

EACH = 10 if LONG else 2
"""So many of them are of one change set."""

_NEW_MOUNTS, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
"""Of unshare(2) and mount(2)."""


class Sides(NamedTuple):
    """The base, a child's view, and the differences."""

    base: Tree
    seen: Tree
    rows: list[tuple[object, ...]]


def facts_of(top: Path) -> Tree:
    """Return path -> all that a commit brings along but the times."""
    found: Tree = {}
    names: dict[tuple[int, int], list[bytes]] = {}
    for path in paths_in(top):
        where = os.path.join(os.fsencode(top), path)
        status = os.lstat(where)
        mode = status.st_mode
        facts: list[object] = [oct(mode), status.st_uid, status.st_gid]
        if stat.S_ISLNK(mode):
            facts.append(os.readlink(where))
        elif not stat.S_ISFIFO(mode):
            facts += [(one, os.getxattr(where, one)) for one in own_attributes(where)]
        if stat.S_ISREG(mode):
            facts.append(Path(os.fsdecode(where)).read_bytes().rstrip(b"\0"))
            is_sparse = status.st_blocks * 512 <= status.st_size // 2
            facts += [status.st_size, status.st_size >= MIB and is_sparse]
        if not stat.S_ISDIR(mode):
            links = names.setdefault((status.st_dev, status.st_ino), [])
            links.append(path)
            facts.append(links)
        found[path] = tuple(facts)
    return found


def paths_in(top: Path) -> Iterator[bytes]:
    """Yield the paths of all that is beneath a directory, sorted."""
    start = os.path.join(os.fsencode(top), b".")
    for directory, names, files in os.walk(start):
        names.sort()
        for name in sorted((*names, *files)):
            yield os.path.relpath(os.path.join(directory, name), start)


def own_attributes(path: bytes) -> list[str]:
    """Return the attributes that programs have set."""
    names = os.listxattr(path, follow_symlinks=False)
    return sorted(name for name in names if name.startswith("user.")
                  and not name.startswith("user.overlay."))  # fmt: skip


def times_of(top: Path) -> dict[bytes, int]:
    """Return path -> when a file was written, of all that is no directory."""
    found = {}
    for path in paths_in(top):
        status = os.lstat(os.path.join(os.fsencode(top), path))
        if not stat.S_ISDIR(status.st_mode):
            found[path] = status.st_mtime_ns
    return found


class Cutting:
    """One change set, made anew for each cut of its commit.

    Args:
        scene: where it is made.
        seed: of the change set, and of what is asked after a cut.
        way: of the commit, one of ``change_sets.WAYS``.

    Attributes:
        calls: so many of the commit can be cut.
    """

    def __init__(self, scene: Scene, seed: int, way: str) -> None:
        self.scene = scene
        self.set = ChangeSet(seed, way, may_rename=not is_in_user_namespace())
        self._rng = random.Random(seed)
        self._child = contextlib.ExitStack()
        self._prepare()
        self._before = self._sides()
        self._prepare()
        whole = self._commit()
        self.calls = whole.calls
        self._result = said_of(whole)
        assert "error" not in self._result, self._result
        assert self._result["applied"]
        self._end()
        self._after = self._sides()
        self._is_discarded = not self._is_there()
        self._upper = self._names_in_layer()
        self._check_whole()

    def cut(self, number: int, way: str) -> None:
        """Cut one call of the commit, and look at what is left."""
        self._prepare()
        error = KILL if way == "kill" else errno.ENOSPC
        cut = self._commit(number, error, lasts=way == "full")
        said = said_of(cut)
        assert said or way == "kill", "it died of a full disk"
        told = said.get("error", "")
        is_unchanged = "nothing changed" in told
        if is_unchanged:
            assert facts_of(self.scene.base) == self._before.base, told
        self._end()
        now = self._sides()
        is_done = now.base == self._after.base
        assert now == (self._after if is_done else self._before)
        assert not (is_done and is_unchanged), told
        assert is_done or way == "kill" or told
        if not is_done:
            self._commit_again()
        if not self._is_discarded:
            assert self._names_in_layer() == self._upper
        self._check_stages()
        self._check_times()

    def _prepare(self) -> None:
        """Make the base, the workspace and the changes; nothing is committed."""
        self._child.close()
        self.scene.clear()
        self.set.prepare(self.scene)
        top = self._child.enter_context(self.scene.run())
        self._child.callback(self.scene.end_run)
        with self.scene.open() as workspace:
            self._child.callback(os.close, workspace.directory.lock_for("child"))
        self.set.change(top)
        self._times = times_of(top)
        if not self.set.is_busy:
            self._child.close()
        self.set.meet(self.scene.base)

    def _commit(
        self, number: int = -1, error: int = KILL, *, lasts: bool = False
    ) -> Cut:
        return run_cut(self._commit_here, number, error, lasts=lasts)

    def _commit_here(self) -> bytes:
        """Commit as the command does; return what that tells."""
        words = {"name": "w", **self.set.words}
        if self.set.is_apart:
            mount_apart(self.scene.base)
        try:
            if not self.set.is_busy:
                result = do_verb(str(self.scene.state), "commit", words).result
            else:
                with word_errors(), self.scene.open() as workspace:
                    chosen = selection(allow=["*"])
                    done = workspace.commit(chosen, is_frozen=True)
                    result = commit_row(done)
        except VerbError as why:
            result = {"error": str(why)}
        return json.dumps(result).encode()

    def _end(self) -> None:
        """Ask something, end the child, and ask something again."""
        self._ask()
        if self.set.is_busy:
            self._child.close()
            self._ask()

    def _ask(self) -> None:
        """Ask something of the workspace: that ends what was cut."""
        if self.set.is_busy or self._rng.random() < 0.5:
            do_verb(str(self.scene.state), "list", {})
        elif self._is_there() and self._rng.random() < 0.5:
            do_verb(str(self.scene.state), "diff", {"name": "w"})
        elif self._is_there():
            with self.scene.run():
                pass
            self.scene.end_run()

    def _is_there(self) -> bool:
        return self.scene.upper.parent.exists()

    def _sides(self) -> Sides:
        base = facts_of(self.scene.base)
        if not self._is_there():
            return Sides(base, base, [])
        with self.scene.mounted() as top:
            # A rename before a snapshot is told otherwise when that is sealed.
            rows = [] if self.set.has_snapshot else self.scene.rows()
            return Sides(base, facts_of(top), rows)

    def _names_in_layer(self) -> set[bytes]:
        """Return what the layer has, but directories: one that is empty shows nothing."""
        if not self._is_there() or self.set.has_snapshot:
            return set()
        return {*times_of(self.scene.upper)}

    def _commit_again(self) -> None:
        assert said_of(self._commit()) == self._result
        self._end()
        assert self._sides() == self._after

    def _check_whole(self) -> None:
        """Look at what the commit made that was not cut."""
        words = self.set.words
        if not (words["merge"] or "mine" in words):
            assert self._after.seen.keys() == self._before.seen.keys()
            if not self._is_there():
                assert self._after.base == self._before.seen
        self._check_times()

    def _check_stages(self) -> None:
        """Look for what a commit writes aside."""
        places = [self.scene.base, self.scene.upper.parent]
        names = [
            name for place in places if place.exists() for name in os.listdir(place)
        ]
        assert not {name for name in names if "commit" in name or ".new" in name}

    def _check_times(self) -> None:
        """Compare the times of what was committed with those of what the child made."""
        now = times_of(self.scene.base)
        chosen = {path_in(row) for row in self._result["applied"]}
        chosen -= {path_in(row) for row in self._result["merged"]}
        paths = chosen & now.keys()
        assert {one: now[one] for one in paths} == {
            one: self._times[one] for one in paths
        }


def said_of(cut: Cut) -> dict[str, Any]:
    """Return what a commit told; {} if it was killed."""
    if cut.said is None:
        return {}
    assert cut.said.startswith(b"{"), cut.said.decode()
    found: dict[str, Any] = json.loads(cut.said)
    return found


def mount_apart(base: Path) -> None:
    """Give a directory a mount of its own, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = os.fsencode(base)
    assert libc.unshare(_NEW_MOUNTS) == 0
    assert libc.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None) == 0
    assert libc.mount(path, path, None, _BIND, None) == 0


@pytest.fixture
def place() -> Iterator[Scene]:
    """Return a base and a workspace on it, where nobody waits for a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as top:
        yield scene_in(Path(top))


# spec WS10, WS11, WS11a, WS12, WS12a, WS13, WS18
@pytest.mark.timeout(300 + CUTS * 5)
@pytest.mark.parametrize("way", WAYS)
def test_what_was_chosen_is_there_as_a_whole_or_not_at_all(
    place: Scene, way: str, tell: Callable[[str], None]
) -> None:
    seed = SEED or (secrets.randbits(32) if LONG else 1)
    tell(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    for first in range(0, CUTS // len(WAYS), EACH):
        cutting = Cutting(place, seed + first, way)
        for _ in range(EACH):
            cut = rng.choice(("kill", "fail", "full"))
            call = rng.randrange(cutting.calls)
            try:
                cutting.cut(call, cut)
            except BaseException as why:
                why.add_note(f"seed {seed + first}: {cut} at {call}: {cutting.set}")
                raise
        if LONG:
            tell(f"{first + EACH} cuts of commits that take {way}: {cutting.set}")


# spec WS3a
@pytest.mark.timeout(360 + CUTS * 40)
def test_a_user_s_commits_are_cut_the_same(tmp_path: Path) -> None:
    if is_in_user_namespace():
        pytest.skip("this is such a user")
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/inner"]
    if not LONG:  # the others are root's
        options += ["-k", "as_a_whole and (all or busy)"]
    run_as_a_user("pytest", *options, __file__)
