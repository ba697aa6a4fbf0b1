"""The tree that a stack of overlay layers shows, read from the layers themselves.

It reads overlayfs's whiteouts, opaque directories and redirects, so an operator needs no
mount for a look.

1. A layer is held by one descriptor of its top; names in it are opened without links.
2. The newest layer is first and the base last; the kernel reads marks in the base, too.
3. Only the upper, the first of a workspace's, has redirects: sealed layers have none.

Source: Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from hostlib.linux.files import DIRECTORY, closing_fd
from hostlib.linux.syscalls import open_exactly
from supervisor.workspace.attributes import (
    TRUSTED_MARKS,
    USER_MARKS,
    attribute_names,
    is_escaped,
)
from supervisor.workspace.linux import is_whiteout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

TOP = b""
"""The path of the top of a tree."""

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
GONE = _ABSENT | {errno.ELOOP}
"""Errors of opening a path without links that is not there, or is something else."""

_NO_MARK = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM})


class GoneError(OSError):
    """A layer's object at a path is not there any more: removed, moved or replaced."""

    reason = "it was removed or replaced meanwhile"

    @property
    def path(self) -> bytes:
        """Return where the layer had it."""
        return os.fsencode(self.filename)


def join(directory: bytes, name: bytes) -> bytes:
    """Return the path of an entry of a directory; paths are relative to the top."""
    return directory + b"/" + name if directory else name


def split(path: bytes) -> tuple[bytes, bytes]:
    """Return the directory of a path, and its name there."""
    directory, _, name = path.rpartition(b"/")
    return directory, name


def parents(path: bytes) -> Iterator[bytes]:
    """Yield the directories above a path, the nearest first, without the top."""
    directory, _ = split(path)
    while directory:
        yield directory
        directory, _ = split(directory)


def is_beneath(path: bytes, directory: bytes) -> bool:
    """Tell whether a path lies in a directory, at any depth."""
    return path.startswith(directory + b"/")


