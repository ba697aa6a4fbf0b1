"""The differences between a base and the tree that a workspace shows.

The cost depends on the layers, and on renamed or new directories, never on the base's size.

1. Content, mode and type count; times, owners and extended attributes alone do not.
2. Sockets have no rows, nor has a staged file of a killed host (``vfs.backends``).
3. A deleted directory is one row; nothing beneath a path that is no directory has one.
4. A renamed directory is one row; its content is compared with its old place, which then
   counts as empty in the base.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hostlib.linux.files import closing_fd
from supervisor.workspace.layers import TOP, LayeredTree, TreeNode, join, split
from supervisor.workspace.linux import data_ranges
from vfs.backends import is_staged

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMPARE_BYTES = 1 << 20

KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}
"""Names of the types of stat(2) in rows."""


class Change(Enum):
    """How an object differs from the base's."""

    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"
    MODE = "mode"
    TYPE = "type"
    RENAMED = "renamed"


@dataclass(frozen=True, slots=True)
class Row:
    """One difference.

    Attributes:
        path: relative to the top; of the top itself ``b""``.
        change: the kind of difference.
        new: the node of the workspace there; None if it was deleted.
        old: the node of the base there, or at ``origin``; None if it was added.
        origin: where the base has a directory that was renamed.
        replaced: the node of the base at the new path of that directory.
    """

    path: bytes
    change: Change
    new: TreeNode | None
    old: TreeNode | None
    origin: bytes | None = None
    replaced: TreeNode | None = None

    @property
    def node(self) -> TreeNode:
        """Return the workspace's object; the base's where that was deleted."""
        node = self.old if self.new is None else self.new
        if node is None:
            raise ValueError("a row has an old or a new object")
        return node

    @property
    def kind(self) -> str:
        """Return what the object is, the deleted one where there is no other."""
        return KINDS[self.node.kind]

    @property
    def size_bytes(self) -> int:
        """Return the size of the new file or link, 0 of others."""
        return _size(self.new)

    @property
    def old_size_bytes(self) -> int | None:
        """Return the size of the base's file or link; None if it has none there."""
        return None if self.old is None else _size(self.old)

    @property
    def is_edit(self) -> bool:
        """Tell whether a regular file of the base has another content or mode."""
        new, old = self.new, self.old
        if new is None or old is None or old.path != self.path:
            return False
        is_file = new.kind == old.kind == stat.S_IFREG
        return is_file and self.change in {Change.MODIFIED, Change.MODE}

    @property
    def mode(self) -> int:
        """Return the permission bits, of the deleted object where there is no other."""
        return stat.S_IMODE(self.node.status.st_mode)


def _skip_sockets(node: TreeNode | None) -> TreeNode | None:
    return None if node is not None and node.kind == stat.S_IFSOCK else node


def _is_unpublished(node: TreeNode) -> bool:
    name = os.fsdecode(split(node.path)[1])
    return node.kind == stat.S_IFREG and is_staged(name)


def _size(node: TreeNode | None) -> int:
    if node is None or node.kind not in {stat.S_IFREG, stat.S_IFLNK}:
        return 0
    return node.status.st_size


def compare(
    base: LayeredTree, merged: LayeredTree, *, with_renames: bool = True
) -> list[Row]:
    """Return what a workspace has changed, sorted by the bytes of the paths.

    Args:
        base: the base alone.
        merged: the workspace's layers, the base the last of them.
        with_renames: a renamed directory is one row; else it is deleted at its old path
            and added at its new one.

    Raises:
        OSError: something cannot be read.
    """
    rows = list(_Comparison(base, merged, with_renames=with_renames).rows())
    rows.sort(key=lambda row: row.path)
    return rows


def compare_views(old: LayeredTree, new: LayeredTree) -> list[Row]:
    """Return what differs between two stacks of layers on one base, sorted by path.

    Paths that both have from the same layers are passed over. Renames have no rows.

    Raises:
        OSError: something cannot be read.
    """
    rows = list(_ViewComparison(old, new, with_renames=False).rows())
    rows.sort(key=lambda row: row.path)
    return rows


