"""Random system calls in a workspace's mount and in a plain directory: one answer.

Differences that the specification allows are modelled by name:
 1. WS3a: with user marks, rename(2) of a directory of the base is EXDEV.
 2. WS3b: hard links of the base are files apart: in the model they are so from the start,
    and their count of links is not compared.
 3. With user marks the kernel can't follow the origin of a file that was copied up, so a
    hard link to such a file is an inode apart: rename(2) of the one name to the other,
    which does nothing, is ESTALE, and copy_file_range(2) may know an old size of it.
 4. A change of mode by a read-only descriptor of a file of the base that has no name
    any more is EEXIST: it would have to be copied up under its name.
Of directories, size and count of links are the file system's own, and not compared.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.supervisor.workspace.scene import Scene, selection, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY = Path("/dev/shm")
STEPS_OF_AN_EPISODE = 125
STEPS_OF_A_TREE = 25
MAX_DESCRIPTORS = 5
DONE_SHOWN = 40
LONG_AGO_NS = 10**18
"""Times before this were set by a step; later ones are those of the run."""

NAMES = ("a", "b", "c", "d", "e", "l")
FLAGS = (
    os.O_RDONLY,
    os.O_RDWR,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_TRUNC,
    os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW,
    os.O_RDONLY | os.O_DIRECTORY,
)
Answer = object


class Failure(str):
    """The name of the error that a call gave."""

    __slots__ = ()


class Side:
    """One of the two trees, and the descriptors that are open in it."""

    def __init__(self, top: Path) -> None:
        self.top = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
        self.fds: list[int] = []

    def close(self) -> None:
        """Close all descriptors."""
        for fd in (self.top, *self.fds):
            os.close(fd)

    def full(self, path: str) -> str:
        """Return a name of a path for calls that take no descriptor."""
        return f"/proc/self/fd/{self.top}/{path}"

    def status(self, path: str) -> os.stat_result:
        """Return the status of an object, links not followed."""
        return os.stat(path, dir_fd=self.top, follow_symlinks=False)


Step = tuple[str, "Callable[[Side], Answer]"]


def answer_of(call: Callable[[Side], Answer], side: Side) -> Answer:
    """Return what a call gives: its result, or the name of its error."""
    try:
        return call(side)
    except OSError as why:
        return Failure(errno.errorcode[why.errno or 0])


class Game:
    """One base, its workspace's mount and the model, and random steps in both.

    Args:
        scene: with an empty base.
        seed: of the steps.
        has_user_marks: the mount is made as in a user namespace.
    """

    def __init__(self, scene: Scene, seed: int, *, has_user_marks: bool) -> None:
        self.scene = scene
        self.rng = random.Random(seed)
        self.has_user_marks = has_user_marks
        self.model_top = scene.top / "model"
        self.linked: set[int] = set()
        self.base_directories: set[int] = set()
        self.refused_renames = 0
        self.stale_renames = 0
        self.refused_changes = 0
        self.base_files: set[int] = set()
        self.answers: dict[str, list[bool]] = {}

    def run(self, steps: int) -> None:
        """Take steps in both trees, look at them, and commit."""
        self.make_base()
        self.scene.make()
        with self.scene.run() as top:
            seen, model = Side(top), Side(self.model_top)
            try:
                self.play(seen, model, steps)
            finally:
                seen.close()
                model.close()
        expected = tree_of(self.model_top)
        assert self.scene.seen() == expected, "mounted anew"
        self.scene.end_run()
        with self.scene.open() as workspace:
            if workspace.changes():
                result = workspace.commit(selection(allow=["**"]))
                assert not result.is_refused, result
        assert tree_of(self.scene.base) == expected, "committed"

    def make_base(self) -> None:
        """Make a base of every kind of object, and the model from it."""
        base = self.scene.base
        for place in ("a/b", "d/e/a", "d/a/empty", "a/empty", "empty"):
            (base / place).mkdir(parents=True)
        for place in ("", "a", "a/b", "d", "d/e", "d/e/a"):
            for name in ("c", "l", "b"):
                path = base / place / name
                if not path.exists() and self.rng.random() < 0.6:
                    path.write_bytes(self.rng.randbytes(self.rng.randint(0, 9000)))
        (base / "e").symlink_to("a/b")
        (base / "d/d").symlink_to("h1")
        first = base / "d/h1"
        first.write_bytes(b"linked\n")
        (base / "d/h2").hardlink_to(first)
        with (base / "a/holes").open("wb") as file:
            file.seek(1 << 16)
            file.write(b"end")
        os.setxattr(base / "a", b"user.base", b"1")
        shutil.rmtree(self.model_top, ignore_errors=True)
        shutil.copytree(base, self.model_top, symlinks=True)
        self.linked = {os.stat(self.model_top / f"d/h{n}").st_ino for n in (1, 2)}
        holes = self.model_top / "a/holes"
        os.truncate(holes, 0)  # shutil writes what was a hole
        os.truncate(holes, (1 << 16) + 3)
        with holes.open("r+b") as file:
            file.seek(1 << 16)
            file.write(b"end")
        for at, _, files in os.walk(self.model_top):
            self.base_directories.add(os.stat(at).st_ino)
            for name in files:
                status = os.lstat(Path(at, name))
                there = base / Path(at, name).relative_to(self.model_top)
                if stat.S_ISREG(status.st_mode):
                    self.base_files.add(status.st_ino)
                    os.utime(there, ns=(10**15, 10**15))
                    os.utime(Path(at, name), ns=(10**15, 10**15))

    def play(self, seen: Side, model: Side, steps: int) -> None:
        """Take steps and compare each answer, and now and then both trees."""
        done: list[str] = []
        for number in range(steps):
            name, call = self.rng.choice(WAYS)(self, model)
            done.append(name)
            refused = self.is_refused_rename(name, model)
            got = answer_of(call, seen)
            if refused and got == "EXDEV":
                self.refused_renames += 1
                continue
            assert not refused or isinstance(got, Failure), f"no EXDEV: {name}"
            is_twin = self.has_user_marks and self.is_rename_of_twins(name, model)
            if got == "EEXIST" and self.is_change_of_nameless(name, model):
                self.refused_changes += 1
                continue
            expected = answer_of(call, model)
            if is_twin and got == "ESTALE" and expected is None:
                self.stale_renames += 1
                continue
            kind = name.split(" ", 1)[0]
            is_done = not isinstance(expected, Failure)
            self.answers.setdefault(kind, []).append(is_done)
            assert got == expected, (
                f"{got} is not {expected}; steps: {done[-DONE_SHOWN:]}"
            )
            if number % STEPS_OF_A_TREE == 0:
                assert self.tree(seen) == self.tree(model), done[-STEPS_OF_A_TREE:]
        assert self.tree(seen) == self.tree(model), done[-STEPS_OF_A_TREE:]

    def is_refused_rename(self, name: str, model: Side) -> bool:
        """Tell whether a step moves a directory of the base where WS3a refuses it."""
        what, *paths = name.split(" ")
        if what != "rename" or not self.has_user_marks or paths[0] == paths[1]:
            return False
        try:
            return model.status(paths[0]).st_ino in self.base_directories
        except OSError:
            return False

    def is_rename_of_twins(self, name: str, model: Side) -> bool:
        """Tell whether a step renames a file to another name of the same file."""
        what, *paths = name.split(" ")
        if what != "rename":
            return False
        try:
            one, other = (model.status(path) for path in paths)
        except OSError:
            return False
        return one.st_ino == other.st_ino and not stat.S_ISDIR(one.st_mode)

    def is_change_of_nameless(self, name: str, model: Side) -> bool:
        """Tell whether a step changes the mode of a base's file that has no name."""
        if not name.startswith("fchmod #"):
            return False
        status = os.fstat(model.fds[int(name.split(" ")[1][1:])])
        return status.st_nlink == 0 and status.st_ino in self.base_files

    def tree(self, side: Side) -> dict[str, Answer]:
        """Return path -> what is compared, of all that is beneath the top."""
        found: dict[str, Answer] = {}
        for at, names, files, _ in os.fwalk(".", dir_fd=side.top):
            for name in (*names, *files):
                path = os.path.normpath(f"{at}/{name}")
                found[path] = (
                    facts_of(side, path),
                    answer_of(lambda one, p=path: read_xattrs(one, p), side),  # type: ignore[misc]
                    answer_of(lambda one, p=path: read_whole(one, p), side),  # type: ignore[misc]
                )
        return found

    def path(self, model: Side) -> str:
        """Return a path: of something that is there, or of any name in a directory."""
        parts: list[str] = []
        for _ in range(self.rng.randint(1, 4)):
            try:
                fd = os.open("/".join(parts) or ".", os.O_RDONLY, dir_fd=model.top)
            except OSError:
                break
            try:
                names = os.listdir(fd)
            except OSError:
                break
            finally:
                os.close(fd)
            there = sorted(names)
            is_there = there and self.rng.random() < 0.75
            parts.append(self.rng.choice(there if is_there else NAMES))
        return "/".join(parts)

    def data(self) -> bytes:
        """Return bytes to write."""
        return self.rng.randbytes(self.rng.choice((1, 10, 4096, 10_000)))