def with_parents(paths: Iterable[bytes]) -> set[bytes]:
    """Return paths and every directory above them."""
    found: set[bytes] = set()
    for path in paths:
        found.add(path)
        found.update(parents(path))
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """One object of one layer.

    Attributes:
        layer: its number in the stack, 0 for the newest.
        path: in that layer.
    """

    layer: int
    path: bytes


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One object of the merged tree.

    Attributes:
        path: in the merged tree.
        status: of the newest part.
        parts: of a directory all that are merged, newest first; else one.
    """

    path: bytes
    status: os.stat_result
    parts: tuple[Part, ...]

    @property
    def kind(self) -> int:
        """Return the type of the object, as ``stat.S_IFMT`` does."""
        return stat.S_IFMT(self.status.st_mode)

    @property
    def is_directory(self) -> bool:
        """Tell whether it is a directory."""
        return stat.S_ISDIR(self.status.st_mode)


class LayeredTree:
    """A stack of layers as one tree.

    Args:
        tops: descriptors of the tops of the layers, newest first; the caller's.
        marks: how the names of overlayfs's attributes begin.
    """

    def __init__(self, tops: tuple[int, ...], marks: bytes = TRUSTED_MARKS) -> None:
        self._tops = tops
        self._marks = marks
        self._statuses: dict[int, os.stat_result] = {}
        self.has_redirects = False
        """A redirect was met."""

    @property
    def marks(self) -> bytes:
        """Return how the names of overlayfs's attributes begin."""
        return self._marks

    @property
    def base_layer(self) -> int:
        """Return the number of the last layer."""
        return len(self._tops) - 1

    def base_path(self, node: TreeNode) -> bytes | None:
        """Return where the base has an object; None if no part of it is the base's."""
        oldest = node.parts[-1]
        return oldest.path if oldest.layer == self.base_layer else None

    def key(self, part: Part) -> tuple[int, int, bytes]:
        """Return what is equal only for one object of one layer, in any stack."""
        status = self._status_of_top(part.layer)
        return status.st_dev, status.st_ino, part.path

    def _status_of_top(self, layer: int) -> os.stat_result:
        if layer not in self._statuses:
            self._statuses[layer] = os.fstat(self._tops[layer])
        return self._statuses[layer]

    def top(self) -> TreeNode:
        """Return the top directory."""
        parts = tuple(Part(number, TOP) for number in range(len(self._tops)))
        return TreeNode(TOP, os.stat(self._tops[0]), parts)

    def find(self, path: bytes) -> TreeNode | None:
        """Return what a path names; None if there is nothing."""
        node: TreeNode | None = self.top()
        for name in path.split(b"/") if path else ():
            if node is None or not node.is_directory:
                return None
            with self.read(node) as reader:
                node = reader.look_up(name)
        return node

    def read(self, directory: TreeNode) -> DirectoryReader:
        """Return a reader of a directory's entries, to be used in a ``with``."""
        return DirectoryReader(self, directory)

    def open(self, part: Part, flags: int = os.O_PATH | os.O_NOFOLLOW) -> int:
        """Open one object of one layer; the descriptor is the caller's.

        Raises:
            GoneError: it is not there any more.
            OSError: it may not be opened.
        """
        try:
            return open_exactly(part.path or b".", self._tops[part.layer], flags)
        except OSError as why:
            if why.errno not in GONE:
                raise
            raise GoneError(why.errno, why.strerror, part.path) from None

    def open_file(self, node: TreeNode) -> int:
        """Open a regular file for reading.

        Raises:
            GoneError: it is another object now, or none.
            OSError: it may not be opened.
        """
        fd = self.open(node.parts[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not os.path.samestat(os.fstat(fd), node.status):
            os.close(fd)
            raise GoneError(errno.ESTALE, os.strerror(errno.ESTALE), node.path)
        return fd

    def open_node(self, node: TreeNode) -> int:
        """Open a regular file or a directory for reading; as ``open_file``."""
        if node.is_directory:
            return self.open(node.parts[0], DIRECTORY)
        return self.open_file(node)

    def read_link(self, node: TreeNode) -> bytes:
        """Return where a symbolic link leads, as it says.

        Raises:
            GoneError: there is no link any more.
        """
        part = node.parts[0]
        directory, name = split(part.path)
        with closing_fd(self.open(Part(part.layer, directory), DIRECTORY)) as fd:
            try:
                return os.readlink(name, dir_fd=fd)
            except OSError as why:
                if why.errno not in {errno.ENOENT, errno.EINVAL}:
                    raise
                raise GoneError(why.errno, why.strerror, part.path) from None

    def read_mark(self, part: Part, mark: bytes) -> bytes | None:
        """Return one of overlayfs's attributes of a directory or file; None for none."""
        with closing_fd(
            self.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        ) as fd:
            return self._mark_of(fd, mark)

    def has_escaped_marks(self, node: TreeNode) -> bool:
        """Tell whether a program gave an object attributes that are named like user marks.

        A commit brings them to the base under those names, and there the kernel would take
        them for marks when the next workspace is mounted.
        """
        part = node.parts[0]
        if self._marks != USER_MARKS or part.layer == self.base_layer:
            return False
        with closing_fd(self.open(part)) as fd:
            # By its path in /proc, which asks for no right to read the object.
            return any(map(is_escaped, attribute_names(f"/proc/self/fd/{fd}")))

    def _mark_of(self, fd: int, mark: bytes) -> bytes | None:
        try:
            return os.getxattr(fd, self._marks + mark)
        except OSError as why:
            if why.errno not in _NO_MARK:
                raise
            return None

    def directory_marks(self, part: Part) -> tuple[bool, bytes | None]:
        """Return what a layer says of one of its directories.

        Returns:
            Whether nothing of older layers shows in it; and where older layers have it,
            as the newest layer says, None for the same place.
        """
        if part.layer == self.base_layer:
            return False, None
        with closing_fd(self.open(part, DIRECTORY)) as fd:
            is_opaque = self._mark_of(fd, b"opaque") == b"y"
            redirect = self._mark_of(fd, b"redirect") if part.layer == 0 else None
        self.has_redirects |= redirect is not None
        return is_opaque, redirect

    def merged_parts(
        self, name: bytes, around: tuple[Part, ...], fds: Mapping[Part, int]
    ) -> Iterator[tuple[Part, os.stat_result]]:
        """Yield the parts of one entry, newest first, until one hides what is older."""
        is_directory = False
        for index, part in enumerate(around):
            try:
                status = os.stat(name, dir_fd=fds[part], follow_symlinks=False)
            except OSError as why:
                if why.errno not in _ABSENT:
                    raise
                continue
            is_end = not stat.S_ISDIR(status.st_mode)
            if is_whiteout(status) or (is_end and is_directory):
                return
            found = Part(part.layer, join(part.path, name))
            yield found, status
            is_directory = True
            if is_end:
                return
            is_opaque, target = self.directory_marks(found)
            if is_opaque:
                return
            if target is not None:
                yield from self._follow_redirect(target, around[index + 1 :], fds)
                return

    def _follow_redirect(
        self, target: bytes, around: tuple[Part, ...], fds: Mapping[Part, int]
    ) -> Iterator[tuple[Part, os.stat_result]]:
        """Yield the parts of a redirected directory in the older layers.

        A name alone is one in the parent's older parts; a path begins at the top.
        """
        if not target.startswith(b"/"):
            yield from self.merged_parts(target, around, fds)
            return
        older = LayeredTree(self._tops[1:], self._marks)
        node = older.find(target.strip(b"/"))
        if node is not None and node.is_directory:
            for part in node.parts:
                moved = Part(part.layer + 1, part.path)
                yield moved, self._status(moved)

    def _status(self, part: Part) -> os.stat_result:
        with closing_fd(self.open(part)) as fd:
            return os.fstat(fd)


class DirectoryReader:
    """The entries of one merged directory; it holds a descriptor of each part."""

    def __init__(self, tree: LayeredTree, directory: TreeNode) -> None:
        self._tree = tree
        self._directory = directory
        self._fds: dict[Part, int] = {}

    def __enter__(self) -> Self:
        try:
            for part in self._directory.parts:
                self._fds[part] = self._tree.open(part, DIRECTORY)
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def descriptor(self, part: Part) -> int:
        """Return a descriptor of one of the directory's parts, while it is read."""
        return self._fds[part]

    def look_up(self, name: bytes) -> TreeNode | None:
        """Return an entry; None if the merged directory has none of that name."""
        parts = list(self._tree.merged_parts(name, self._directory.parts, self._fds))
        if not parts:
            return None
        path = join(self._directory.path, name)
        return TreeNode(path, parts[0][1], tuple(part for part, _ in parts))

    def names(self) -> set[bytes]:
        """Return the names that any part has, whiteouts included."""
        return self.names_in(self._directory.parts)

    def names_above_base(self) -> set[bytes]:
        """Return the names that the parts above the base have, whiteouts included."""
        base = self._tree.base_layer
        return self.names_in(
            tuple(part for part in self._directory.parts if part.layer < base)
        )

    def names_in(self, parts: tuple[Part, ...]) -> set[bytes]:
        """Return the names that some of the parts have, whiteouts included."""
        names: set[bytes] = set()
        for part in parts:
            names.update(map(os.fsencode, os.listdir(self._fds[part])))
        return names

    def entries(self) -> Iterator[TreeNode]:
        """Yield what the merged directory has, sorted by name."""
        for name in sorted(self.names()):
            node = self.look_up(name)
            if node is not None:
                yield node


def objects_beneath(
    base: LayeredTree,
    top: TreeNode,
    path: bytes,
    moved: frozenset[bytes] = frozenset(),
) -> Iterator[tuple[bytes, TreeNode]]:
    """Yield (path, object) of all that lies in a directory, as if that were at a path.

    Args:
        base: that has it.
        top: the directory.
        path: as which it is seen.
        moved: paths of the base that are left out, with what lies beneath.
    """
    pending = [(path, top)]
    while pending:
        path, directory = pending.pop()
        with base.read(directory) as reader:
            for node in reader.entries():
                if node.path in moved:
                    continue
                inside = join(path, split(node.path)[1])
                yield inside, node
                if node.is_directory:
                    pending.append((inside, node))


def walk_sorted(tree: LayeredTree, top: TreeNode) -> Iterator[TreeNode]:
    """Yield an object and all beneath it, a directory before what is in it, sorted."""
    pending = [top]
    while pending:
        node = pending.pop()
        yield node
        if node.is_directory:
            with tree.read(node) as reader:
                pending += reversed(list(reader.entries()))