class _Comparison:
    def __init__(
        self, base: LayeredTree, merged: LayeredTree, *, with_renames: bool
    ) -> None:
        self._base = base
        self._merged = merged
        self._moved = self._find_moved() if with_renames else frozenset[bytes]()

    def rows(self) -> Iterator[Row]:
        new, old = self._merged.top(), self._base.top()
        if stat.S_IMODE(new.status.st_mode) != stat.S_IMODE(old.status.st_mode):
            yield Row(TOP, Change.MODE, new, old)
        pending: list[tuple[TreeNode, TreeNode | None]] = [(new, old)]
        while pending:
            for name, here, there in self._pairs(*pending.pop()):
                if there is None and here is not None and _is_unpublished(here):
                    continue
                row, inside = self._entry(name, here, there)
                if row is not None:
                    yield row
                if inside is not None:
                    pending.append(inside)

    def _find_moved(self) -> frozenset[bytes]:
        """Return the base's paths of the directories that were renamed."""
        found: set[bytes] = set()
        pending = [self._merged.top()]
        while pending:
            directory = pending.pop()
            with self._merged.read(directory) as reader:
                for name in reader.names_above_base():
                    node = reader.look_up(name)
                    if node is None or not node.is_directory:
                        continue
                    pending.append(node)
                    origin = self._merged.base_path(node)
                    # In one that hides the base: a commit has put it where it is.
                    expected = self._expect(directory, name) or node.path
                    if origin is not None and origin != expected:
                        found.add(origin)
        return frozenset(found)

    def _expect(self, directory: TreeNode, name: bytes) -> bytes | None:
        """Return where the base has an entry of a directory if that was not renamed."""
        origin = self._merged.base_path(directory)
        return None if origin is None else join(origin, name)

    def _pairs(
        self, new: TreeNode, old: TreeNode | None
    ) -> Iterator[tuple[bytes, TreeNode | None, TreeNode | None]]:
        """Yield (path, new, old) of what may differ in a directory."""
        is_same_place = old is not None and self._merged.base_path(new) == old.path
        with self._merged.read(new) as reader:
            names = reader.names_above_base() if is_same_place else reader.names()
            news = {name: reader.look_up(name) for name in names}
        olds = self._base_entries(old, names, is_all=not is_same_place) if old else {}
        for name in names | olds.keys():
            yield join(new.path, name), news.get(name), olds.get(name)

    def _base_entries(
        self, old: TreeNode, names: set[bytes], *, is_all: bool
    ) -> dict[bytes, TreeNode]:
        """Return what the base has in a directory under some names, or all of them."""
        if not names and not is_all:
            return {}
        found = {}
        with self._base.read(old) as reader:
            for name in names | reader.names() if is_all else names:
                node = reader.look_up(name)
                if node is not None and node.path not in self._moved:
                    found[name] = node
        return found

    def _entry(
        self, path: bytes, new: TreeNode | None, old: TreeNode | None
    ) -> tuple[Row | None, tuple[TreeNode, TreeNode | None] | None]:
        """Return the row of one path, and the directories to compare beneath it."""
        new, old = _skip_sockets(new), _skip_sockets(old)
        if new is None:
            row = None if old is None else Row(path, Change.DELETED, None, old)
            return row, None
        origin = self._merged.base_path(new) if new.is_directory else None
        if origin is not None and origin in self._moved:
            source = self._base.find(origin)
            row = Row(path, Change.RENAMED, new, source, origin, old)
            return row, (new, source)
        change = self._change(new, old)
        row = None if change is None else Row(path, change, new, old)
        if not new.is_directory:
            return row, None
        return row, (new, old if old is not None and old.is_directory else None)

    def _change(self, new: TreeNode, old: TreeNode | None) -> Change | None:
        if old is None:
            return Change.ADDED
        if new.kind != old.kind:
            return Change.TYPE
        if self._is_same(new, old):
            return None
        if not self._is_equal(new, old):
            return Change.MODIFIED
        if stat.S_IMODE(new.status.st_mode) != stat.S_IMODE(old.status.st_mode):
            return Change.MODE if new.kind != stat.S_IFLNK else None
        return None

    def _is_same(self, new: TreeNode, old: TreeNode) -> bool:
        """Tell whether the workspace shows the base's own object, at its place."""
        first = new.parts[0]
        is_base = first.layer == self._merged.base_layer
        return is_base and first.path == old.parts[0].path

    def _is_equal(self, new: TreeNode, old: TreeNode) -> bool:
        if new.kind == stat.S_IFLNK:
            return self._merged.read_link(new) == self._base.read_link(old)
        if new.kind == stat.S_IFREG:
            return self._has_equal_content(new, old)
        return new.status.st_rdev == old.status.st_rdev

    def _has_equal_content(self, new: TreeNode, old: TreeNode) -> bool:
        if new.status.st_size != old.status.st_size:
            return False
        with (
            closing_fd(self._merged.open_file(new)) as first,
            closing_fd(self._base.open_file(old)) as second,
        ):
            return _is_equal_content(first, second, new.status.st_size)


class _ViewComparison(_Comparison):
    """Compares two stacks; the older one stands where else the base does."""

    def _pairs(
        self, new: TreeNode, old: TreeNode | None
    ) -> Iterator[tuple[bytes, TreeNode | None, TreeNode | None]]:
        if old is None:
            with self._merged.read(new) as reader:
                for node in reader.entries():
                    yield node.path, node, None
            return
        shared = self._count_shared(new, old)
        with self._merged.read(new) as news, self._base.read(old) as olds:
            names = news.names_in(new.parts[: len(new.parts) - shared])
            names |= olds.names_in(old.parts[: len(old.parts) - shared])
            for name in names:
                path = join(new.path, name)
                yield path, news.look_up(name), olds.look_up(name)

    def _count_shared(self, new: TreeNode, old: TreeNode) -> int:
        """Return how many of the oldest parts two directories have in common."""
        count = 0
        pairs = zip(reversed(new.parts), reversed(old.parts), strict=False)
        for one, other in pairs:
            if self._merged.key(one) != self._base.key(other):
                break
            count += 1
        return count

    def _is_same(self, new: TreeNode, old: TreeNode) -> bool:
        return self._merged.key(new.parts[0]) == self._base.key(old.parts[0])


def _is_equal_content(first: int, second: int, size_bytes: int) -> bool:
    """Tell whether two files of one size have the same bytes; holes are passed over."""
    ranges = data_ranges(first, size_bytes) + data_ranges(second, size_bytes)
    done = 0
    for start, end in sorted(ranges):
        offset = max(start, done)
        while offset < end:
            length = min(_COMPARE_BYTES, end - offset)
            if os.pread(first, length, offset) != os.pread(second, length, offset):
                return False
            offset += length
        done = max(done, end)
    return True