def facts_of(side: Side, path: str) -> Answer:
    """Return what is compared of an object's status."""
    status = side.status(path)
    time_ns = status.st_mtime_ns if status.st_mtime_ns < LONG_AGO_NS else "new"
    facts = (status.st_mode, status.st_uid, status.st_gid)
    if stat.S_ISDIR(status.st_mode):
        return facts
    return (*facts, status.st_size, time_ns)


def read_whole(side: Side, path: str) -> Answer:
    """Return a file's content or a link's words."""
    if stat.S_ISLNK(side.status(path).st_mode):
        return os.readlink(path, dir_fd=side.top)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=side.top)

    with open(path, "rb", opener=opener) as file:  # closes a directory, too
        return file.read()


def read_xattrs(side: Side, path: str) -> Answer:
    """Return an object's extended attributes of users."""
    full = side.full(path)
    names = sorted(os.listxattr(full, follow_symlinks=False))
    users = [name for name in names if name.startswith("user.")]
    return [(name, os.getxattr(full, name, follow_symlinks=False)) for name in users]


def _open(game: Game, model: Side) -> Step:
    path, flags = game.path(model), game.rng.choice(FLAGS)

    def call(side: Side) -> Answer:
        fd = os.open(path, flags, 0o640, dir_fd=side.top)
        side.fds.append(fd)
        if len(side.fds) > MAX_DESCRIPTORS:
            os.close(side.fds.pop(0))
        return stat.S_IFMT(os.fstat(fd).st_mode), os.fstat(fd).st_size * (
            not stat.S_ISDIR(os.fstat(fd).st_mode)
        )

    return f"open {path} {flags:o}", call


