"""A commit that is killed or fails at any call.

The old base, or after that the whole new one.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable

import pytest

import supervisor.workspace.upper as upper_module
from supervisor.workspace import commit as commit_module
from supervisor.workspace import commit_steps as steps_module
from supervisor.workspace.directory import WorkspaceError
from tests.helpers.rounds import LONG
from tests.supervisor.workspace.scene import Scene, Tree, selection, tree_of, write

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

EVENTS = frozenset(
    {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
     "os.chmod", "os.chown", "os.utime", "os.removexattr", "os.setxattr", "shutil.rmtree"}
)  # fmt: skip


def prepare(scene: Scene) -> tuple[Tree, Tree]:
    """Make a base and changes of every kind; return what was there, and what is seen."""
    write(scene.base / "edited", "old\n")
    write(scene.base / "kept")
    write(scene.base / "gone/deep/file")
    write(scene.base / "moved/one")
    write(scene.base / "moved/two")
    write(scene.base / "becomes_file/x")
    write(scene.base / "becomes_directory")
    (scene.base / "link").symlink_to("kept")
    before = tree_of(scene.base)
    scene.make()
    with scene.run() as top:
        write(top / "edited", "new\n", 0o755)
        write(top / "new/deep/file")
        os.link(top / "edited", top / "linked")
        os.rename(top / "moved", top / "renamed")
        write(top / "renamed/one", "changed\n")
        for path in ("gone/deep/file", "becomes_file/x", "becomes_directory", "link"):
            (top / path).unlink()
        for path in ("gone/deep", "gone", "becomes_file"):
            (top / path).rmdir()
        write(top / "becomes_file")
        write(top / "becomes_directory/inside")
        (top / "link").symlink_to("edited")
        return before, tree_of(top)


def is_commit_cut_at(scene: Scene, number: int, cut: Callable[[], None]) -> bool:
    """Commit in a process of which one call is cut; tell whether it had so many."""
    pid = os.fork()
    if pid == 0:
        status = 0
        try:
            was_cut = _count_down(number, cut)
            with (
                contextlib.suppress(OSError, WorkspaceError),
                scene.open() as workspace,
            ):
                workspace.commit(selection())
            status = int(was_cut())
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return status != 0


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _count_down(number: int, cut: Callable[[], None]) -> Callable[[], bool]:
    """Cut one of the calls that follow; return what tells whether it was."""
    left = number

    def call() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            cut()

    def audit(event: str, _: object) -> None:
        if event in EVENTS:
            call()

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            call()
            return function(*arguments)

        return wrapped

    # Calls that the interpreter does not tell of.
    for module, name in (
        (steps_module, "rename"),
        (commit_module, "sync_file_system"),
        (upper_module, "compare"),
    ):
        setattr(module, name, counted(getattr(module, name)))
    sys.addaudithook(audit)
    return lambda: left < 0


# spec WS12, WS18
@pytest.mark.parametrize("cut", [kill, fail])
@pytest.mark.parametrize("part", range(4 if LONG else 2))
def test_a_cut_commit_leaves_the_old_base_or_ends_as_the_whole_new_one(
    scene: Scene, part: int, cut: Callable[[], None]
) -> None:
    number, outcomes = part, set()
    while True:
        before, after = prepare(scene)
        if not is_commit_cut_at(scene, number, cut):
            break
        with scene.open() as workspace:
            is_done = workspace.finish_commit()
        base = tree_of(scene.base)
        assert base in (before, after), number
        assert scene.seen() == after, number
        outcomes.add((is_done, base == after))
        with scene.open() as workspace:
            workspace.commit(selection())
        assert tree_of(scene.base) == after, number
        assert scene.seen() == after, number
        scene.clear()
        number += 4 if LONG else 12
    if cut is kill:
        assert {(False, False), (True, True)} <= outcomes
    assert {is_new for _, is_new in outcomes} >= {False}
    assert number > 100
