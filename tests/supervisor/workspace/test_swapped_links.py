"""Names in the base that are exchanged with links out of it, during commits."""

import contextlib
import mmap
import os
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.workspace.commit import Committer
from supervisor.workspace.commit_journal import STAGING_PREFIX
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.linux import RENAME_EXCHANGE, rename
from tests.helpers.rounds import ROUNDS
from tests.supervisor.workspace.scene import Scene, selection, tree_of, write

pytestmark = pytest.mark.slow

SWAPS = 10 * ROUNDS
NEW = ("new", "new2", "new3")
SWAPPED = ("edited", "edited_in", "gone", "gone_in", "mode", "mode_in", *NEW)
NOBODY = 65534


class Swaps:
    """Exchanges names of a directory with those of links, in a process of its own."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        """Return how many there were."""
        return int(struct.unpack("Q", self._shared)[0])

    @contextlib.contextmanager
    def running(self, directory: Path) -> Iterator[None]:
        """Exchange names of a directory until the block ends."""
        pid = os.fork()
        if pid == 0:
            try:
                self._run(os.open(directory, os.O_RDONLY))
            finally:
                os._exit(1)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)

    def _run(self, directory: int) -> None:
        pairs = [(name.encode(), f"{name}.link".encode()) for name in SWAPPED]
        count = self.count
        while True:
            for one, other in pairs:
                try:
                    rename(directory, one, directory, other, RENAME_EXCHANGE)
                except FileNotFoundError:
                    continue  # not made yet, or removed
                count += 1
                struct.pack_into("Q", self._shared, 0, count)


def fill(base: Path, outside: Path | None = None) -> None:
    """Write the files that are changed; where ``outside`` is given, links lead to it."""
    for name in ("edited", "gone", "mode"):
        write(base / name, "old\n", 0o600)
        write(base / f"{name}_in" / "file", "old\n", 0o600)
    for name in SWAPPED:
        if outside is not None:
            (base / f"{name}.link").symlink_to(outside / name)
        elif name in NEW:
            write(base / name / "file", "old\n", 0o600)


def work(top: Path) -> None:
    """Change everything, as a child does."""
    write(top / "edited", "new\n", 0o600)
    write(top / "edited_in/file", "new\n", 0o600)
    write(top / "edited_in/made/file", "new\n")
    (top / "gone").unlink()
    shutil.rmtree(top / "gone_in")
    (top / "mode").chmod(0o777)
    (top / "mode_in").chmod(0o777)
    (top / "mode_in/file").chmod(0o777)
    for number, name in enumerate(NEW):
        (top / name).mkdir()
        os.utime(top / name, (number, number))


def facts(outside: Path) -> dict[bytes, tuple[object, ...]]:
    """Return all that is kept of each object; a change of any of it changes ctime."""
    found: dict[bytes, tuple[object, ...]] = {}
    for path in (outside, *outside.rglob("*")):
        status = path.lstat()
        owner = (status.st_uid, status.st_gid)
        attributes = [(name, os.getxattr(path, name)) for name in os.listxattr(path)]
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found[os.fsencode(path)] = (status.st_mode, owner, times, attributes)
    return found


# spec WS13, attack 51
@pytest.mark.chaos
def test_nothing_outside_changes_while_names_are_swapped_with_links(
    scene: Scene,
) -> None:
    outside = scene.top / "outside"
    outside.mkdir(mode=0o750)
    fill(outside)
    for path in (outside, *outside.rglob("*")):
        os.setxattr(path, "user.mine", b"yes")
        os.chown(path, NOBODY, NOBODY)
    before, content = facts(outside), tree_of(outside)
    swaps = Swaps()
    applied: set[str] = set()
    while swaps.count < SWAPS or not applied:
        fill(scene.base, outside)
        scene.make()
        with scene.run() as top:
            work(top)
        with swaps.running(scene.base):
            for _ in range(3):
                for name in SWAPPED:
                    applied.update(commit(scene, name))
        assert facts(outside) == before
        scene.clear()
    assert tree_of(outside) == content


def commit(scene: Scene, name: str) -> set[str]:
    """Bring one name to the base; return it if that could be done."""
    try:
        with scene.open() as workspace:
            chosen = selection(only=[f"/{name}"], theirs=["*"])
            return {name} if workspace.commit(chosen).applied else set()
    except (OSError, WorkspaceError):
        return set()  # the base was another one at each look


# spec WS13
@pytest.mark.parametrize("call", ["chmod", "utime"])
def test_a_swap_right_before_a_call_leads_it_nowhere(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    outside = scene.top / "outside"
    for top in (outside, scene.base):
        write(top / "mode", mode=0o600)
    write(outside / "new/file")
    for name in ("mode", "new"):
        (scene.base / f"{name}.link").symlink_to(outside / name)
    before = facts(outside)
    scene.make()
    with scene.run() as top:
        (top / "mode").chmod(0o640)
        (top / "new").mkdir()
    base = os.open(scene.base, os.O_RDONLY)
    real = getattr(os, call)

    def swap() -> None:
        for name in (b"mode", b"new"):
            with contextlib.suppress(FileNotFoundError):
                rename(base, name, base, name + b".link", RENAME_EXCHANGE)

    def swapped(*words: Any, **more: Any) -> None:
        swap()
        real(*words, **more)
        swap()

    monkeypatch.setattr(os, call, swapped)
    with scene.open() as workspace:
        assert workspace.commit(selection(theirs=["*"])).applied
    os.close(base)
    assert facts(outside) == before
    assert (scene.base / "mode").stat().st_mode & 0o777 == 0o640


# spec WS12, WS13
@pytest.mark.parametrize("owner", [0, NOBODY])
def test_a_staging_directory_that_was_swapped_is_not_filled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    write(scene.base / "theirs/file")
    os.chown(scene.base / "theirs", owner, owner)
    before = tree_of(scene.base)
    scene.make()
    with scene.run() as top:
        write(top / "new")
    real = os.mkdir

    def make_then_swap(name: Any, mode: int = 0o777, dir_fd: int | None = None) -> None:
        real(name, mode, dir_fd=dir_fd)
        if os.fsencode(name).startswith(STAGING_PREFIX):
            assert dir_fd is not None
            rename(dir_fd, name, dir_fd, b"theirs", RENAME_EXCHANGE)

    monkeypatch.setattr(Committer, "find_holder", lambda _: "base")
    monkeypatch.setattr(os, "mkdir", make_then_swap)
    with scene.open() as workspace, pytest.raises(OSError, match="another directory"):
        workspace.commit(selection())
    monkeypatch.undo()
    (staging,) = scene.base.glob(".sandhost-commit-*")
    assert list((scene.base / "theirs").iterdir()) == []
    (scene.base / "theirs").rmdir()
    staging.rename(scene.base / "theirs")
    assert tree_of(scene.base) == before
    with scene.open() as workspace:
        assert workspace.commit(selection()).applied == (b"new",)