def _with_descriptor(game: Game, model: Side) -> Step:
    if not model.fds:
        return _open(game, model)
    index, data = game.rng.randrange(len(model.fds)), game.data()
    offset, size = game.rng.randint(0, 80_000), game.rng.randint(0, 9000)
    other = game.rng.randrange(len(model.fds))
    ways: dict[str, Callable[[int, Side], Answer]] = {
        "read": lambda fd, _: os.read(fd, size),
        "pread": lambda fd, _: os.pread(fd, size, offset),
        "write": lambda fd, _: os.write(fd, data),
        "pwrite": lambda fd, _: os.pwrite(fd, data, offset),
        "ftruncate": lambda fd, _: os.ftruncate(fd, offset),
        "fsync": lambda fd, _: os.fsync(fd),
        "fchmod": lambda fd, _: os.fchmod(fd, 0o600 | offset & 0o177),
        "seek": lambda fd, _: os.lseek(fd, offset, os.SEEK_SET) and None,
        "hole": lambda fd, _: os.lseek(fd, offset, os.SEEK_HOLE),
        "data": lambda fd, _: os.lseek(fd, offset, os.SEEK_DATA),
        "copy": lambda fd, side: os.copy_file_range(
            fd, side.fds[other], size, offset // 3, offset
        ),
        "map": lambda fd, _: _write_by_map(fd, data),
        "fstat": lambda fd, _: os.fstat(fd).st_mode,
    }
    name = game.rng.choice(sorted(ways))
    is_directory = stat.S_ISDIR(os.fstat(model.fds[index]).st_mode)
    if is_directory and name in {"seek", "hole", "data"}:
        name = "fstat"  # offsets in directories are the file system's own
    links = os.fstat(model.fds[index]).st_nlink
    if name == "copy" and game.has_user_marks and links > 1:
        name = "pread"
    way = ways[name]
    return f"{name} #{index} {offset} {size}", lambda side: way(side.fds[index], side)


