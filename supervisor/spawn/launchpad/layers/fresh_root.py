"""The fresh root of the layer "mountns" while it is filled: places and covers.

The one way to attach a copy of a mount, and to hide a path in one.

1. An attached copy may be the child's directory, which changes it meanwhile: nothing is
   made in it, and places are opened without links from the fresh root's top. A missing or
   replaced place is skipped.
2. A hidden path is covered by an empty read-only directory, with places only for trees
   beneath. A path that cannot be covered ends the start.
3. Places in our own directories are looked up by descriptor: no other process has them.
"""

from __future__ import annotations

import errno
import os
import stat

from hostlib.linux import mount_calls
from hostlib.linux.syscalls import NOT_THERE, open_exactly

_COVER = ((b"mode", b"755"), (b"size", b"64k"), (b"nr_inodes", b"4k"))
"""Mount options of a tmpfs that hides a tree: inodes for the parts of some paths."""

_TOP = ((b"mode", b"755"), (b"size", b"1m"))

HIDE = "hide"
"""Kind of a tree that covers the files at its path."""

IF_POSSIBLE = "if possible"
"""Owners are mapped where the file system of a tree can show them so."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Path, kind; whether owners are mapped (or IF_POSSIBLE), or device and inode of what
    # is to be hidden, or the position of a mount that is held, or the directory of an
    # overlay's layer.
    Tree = tuple[bytes, str, bool | int | str | bytes | tuple[int, int]]


class PartError(Exception):
    """A part of the layer fails: the part, errno, path.

    "uid": a file system cannot show its files as another user's. "pidns": a fresh
    ``/proc`` cannot be mounted. "mountns": a path to hide was moved. "workspace": its
    overlay cannot be made or attached. "userxattr": the overlay is made without that
    option.
    """


class HeldTree:
    """The descriptor of one of the trees.

    Attributes:
        path: of the tree.
        fd: a copy of what is mounted there; of what is to be hidden, the directory itself.
        over: of a mount beneath another copy, what it is mounted on there; else -1.
        is_directory: or a file.
        is_hidden: it is to be covered.
        is_left_out: it is covered because no copy of what is mounted there can be had.
    """

    __slots__ = ("fd", "is_directory", "is_hidden", "is_left_out", "over", "path")

    def __init__(
        self,
        path: bytes,
        fd: int,
        *,
        over: int = -1,
        is_hidden: bool = False,
        is_left_out: bool = False,
    ) -> None:
        self.path = path
        self.fd = fd
        self.over = over
        self.is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        self.is_hidden = is_hidden
        self.is_left_out = is_left_out

    def close(self) -> None:
        """Close its descriptors."""
        os.close(self.fd)
        if self.over >= 0:
            os.close(self.over)


class _OwnFilesystem:
    """A file system of this process alone, for places of trees.

    Args:
        top: a descriptor of its top.
        path: of that in the fresh root.
    """

    def __init__(self, top: int, path: bytes = b"") -> None:
        self.top = top
        self.path = path
        self._made = {path}  # directories
        self._links: set[bytes] = set()

    def name(self, path: bytes) -> bytes:
        """Return what a path is called from its top."""
        return path[len(self.path) + 1 :]

    def make_directory(self, path: bytes) -> bool:
        """Make a directory and its parents; return whether all are in this root's tmpfs."""
        if path in self._made:
            return True
        known = path
        missing = []
        while known not in self._made:
            if known in self._links:
                return False
            missing.append(known)
            known = known.rpartition(b"/")[0]
        for directory in reversed(missing):
            os.mkdir(self.name(directory), dir_fd=self.top)
            self._made.add(directory)
        return True

    def make_link(self, path: bytes, target: bytes) -> None:
        """Make a symbolic link, if nothing else is there."""
        if path in self._made or path in self._links:
            return
        if self.make_directory(path.rpartition(b"/")[0]):
            os.symlink(target, self.name(path), dir_fd=self.top)
            self._links.add(path)

    def make_file(self, path: bytes, content: bytes, mode: int = 0o644) -> None:
        """Make a file and its parents; empty where RLIMIT_FSIZE is too small."""
        self.make_directory(path.rpartition(b"/")[0])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self.name(path), flags, mode, dir_fd=self.top)
        try:
            os.write(fd, content)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
        finally:
            os.close(fd)

    def make_place(self, path: bytes, *, is_directory: bool) -> bool:
        """Make what a tree can be mounted on; tell whether that is there."""
        if is_directory:
            return self.make_directory(path)
        if path in self._links or not self.make_directory(path.rpartition(b"/")[0]):
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(self.name(path), flags, 0o644, dir_fd=self.top))
        return True


