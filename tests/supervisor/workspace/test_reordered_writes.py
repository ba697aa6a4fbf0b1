"""A power cut that keeps some writes of a commit and loses earlier ones.

All or nothing.

Between two syncs a disk may keep any of the renames. Here a commit does all its steps, and
dies where it would sync them. Some are taken back then, as if they had not reached the
disk; of those that change one name of one directory the later ones go first. The result
of the next command is compared with the same commit without a cut.
"""

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from hostlib.linux.files import closing_fd
from supervisor.workspace import commit as commit_module
from supervisor.workspace import commit_steps as steps_module
from supervisor.workspace import seal as seal_module
from supervisor.workspace.commit import Committer
from supervisor.workspace.commit_journal import CommitJournal
from supervisor.workspace.directory import State, WorkspaceDirectory
from supervisor.workspace.held_workspace import HeldWorkspace
from supervisor.workspace.linux import rename, sync_file_system
from supervisor.workspace.verbs import do_verb
from tests.helpers.rounds import LONG
from tests.supervisor.workspace.change_sets import WAYS, ChangeSet
from tests.supervisor.workspace.scene import (
    Scene,
    Tree,
    scene_in,
    selection,
    tree_of,
    write,
)
from tests.supervisor.workspace.test_cut_commits import facts_of

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

CUTS, SETS = (20, 25) if LONG else (2, 1)
"""Cuts of each change set, and change sets of each way."""

FIRST_SYNC = 2
"""The first sync of a commit that comes after steps; one before is of what it wrote aside."""

NEVER = 1000
"""No commit has so many syncs."""


class PowerCutError(BaseException):
    """Stands for the end of the machine."""


class Renaming(NamedTuple):
    """A rename that may be lost; its directories are held."""

    from_fd: int
    from_name: bytes
    to_fd: int
    to_name: bytes
    flags: int

    def names(self) -> set[tuple[int, bytes]]:
        """Return the names that it changed, each with its directory."""
        ends = ((self.from_fd, self.from_name), (self.to_fd, self.to_name))
        return {(os.fstat(fd).st_ino, name) for fd, name in ends}

    def is_kept(self) -> bool:
        """Tell whether a directory of it is gone: it was emptied first."""
        return 0 in {os.fstat(fd).st_nlink for fd in (self.from_fd, self.to_fd)}

    def take_back(self) -> None:
        """Make it undone."""
        rename(self.to_fd, self.to_name, self.from_fd, self.from_name, self.flags)


class Disk:
    """The calls of a commit between two syncs of its file system.

    Attributes:
        syncs: so many there were.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._since: list[Renaming] = []
        self.syncs = 0

    @contextlib.contextmanager
    def cut_at(self, sync: int) -> Iterator[None]:
        """Let the power fail before a sync; the block raises ``PowerCutError``."""
        self.syncs = 0

        def note_rename(from_fd: int, from_name: bytes, to_fd: int, *more: Any) -> None:
            rename(from_fd, from_name, to_fd, *more)
            fds = os.dup(from_fd), os.dup(to_fd)
            flags = more[1] if len(more) > 1 else 0
            self._since.append(Renaming(fds[0], from_name, fds[1], more[0], flags))

        def note_sync(fd: int) -> None:
            self.syncs += 1
            if self.syncs == sync:
                raise PowerCutError
            self.forget()
            sync_file_system(fd)

        with self._patch.context() as patch:
            patch.setattr(steps_module, "rename", note_rename)
            patch.setattr(commit_module, "sync_file_system", note_sync)
            yield

    def lose_some(self, rng: random.Random) -> int:
        """Lose some of the renames since the last sync; return how many there were."""
        odds = rng.random()
        return self.lose(lambda _: rng.random() < odds)

    def lose(self, is_lost: Callable[[Renaming], bool]) -> int:
        """Lose renames since the last sync, and what came after them at their names."""
        count = len(self._since)
        kept: set[tuple[int, bytes]] = set()
        for one in reversed(self._since):
            if one.is_kept() or one.names() & kept:
                kept |= one.names()
        lost: set[tuple[int, bytes]] = set()
        chosen = []
        for one in self._since:
            if one.names() & kept:
                continue
            if is_lost(one) or one.names() & lost:
                lost |= one.names()
                chosen.append(one)
        for one in reversed(chosen):
            one.take_back()
        self.forget()
        return count

    def forget(self) -> None:
        """Forget the renames since the last sync: the disk has them."""
        for one in self._since:
            os.close(one.from_fd)
            os.close(one.to_fd)
        self._since.clear()


@pytest.fixture
def place() -> Iterator[Scene]:
    """Return a base and a workspace on it, where nobody waits for a disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as top:
        yield scene_in(Path(top))


