"""A base and a workspace on it, mounted as a child would see it."""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.spawn.launchpad.layers.overlay import (
    DETACHED,
    Layers,
    copy_layers,
    make_overlay,
)
from supervisor.workspace.attributes import TRUSTED_MARKS, USER_MARKS
from supervisor.workspace.directory import make_workspace
from supervisor.workspace.layers import LayeredTree, TreeNode
from supervisor.workspace.selection import CommitSelection, Patterns
from supervisor.workspace.workspace import Workspace

Facts = tuple[object, ...]
Tree = dict[bytes, Facts]


class Scene:
    """A base, a state directory, and one workspace named ``w``."""

    def __init__(
        self, top: Path, name: str = "w", *, has_user_marks: bool = False
    ) -> None:
        self.top = top
        self.name = name
        self._has_user_marks = has_user_marks
        self.base = top / "base"
        self.state = top / "state"
        self.base.mkdir(0o755, exist_ok=True)
        self.state.mkdir(0o700, exist_ok=True)

    def clear(self) -> None:
        """Remove the base and the workspace, for another try."""
        for path in (self.base, self.state):
            shutil.rmtree(path)
        self.base.mkdir(0o755)
        self.state.mkdir(0o700)

    def make(self) -> None:
        """Make the workspace, when the base is as it shall be."""
        make_workspace(str(self.state), "w", os.fsencode(self.base), self.marks)

    @property
    def marks(self) -> bytes:
        """Return how the names of overlayfs's attributes begin."""
        return USER_MARKS if self._has_user_marks else TRUSTED_MARKS

    def open(self) -> Workspace:
        """Open the workspace for one command."""
        return Workspace(str(self.state), self.name)

    @property
    def upper(self) -> Path:
        """Return where the layer is."""
        return self.state / "workspaces" / self.name / "upper"

    @contextlib.contextmanager
    def run(self) -> Iterator[Path]:
        """Mount the workspace as for one run of a child; gives its top."""
        with self.open() as workspace:
            workspace.begin_run()
        with self.mounted() as top:
            yield top

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Mount the workspace; gives its top."""
        with contextlib.ExitStack() as stack:
            with self.open() as workspace:
                layers = workspace.store.paths(workspace.state.layers)
            paths = [str(self.base), str(self.upper.parent), *layers]
            fds = [os.open(path, os.O_PATH) for path in paths]
            for fd in fds:
                stack.callback(os.close, fd)
            copies = copy_layers(Layers(fds[0], fds[1], fds[2:]))
            stack.callback(copies.close)
            marks = self._has_user_marks
            mount = make_overlay(copies, DETACHED, has_user_marks=marks)
            stack.callback(os.close, mount)
            yield Path(f"/proc/{os.getpid()}/fd/{mount}")

    def seen(self) -> Tree:
        """Return what a child would see."""
        with self.mounted() as top:
            return tree_of(top)

    def rows(self) -> list[tuple[object, ...]]:
        """Return (path, change) of each row, with where a renamed one came from."""
        with self.open() as workspace:
            return [
                (os.fsdecode(row.path), row.change.value)
                + ((os.fsdecode(row.origin),) if row.origin else ())
                for row in workspace.changes()
            ]

    def end_run(self) -> None:
        """Record the end of a run, as a host does."""
        with self.open() as workspace:
            workspace.end_run()

    def copy(self, name: str, source: Path) -> Path:
        """Copy a tree aside."""
        target = self.top / name
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", f"{source}/.", str(target)], check=True)
        return target


def tree_of(top: Path) -> Tree:
    """Return path -> kind, mode, content of all that is beneath a directory."""
    found: Tree = {}
    for directory, names, files in os.walk(os.fsencode(f"{top}/.")):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            inside = os.path.relpath(path, os.fsencode(f"{top}/."))
            status = os.lstat(path)
            mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISLNK(status.st_mode):
                found[inside] = ("link", os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                found[inside] = ("directory", mode)
            elif stat.S_ISREG(status.st_mode):
                found[inside] = ("file", mode, Path(os.fsdecode(path)).read_bytes())
            else:
                found[inside] = ("other", status.st_mode, status.st_rdev)
    return found


def layered(tree: LayeredTree, directory: TreeNode) -> Tree:
    """Return what our own reader of layers sees."""
    found: Tree = {}
    with tree.read(directory) as reader:
        for node in reader.entries():
            mode = node.status.st_mode & 0o7777
            if node.is_directory:
                found[node.path] = ("directory", mode)
                found.update(layered(tree, node))
            elif stat.S_ISLNK(node.status.st_mode):
                found[node.path] = ("link", tree.read_link(node))
            else:
                fd = tree.open_file(node)
                with open(fd, "rb") as file:
                    found[node.path] = ("file", mode, file.read())
    return found


def selection(**patterns: list[str] | bool) -> CommitSelection:
    """Return a selection with some patterns."""
    given = {
        name: value if isinstance(value, bool) else Patterns(value)
        for name, value in patterns.items()
    }
    return CommitSelection(**given)  # type: ignore[arg-type]


def write(path: Path, text: str = "text\n", mode: int = 0o644) -> Path:
    """Write a file, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def run_as_a_user(*words: str) -> None:
    """Run a module of the tests in a user namespace of its own; it has to end well."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare(1) is not installed")
    spaces = [unshare, "--user", "--map-root-user", "--mount"]
    if subprocess.run([*spaces, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    program = [*spaces, sys.executable, "-m", *words]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def scene_in(top: Path) -> Scene:
    """Return a base with nothing in it and a workspace on it.

    Skip where no mount is had.

    Root of a user namespace makes the mount as a host does that is not root.
    """
    if os.geteuid() != 0:
        pytest.skip("an overlay mount needs root, or root of a user namespace")
    return Scene(top, has_user_marks=is_in_user_namespace())


def is_in_user_namespace() -> bool:
    """Tell whether this process is in a user namespace that is not the machine's."""
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