class Stage:
    """The fresh root while it is filled (rules 1 and 2).

    Args:
        top: a descriptor of its directory.
    """

    def __init__(self, top: int) -> None:
        self._root = _OwnFilesystem(top)
        self._links: tuple[tuple[bytes, bytes], ...] = ()
        # By path; None for a copy.
        self._around: dict[bytes, _OwnFilesystem | None] = {b"": self._root}

    @property
    def top(self) -> int:
        """The descriptor of its directory."""
        return self._root.top

    def make_places(self, *paths: bytes) -> None:
        """Make directories at the top."""
        for path in paths:
            self._root.make_directory(path)

    def make_links(self, links: tuple[tuple[bytes, bytes], ...]) -> None:
        """Make symbolic links, of (path, target), here and in what hides from now on."""
        self._links = links
        self._make_links(self._root)

    def make_files(self, files: tuple[tuple[bytes, bytes], ...]) -> None:
        """Make files of ours."""
        for path, content in files:
            self._root.make_file(path, content)

    def make_program(self, path: bytes, content: bytes) -> None:
        """Make an executable file of ours."""
        self._root.make_file(path, content, 0o755)

    def _make_links(self, ours: _OwnFilesystem) -> None:
        for path, target in self._links:
            if path.startswith(ours.path + b"/"):
                ours.make_link(path, target)

    def attach(self, tree: HeldTree) -> None:
        """Mount a copy under its name; nothing happens where that cannot be."""
        if tree.path == b"/":  # which is this one
            return
        ours = self._holder(tree.path)
        try:
            if ours is None:
                # A file in a copy under that name may be the child's doing.
                place = self._the_same(tree)
            elif ours.make_place(tree.path, is_directory=tree.is_directory):
                place = open_exactly(ours.name(tree.path), ours.top)
            else:
                return
        except OSError as error:
            if error.errno not in {*NOT_THERE, errno.ESTALE}:
                raise
            return
        try:
            mount_calls.move_mount(
                tree.fd, b"", place, b"", mount_calls.MOVE_EMPTY_PATHS
            )
        finally:
            os.close(place)
        self._around[tree.path] = None

    def hide(self, tree: HeldTree) -> None:
        """Cover a directory within a copy; elsewhere nothing of it is to be seen.

        Raises:
            PartError: it is not there any more, and its new place is not known.
        """
        if self._holder(tree.path) is not None:
            return
        try:
            place = self._the_same(tree)
        except OSError as error:
            if error.errno not in {*NOT_THERE, errno.ESTALE}:
                raise
            raise moved(tree.path) from None
        cover = make_cover() if tree.is_directory else _make_shut_file()
        try:
            mount_calls.move_mount(cover, b"", place, b"", mount_calls.MOVE_EMPTY_PATHS)
        finally:
            os.close(place)
        if not tree.is_directory:
            os.close(cover)
            return
        self._around[tree.path] = ours = _OwnFilesystem(cover, tree.path)
        self._make_links(ours)

    def seal(self) -> None:
        """Make what is ours read-only, but nothing that is mounted in it."""
        for ours in self._around.values():
            if ours is not None:
                mount_calls.set_attributes(ours.top, mount_calls.ATTR_RDONLY)
                if ours is not self._root:
                    os.close(ours.top)

    def _holder(self, path: bytes) -> _OwnFilesystem | None:
        """Return what of ours a path lies in; None: it lies in a copy."""
        while path not in self._around:
            path = path.rpartition(b"/")[0]
        return self._around[path]

    def _the_same(self, tree: HeldTree) -> int:
        """Open what lies in a copy under a tree's name.

        Raises:
            OSError: ESTALE: it is another file.
        """
        place = open_exactly(tree.path[1:], self._root.top)
        expected = tree.fd if tree.over < 0 else tree.over
        if not os.path.samestat(os.fstat(place), os.fstat(expected)):
            os.close(place)
            raise OSError(errno.ESTALE, "another file")
        return place


def moved(path: bytes) -> PartError:
    """Return the error of what is to be hidden and is not there (rule 2)."""
    return PartError("mountns", errno.ESTALE, path)


def identity_of(path: bytes) -> tuple[int, int] | None:
    """Return (device, inode) of what is at a path without links; None for nothing."""
    try:
        fd = open_exactly(path)
    except OSError:
        return None
    found = os.fstat(fd)
    os.close(fd)
    return found.st_dev, found.st_ino


def attach_at_top(fd: int) -> None:
    """Mount a copy over the root of this mount namespace, where no path leads to it."""
    mount_calls.move_mount(
        fd, b"", mount_calls.AT_FDCWD, b"/", mount_calls.MOVE_FROM_EMPTY_PATH
    )


def make_cover() -> int:
    """Make a file system that is empty and nowhere yet; a descriptor of its top."""
    return mount_calls.make_tmpfs(
        _COVER,
        mount_calls.ATTR_NOSUID | mount_calls.ATTR_NODEV | mount_calls.ATTR_NOEXEC,
    )


def make_top() -> int:
    """Make what becomes a fresh root, as `make_cover` does."""
    return mount_calls.make_tmpfs(
        _TOP, mount_calls.ATTR_NOSUID | mount_calls.ATTR_NODEV
    )


def _make_shut_file() -> int:
    """Copy the mount of a file that cannot be opened: a device without devices."""
    fd = mount_calls.open_tree(mount_calls.AT_FDCWD, b"/dev/null", mount_calls.OPEN_ONE)
    mount_calls.set_attributes(
        fd, mount_calls.ATTR_NOSUID | mount_calls.ATTR_NODEV | mount_calls.ATTR_RDONLY
    )
    return fd
