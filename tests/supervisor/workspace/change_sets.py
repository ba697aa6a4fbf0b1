"""Change sets of a workspace, by child and operator, the same for one seed.

A change set is made of features. Each has a directory of its own, so that they can be
chosen apart, and so that no feature is in another's way.
"""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.supervisor.workspace.scene import Scene, write

Make = Callable[[Path], None]
LINES = "".join(f"{number}\n" for number in range(20))
MEBIBYTE = 1 << 20


def _nothing(_: Path) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Feature:
    """Changes of one kind, made in a directory of their own.

    Attributes:
        base: makes what the base has.
        child: changes that in the workspace.
        operator: changes that in the base, when the child's run has ended.
        renames: it needs a directory of the base to be renamed, which root alone can.
        can_drop: none of it lies in a directory that was made anew or removed.
    """

    base: Make = _nothing
    child: Make = _nothing
    operator: Make = _nothing
    renames: bool = False
    can_drop: bool = True

    @property
    def is_conflict(self) -> bool:
        """Tell whether both sides change something."""
        return self.operator is not _nothing


def _edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def _save(path: Path, text: str) -> None:
    """Write a file as an editor does."""
    write(path.with_name(".saved"), text).rename(path)


def _plain_base(top: Path) -> None:
    for name in ("edited", "mode", "gone"):
        write(top / name, name)


def _plain_child(top: Path) -> None:
    write(top / "edited", "new\n", 0o755)
    (top / "mode").chmod(0o600)
    (top / "gone").unlink()
    write(top / "added", "")
    os.symlink("added", top / "link")


def _moved_base(top: Path) -> None:
    for name in ("moved/one", "moved/two", "moved/in/three", "moved/in/four"):
        write(top / name, name)


def _moved_child(top: Path) -> None:
    (top / "moved").rename(top / "renamed")
    (top / "renamed").chmod(0o700)
    (top / "renamed/in").rename(top / "renamed/inner")
    write(top / "renamed/one", "changed\n")
    (top / "renamed/two").unlink()
    (top / "renamed/inner/three").rename(top / "three")


def _over_base(top: Path) -> None:
    write(top / "first/one")
    write(top / "second/two")
    write(top / "outer/inner/deep")


def _over_child(top: Path) -> None:
    shutil.rmtree(top / "second")
    (top / "first").rename(top / "second")
    (top / "outer/inner").rename(top / "inner")
    shutil.rmtree(top / "outer")
    write(top / "outer", "a file now\n")


def _tree(top: Path) -> None:
    for name in ("tree/a", "tree/in/b", "tree/in/deep/c", "kept/d"):
        write(top / name, name)
    (top / "tree/empty").mkdir()


def _tree_child(top: Path) -> None:
    shutil.rmtree(top / "tree")


def _types_base(top: Path) -> None:
    write(top / "to_directory")
    write(top / "to_file/inside/deep")
    write(top / "to_link")
    write(top / "to_fifo")
    os.symlink("to_fifo", top / "from_link")


def _types_child(top: Path) -> None:
    for name in ("to_directory", "to_link", "to_fifo", "from_link"):
        (top / name).unlink()
    shutil.rmtree(top / "to_file")
    write(top / "to_directory/inside/deep", "new\n", 0o600)
    write(top / "to_file")
    os.symlink("/elsewhere", top / "to_link")
    os.mkfifo(top / "to_fifo", 0o640)
    write(top / "from_link/one")


def _links_base(top: Path) -> None:
    os.link(write(top / "one"), top / "two")
    write(top / "three")


def _links_child(top: Path) -> None:
    write(top / "one", "apart\n")
    os.link(write(top / "three", "of two names\n"), top / "four")
    write(top / "new/five")
    os.link(top / "new/five", top / "six")
    os.link(top / "new/five", top / "new/seven")


def _sparse_base(top: Path) -> None:
    write(top / "grown", "x")
    os.truncate(top / "grown", MEBIBYTE)


def _sparse_child(top: Path) -> None:
    with (top / "grown").open("a") as file:
        file.write("at the end")
    write(top / "new", "x")
    os.truncate(top / "new", 2 * MEBIBYTE)
    with (top / "new").open("r+") as file:
        file.seek(MEBIBYTE)
        file.write("in the middle")


def _attributes_base(top: Path) -> None:
    os.setxattr(write(top / "old"), "user.kept", b"1")


def _attributes_child(top: Path) -> None:
    write(top / "old", "changed\n")
    os.setxattr(top / "old", "user.more", b"\0\xff")
    os.setxattr(write(top / "new"), "user.new", b"")
    os.setxattr(write(top / "made/inside").parent, "user.of_directory", b"3")


def _odd_child(top: Path) -> None:
    write(top / "user", mode=0o4755)
    write(top / "group", mode=0o2755)
    write(top / "shared/inside").parent.chmod(0o2775)
    os.symlink("../../../out", top / "out")
    write(top / ".envrc")


def _nested_child(top: Path) -> None:
    write(top / "a/b/c/d/e")
    write(top / "a/b/f")
    (top / "a/b/c/empty").mkdir()
    (top / "a/b/c").chmod(0o711)
    (top / "a").chmod(0o500)


def _anew_child(top: Path) -> None:
    shutil.rmtree(top / "tree")
    write(top / "tree/in/other")
    shutil.rmtree(top / "kept")
    (top / "kept").mkdir(0o700)


def _replaced_base(top: Path) -> None:
    write(top / "saved", LINES)
    write(top / "swapped/one", "one\n")
    write(top / "with/two", "two\n")


