"""A commit that is killed at any system call: the old base, or afterwards the whole new one."""

import os
import signal
import sys
from collections.abc import Callable

import pytest

import supervisor.workspace.commit as commit_module
import supervisor.workspace.upper as upper_module
from tests.supervisor.workspace.scene import Scene, Tree, selection, tree_of, write

pytestmark = pytest.mark.slow

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


def commit_killed_at(scene: Scene, number: int) -> bool:
    """Commit in a process that ends itself at one of its calls; tell whether it did."""
    pid = os.fork()
    if pid == 0:
        try:
            _count_down(number)
            with scene.open() as workspace:
                workspace.commit(selection())
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def _count_down(number: int) -> None:
    left = number

    def call() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

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
        (commit_module, "rename"),
        (commit_module, "sync_file_system"),
        (upper_module, "compare"),
    ):
        setattr(module, name, counted(getattr(module, name)))
    sys.addaudithook(audit)


# spec WS12, WS18
@pytest.mark.parametrize("part", range(4))
def test_a_killed_commit_leaves_the_old_base_or_ends_as_the_whole_new_one(
    scene: Scene, part: int
) -> None:
    number, outcomes = part, set()
    while True:
        before, after = prepare(scene)
        if not commit_killed_at(scene, number):
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
        number += 4
    assert {(False, False), (True, True)} <= outcomes
    assert number > 100