def _write_by_map(fd: int, data: bytes) -> Answer:
    size = os.fstat(fd).st_size
    if stat.S_ISDIR(os.fstat(fd).st_mode) or not size:
        return None
    try:
        with mmap.mmap(fd, size) as memory:
            count = min(len(data), size)
            memory[:count] = data[:count]
            memory.flush()
            return count
    except ValueError:  # a size that this module does not take
        return None


def _one_path(game: Game, model: Side) -> Step:
    path, number = game.path(model), game.rng.randint(0, 80_000)
    mode = game.rng.choice((0o700, 0o755, 0o644, 0o600, 0o1777))
    data = game.data()
    xattr = "user.base"
    ways: dict[str, Callable[[Side], Answer]] = {
        "unlink": lambda side: os.unlink(path, dir_fd=side.top),
        "rmdir": lambda side: os.rmdir(path, dir_fd=side.top),
        "mkdir": lambda side: os.mkdir(path, mode, dir_fd=side.top),
        "chmod": lambda side: os.chmod(path, mode, dir_fd=side.top),
        "truncate": lambda side: os.truncate(side.full(path), number),
        "utimens": lambda side: os.utime(
            path, ns=(number, number), dir_fd=side.top, follow_symlinks=False
        ),
        "stat": lambda side: facts_of(side, path),
        "list": lambda side: sorted(os.listdir(side.full(path))),
        "setxattr": lambda side: os.setxattr(
            side.full(path), xattr, data[:100], follow_symlinks=False
        ),
        "removexattr": lambda side: os.removexattr(
            side.full(path), xattr, follow_symlinks=False
        ),
        "xattrs": lambda side: read_xattrs(side, path),
        "content": lambda side: read_whole(side, path),
        "links": lambda side: _count_links(side, path),
    }
    name = game.rng.choice((*sorted(ways), "rmdir", "removexattr"))
    if name == "links" and _is_in(model, path, game.linked):
        name = "stat"
    return f"{name} {path}", ways[name]


def _is_in(side: Side, path: str, inodes: set[int]) -> bool:
    try:
        return side.status(path).st_ino in inodes
    except OSError:
        return False


def _count_links(side: Side, path: str) -> Answer:
    status = side.status(path)
    return None if stat.S_ISDIR(status.st_mode) else status.st_nlink


def _two_paths(game: Game, model: Side) -> Step:
    one, other = game.path(model), game.path(model)
    ways: dict[str, Callable[[Side], Answer]] = {
        "rename": lambda side: os.rename(
            one, other, src_dir_fd=side.top, dst_dir_fd=side.top
        ),
        "link": lambda side: os.link(
            one, other, src_dir_fd=side.top, dst_dir_fd=side.top, follow_symlinks=False
        ),
        "symlink": lambda side: os.symlink(one, other, dir_fd=side.top),
    }
    name = game.rng.choice(("rename", "rename", "link", "symlink"))
    return f"{name} {one} {other}", ways[name]


WAYS: tuple[Callable[[Game, Side], Step], ...] = (
    _open,
    _with_descriptor,
    _with_descriptor,
    _one_path,
    _one_path,
    _two_paths,
)


def play(seed: int, steps: int, *, has_user_marks: bool) -> None:
    """Play games of some steps in all; raise where the answers differ.

    Args:
        seed: of the first.
        steps: in all.
        has_user_marks: mounts are made as in a user namespace.
    """
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    answers: dict[str, list[bool]] = {}
    refused = 0
    with tempfile.TemporaryDirectory(dir=place) as made:
        scene = Scene(Path(made), has_user_marks=has_user_marks)
        for number in range(seed, seed + steps // STEPS_OF_AN_EPISODE):
            scene.clear()
            game = Game(scene, number, has_user_marks=has_user_marks)
            try:
                game.run(STEPS_OF_AN_EPISODE)
            except BaseException as why:
                why.add_note(f"seed {number}")
                raise
            refused += game.refused_renames
            for kind, given in game.answers.items():
                answers.setdefault(kind, []).extend(given)
    # A call that never succeeded would compare nothing but errors.
    never = {kind for kind, given in answers.items() if not any(given)}
    assert never == set()
    assert bool(refused) == has_user_marks


if __name__ == "__main__":
    play(int(sys.argv[1]), int(sys.argv[2]), has_user_marks=sys.argv[3] == "user")