def _replaced_child(top: Path) -> None:
    _save(top / "saved", LINES + "more\n")
    (top / "swapped/one").rename(top / "with/one")
    (top / "with/two").rename(top / "swapped/one")


def _text_base(top: Path) -> None:
    write(top / "in_place", LINES)
    write(top / "saved", LINES)


def _first_lines(top: Path) -> None:
    _edit(top / "in_place", "2\n", "two\n")
    _save(top / "saved", LINES.replace("2\n", "two\n"))


def _last_lines(top: Path) -> None:
    _edit(top / "in_place", "19\n", "nineteen\n")
    _save(top / "saved", LINES.replace("19\n", "nineteen\n"))


def _clash_base(top: Path) -> None:
    write(top / "same_line", LINES)
    write(top / "binary", "\0")
    write(top / "gone_here")
    write(top / "gone_there")
    write(top / "type")


def _clash_child(top: Path) -> None:
    _edit(top / "same_line", "10\n", "mine\n")
    write(top / "binary", "\0child")
    (top / "gone_here").unlink()
    write(top / "gone_there", "edited\n")
    (top / "type").unlink()
    write(top / "type/inside")
    write(top / "both", "child\n")


def _clash_operator(top: Path) -> None:
    _edit(top / "same_line", "10\n", "theirs\n")
    _save(top / "binary", "\0operator")
    write(top / "gone_here", "edited\n")
    (top / "gone_there").unlink()
    write(top / "type", "edited\n")
    write(top / "both", "operator\n")


def _tree_operator(top: Path) -> None:
    write(top / "tree/in/b", "edited\n")
    write(top / "tree/new")


FEATURES: dict[str, Feature] = {
    "plain": Feature(_plain_base, _plain_child),
    "moved": Feature(_moved_base, _moved_child, renames=True),
    "over": Feature(_over_base, _over_child, renames=True, can_drop=False),
    "tree": Feature(_tree, _tree_child),
    "types": Feature(_types_base, _types_child),
    "links": Feature(_links_base, _links_child),
    "sparse": Feature(_sparse_base, _sparse_child),
    "attributes": Feature(_attributes_base, _attributes_child),
    "odd": Feature(_nothing, _odd_child),
    "nested": Feature(_nothing, _nested_child),
    "anew": Feature(_tree, _anew_child, can_drop=False),
    "replaced": Feature(_replaced_base, _replaced_child),
    "texts": Feature(_text_base, _first_lines, _last_lines),
    "clash": Feature(_clash_base, _clash_child, _clash_operator),
    "removed_edited": Feature(_tree, _tree_child, _tree_operator),
}


WAYS = ("all", "only", "but", "skip", "theirs", "mine", "merge", "busy")
"""The choices of a commit; ``busy`` is all of it, of a stopped child."""


class ChangeSet:
    """Some features, and what a commit is asked to take of them.

    Args:
        seed: of what is chosen.
        way: of ``WAYS``.
        may_rename: directories of the base can be renamed.

    Attributes:
        words: arguments of ``commit``, but its name.
        is_busy: the child still has the workspace, and is stopped.
        has_snapshot: one was taken before the changes.
        is_apart: base and workspace are on two mounts.
    """

    def __init__(self, seed: int, way: str, *, may_rename: bool) -> None:
        rng = random.Random(f"{seed} {way}")
        self.is_busy = way == "busy"
        self.has_snapshot = not self.is_busy and rng.random() < 0.2
        self.is_apart = rng.random() < 0.5
        can = [
            name
            for name, feature in FEATURES.items()
            if not feature.renames or (may_rename and not self.is_busy)
        ]
        quiet = [name for name in can if not FEATURES[name].is_conflict]
        loud = [name for name in can if FEATURES[name].is_conflict]
        names = rng.sample(quiet, 4 if way in {"all", "only", "but", "busy"} else 2)
        if len(names) == 2:
            names += rng.sample(loud, 2)
        self.names = sorted(names)
        self.words: dict[str, list[str] | bool] = {"allow": ["*"]}
        can = self.names
        if way == "mine":
            can = [name for name in self.names if FEATURES[name].can_drop]
        half = [f"/{name}/" for name in rng.sample(can, 2)]
        if way in {"only", "but", "theirs"}:
            self.words[way] = half
        if way == "mine":
            self.words["mine"] = half
            self.words["theirs"] = ["*"]
        if way in {"skip", "theirs", "merge"}:
            self.words["skip_conflicts"] = True
        self.words["merge"] = way == "merge"

    def __str__(self) -> str:
        shown = [*self.names, *(str(word) for word in self.words.items())]
        shown += ["busy"] * self.is_busy + ["snapshot"] * self.has_snapshot
        shown += ["apart"] * self.is_apart
        return " ".join(shown)

    def make_base(self, base: Path) -> None:
        """Make what the base has."""
        for name in self.names:
            (base / name).mkdir()
            FEATURES[name].base(base / name)

    def change(self, top: Path) -> None:
        """Change that as the child does."""
        for name in self.names:
            FEATURES[name].child(top / name)

    def meet(self, base: Path) -> None:
        """Change the base as the operator does."""
        for name in self.names:
            FEATURES[name].operator(base / name)

    def prepare(self, scene: Scene) -> None:
        """Make a base, and a workspace that has none of the changes yet."""
        self.make_base(scene.base)
        scene.make()
        if self.has_snapshot:
            with scene.run() as top:
                write(top / "before the snapshot")
            scene.end_run()
            with scene.open() as workspace:
                workspace.snapshot("first")