def prepare(scene: Scene, changes: ChangeSet) -> Tree:
    """Make what is to be committed; return what the base has."""
    scene.clear()
    changes.prepare(scene)
    with scene.run() as top:
        changes.change(top)
    scene.end_run()
    changes.meet(scene.base)
    return facts_of(scene.base)


def commit(scene: Scene, changes: ChangeSet) -> None:
    words = {key: value for key, value in changes.words.items() if value}
    do_verb(str(scene.state), "commit", {"name": "w", **words})


# spec WS12
@pytest.mark.parametrize("way", [way for way in WAYS if way != "busy"])
def test_a_commit_of_which_the_disk_has_some_renames_is_whole_afterwards(
    place: Scene, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    disk = Disk(monkeypatch)
    renames = finished = 0
    for seed in range(SETS):
        rng = random.Random(f"{way} {seed}")
        changes = ChangeSet(seed, way, may_rename=True)
        prepare(place, changes)
        with disk.cut_at(NEVER):
            commit(place, changes)
        syncs = disk.syncs
        disk.forget()
        after = facts_of(place.base)
        for _ in range(CUTS):
            before = prepare(place, changes)
            sync = rng.randint(FIRST_SYNC, syncs)
            with disk.cut_at(sync), pytest.raises(PowerCutError):
                commit(place, changes)
            renames += disk.lose_some(rng)
            do_verb(str(place.state), "list", {})
            now = facts_of(place.base)
            assert now in (before, after), (seed, str(changes))
            finished += now == after
    assert renames > CUTS * SETS
    assert finished > CUTS * SETS // 2


# spec WS12
def test_a_commit_that_is_undone_with_some_renames_on_the_disk_leaves_the_old_base(
    place: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    rng = random.Random(1)
    for seed in range(SETS * 2):
        changes = ChangeSet(seed, "busy", may_rename=False)
        for is_undo_cut in (False, True):
            for _ in range(CUTS):
                before = prepare(place, changes)
                with place.open() as workspace:
                    lock = workspace.directory.lock_for("child")
                    with disk.cut_at(FIRST_SYNC), pytest.raises(PowerCutError):
                        workspace.commit(selection(allow=["*"]), is_frozen=True)
                    assert disk.lose_some(rng) > 1
                    if is_undo_cut:
                        with disk.cut_at(1), pytest.raises(PowerCutError):
                            workspace.finish_commit()
                        disk.lose_some(rng)
                os.close(lock)
                do_verb(str(place.state), "list", {})
                assert facts_of(place.base) == before, (seed, str(changes))


# spec WS12, WS12a
@pytest.mark.parametrize("lost", [b"d", b"e"])
def test_what_was_done_in_a_moved_directory_is_found_where_the_move_was_lost(
    place: Scene, monkeypatch: pytest.MonkeyPatch, lost: bytes
) -> None:
    disk = Disk(monkeypatch)
    sync = FIRST_SYNC
    while True:
        place.clear()
        write(place.base / "d/in/file")
        before = facts_of(place.base)
        place.make()
        with place.run() as top:
            (top / "d").rename(top / "e")
            (top / "e").chmod(0o700)
            (top / "e/in").rename(top / "e/inner")
            after = facts_of(top)
        place.end_run()
        try:
            with disk.cut_at(sync), place.open() as workspace:
                workspace.commit(selection())
            break
        except PowerCutError:
            disk.lose(lambda one: lost in {one.from_name, one.to_name})
        do_verb(str(place.state), "list", {})
        assert facts_of(place.base) in (before, after), sync
        sync += 1
    disk.forget()
    assert sync == FIRST_SYNC + 2  # one behind the move of each directory, at least


def state_in(journal: bytes | None) -> str:
    """Return the state that a journal on the disk says; ``gone`` if it is removed."""
    if journal is None:
        return "gone"
    return msgspec.msgpack.decode(journal, type=CommitJournal).state


# spec WS12
def test_each_state_of_a_commit_is_written_when_what_it_counts_on_is_synced(
    place: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ChangeSet(1, "all", may_rename=False)
    prepare(place, changes)
    order: list[str] = []

    def note(name: str, call: Any) -> Any:
        def noted(*words: Any) -> Any:
            order.append(name)
            return call(*words)

        return noted

    write_file, remove = WorkspaceDirectory.write, Committer.remove_staging

    def note_state(own: WorkspaceDirectory, name: str, data: bytes | None) -> None:
        if name == "commit":
            order.append(f"journal: {state_in(data)}")
        write_file(own, name, data)

    monkeypatch.setattr(WorkspaceDirectory, "write", note_state)
    monkeypatch.setattr(Committer, "remove_staging", note("staging gone", remove))
    monkeypatch.setattr(steps_module, "rename", note("rename", rename))
    sync = note("sync", sync_file_system)
    monkeypatch.setattr(commit_module, "sync_file_system", sync)
    commit(place, changes)
    steps = [one for i, one in enumerate(order) if order[i - 1 : i] != [one]]
    assert steps == [
        "journal: staging", "sync", "journal: applying", "rename", "sync",
        "journal: applied", "staging gone", "journal: gone",
    ]  # fmt: skip


def snapshot(scene: Scene, label: str) -> None:
    with scene.open() as workspace:
        workspace.snapshot(label)


def snapshot_renamed(scene: Scene, _: pytest.MonkeyPatch) -> None:
    with scene.run() as top:
        (top / "d").rename(top / "e")
    scene.end_run()
    snapshot(scene, "renamed")


def commit_above_snapshot(scene: Scene, _: pytest.MonkeyPatch) -> None:
    snapshot(scene, "before")
    with scene.open() as workspace:
        assert workspace.commit(selection(only=["new"])).applied


def snapshot_often(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal_module, "MAX_LAYERS", 2)
    monkeypatch.setattr(seal_module, "LAYERS_AFTER_MERGE", 1)
    for number in range(3):
        with scene.run() as top:
            write(top / f"new {number}")
        scene.end_run()
        snapshot(scene, f"{number}")


def fork_running(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldWorkspace, "stopped", lambda _: contextlib.nullcontext())
    with scene.run() as top, scene.open() as workspace:
        with closing_fd(workspace.directory.lock_for("child")):
            write(top / "newer")
            assert workspace.fork() == ["w-1"]


# spec WS15, WS18
@pytest.mark.parametrize(
    "work", [snapshot_renamed, commit_above_snapshot, snapshot_often, fork_running]
)
def test_a_written_layer_is_synced_before_a_state_names_it(
    place: Scene,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Scene, pytest.MonkeyPatch], None],
) -> None:
    write(place.base / "d/file")
    place.make()
    with place.run() as top:
        write(top / "new")
    place.end_run()
    synced: dict[str, Tree] = {}
    renamed: set[str] = set()  # uppers, of which a child has synced what it wanted
    written: set[str] = set()

    def layers() -> dict[str, Tree]:
        store = place.state / "layers"
        return {one.name: tree_of(one) for one in store.iterdir()}

    def note_sync(fd: int) -> None:
        synced.update(layers())
        sync_file_system(fd)

    def check(state: State) -> None:
        renamed.add(state.outgoing)
        for name, tree in layers().items():
            if name in state.layers_named() and name not in renamed:
                assert synced.get(name) == tree
                written.add(name)

    def note_state(own: WorkspaceDirectory, state: State) -> None:
        check(state)
        write_state(own, state)

    def note_new_state(own: WorkspaceDirectory, state: State) -> None:
        check(state)
        write_new_state(own, state)

    write_state = WorkspaceDirectory.write_state
    write_new_state = WorkspaceDirectory.write_new_state
    monkeypatch.setattr(WorkspaceDirectory, "write_state", note_state)
    monkeypatch.setattr(WorkspaceDirectory, "write_new_state", note_new_state)
    monkeypatch.setattr(seal_module, "sync_file_system", note_sync, raising=False)
    work(place, monkeypatch)
    assert written
