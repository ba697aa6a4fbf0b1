"""The origins of a layer's objects: the base's objects that they were copied from.

The kernel marks a copy with a handle of its origin; in a user namespace it marks only that
there is one. An origin that the marks do not tell is looked for in the base.

Spec WS11.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.workspace.layers import (
    LayeredTree,
    Part,
    TreeNode,
    join,
    objects_beneath,
    split,
)
from supervisor.workspace.linux import has_inode, read_birth_time_ns, read_file_handle
from supervisor.workspace.upper import has_pointer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from supervisor.workspace.changes import Row

_ORIGIN_HEADER_BYTES = 21
"""Size of the head of ``struct ovl_fb``: version, magic, length, flags, type, UUID."""

_ORIGIN_TYPE_OFFSET = 4


class Origins:
    """The origins of a workspace's objects in its base.

    Args:
        started_ns: when the run began of which there is no record yet.
        stand_ins: handles of directories that stand for the base's, as of ``hidden``.
    """

    def __init__(
        self,
        base: LayeredTree,
        merged: LayeredTree,
        started_ns: int,
        stand_ins: Mapping[bytes, bytes],
    ) -> None:
        self._base = base
        self._merged = merged
        self._started_ns = started_ns
        self._stand_ins = stand_ins
        self._handles: frozenset[bytes] | None = None

    def strays(self, rows: Sequence[Row]) -> tuple[dict[bytes, bytes], list[bytes]]:
        """Return the paths of objects whose base object is not where it was.

        Returns:
            Directories that were renamed, by path where the base has another one now, or
            b""; and the paths of other files and directories.
        """
        pointers = {
            node.path: self._merged.base_path(node) or b""
            for node in self._upper_directories()
            if self._points_nowhere(node)
        }
        others = [
            row.path
            for row in rows
            if row.path not in pointers
            and row.new is not None
            and not has_pointer(self._merged, row.new)
            and self._is_stray(row.new, row.old)
        ]
        return pointers, others

    def has_origin(self, row: Row) -> bool:
        """Tell whether the base has at a row's origin what was renamed there."""
        if row.origin is None or row.new is None:
            return False
        node = self._base.find(row.origin)
        if node is None or not node.is_directory:
            return False
        return len(row.new.parts) > 1 and self.is_copied_from(row.new, node)

    def is_copied_from(self, new: TreeNode, old: TreeNode) -> bool:
        """Tell whether a directory was made over the base's one, as far as is told."""
        told = self._handle_told(new, new.parts[-2])
        if told is None:
            return True
        return _handle_of(self._base, old.parts[0]) in {None, told}

    def is_copy(self, new: TreeNode, old: TreeNode) -> bool:
        """Tell whether a file of the layer was copied from the base's one of now."""
        part = new.parts[0]
        if part.layer == self._merged.base_layer:
            return True
        if new.kind != stat.S_IFREG or self._merged.read_mark(part, b"origin") is None:
            return False
        handle = self._handle_told(new, part)
        if handle is None:  # the layer does not say from which
            return True
        return _handle_of(self._base, old.parts[0]) in {None, handle}

    def has_lost_origin(self, node: TreeNode) -> bool:
        """Tell whether the base lacks what an object of the layer was copied from.

        A file that was renamed in the workspace has its origin at the old path.
        """
        handle = self._handle_told(node, node.parts[0])
        if handle is None:
            return self._may_be_removed(node)
        is_there = self._has_inode(self._base, handle)
        if not is_there and self._merged.base_layer > 1:
            # It may come from a sealed layer.
            is_there = self._has_inode(self._merged, handle)
        if is_there is None:
            is_there = handle in self._handles_beneath()
        return not is_there

    def born_ns(self, node: TreeNode) -> int:
        """Return when an object came into the upper layer, in nanoseconds."""
        with closing_fd(self._merged.open(node.parts[0])) as fd:
            born_ns = read_birth_time_ns(fd)
        # A file system that keeps no birth times: the run's beginning is earlier.
        return self._started_ns if born_ns is None else born_ns

    def _upper_directories(self) -> Iterator[TreeNode]:
        """Yield the directories of the upper layer."""
        pending = [self._merged.top()]
        while pending:
            directory = pending.pop()
            with self._merged.read(directory) as reader:
                with os.scandir(reader.descriptor(directory.parts[0])) as entries:
                    names = [
                        os.fsencode(entry.name)
                        for entry in entries
                        if entry.is_dir(follow_symlinks=False)
                    ]
                for node in filter(None, map(reader.look_up, names)):
                    pending.append(node)
                    yield node

    def _points_nowhere(self, node: TreeNode) -> bool:
        """Tell whether a directory points to what the base has no more."""
        if not has_pointer(self._merged, node):
            return False
        place = self._merged.base_path(node)
        if place is None:
            return len(node.parts) == 1  # else it points into a sealed layer
        old = self._base.find(place)
        return old is None or not self.is_copied_from(node, old)

    def _is_stray(self, new: TreeNode, old: TreeNode | None) -> bool:
        if new.parts[0].layer != 0 or _lies_on_sealed(new, self._merged.base_layer):
            return False
        handle = self._handle_told(new, new.parts[0])
        if handle is None:
            return False
        return old is None or _handle_of(self._base, old.parts[0]) not in {None, handle}

    def _may_be_removed(self, node: TreeNode) -> bool:
        """Tell whether the base may have lost an object of which nothing says the origin.

        The kernel marks that it was copied, and in a user namespace not from what. There
        no directory of the base is renamed. A file may have been: then the base has it
        where the layer hides it, or the directory that it is in now is as it was.
        """
        if self._merged.base_layer > 1 or not self._is_marked_copy(node):
            return False  # or it may come from a sealed layer
        if node.is_directory:
            return True
        around = self._base.find(split(node.path)[0])
        if around is None or around.status.st_ctime_ns < self.born_ns(node):
            return False
        return all(_facts(node) != _facts(other) for other in self._cover())

    def _is_marked_copy(self, node: TreeNode) -> bool:
        """Tell whether the layer says that an object was copied, and not from what."""
        part = node.parts[0]
        if part.layer != 0 or node.kind not in {stat.S_IFREG, stat.S_IFDIR}:
            return False
        return self._merged.read_mark(part, b"origin") == b""

    def _has_inode(self, tree: LayeredTree, handle: bytes) -> bool | None:
        """Tell whether the file system of a tree's top has an inode; None: not known."""
        with closing_fd(tree.open(tree.top().parts[0], DIRECTORY)) as top:
            return has_inode(top, handle)

    def _handles_beneath(self) -> frozenset[bytes]:
        """Return the handles of what the base has where the layer has something.

        For an operator who may not ask for a handle: the layer has no redirects then.
        """
        if self._handles is None:
            found = set()
            for node in self._cover():
                found.add(_handle_of(self._base, node.parts[0]) or b"")
            for layer in range(1, self._merged.base_layer):
                for part in _parts_of(self._merged, layer):
                    found.add(_handle_of(self._merged, part) or b"")
            self._handles = frozenset(found)
        return self._handles

    def _cover(self) -> Iterator[TreeNode]:
        """Yield what the base has under the paths of the layers above it."""
        pending = [(self._merged.top(), self._base.top())]
        while pending:
            new, old = pending.pop()
            with self._merged.read(new) as reader, self._base.read(old) as olds:
                for name in reader.names_above_base():
                    node, below = reader.look_up(name), olds.look_up(name)
                    if below is None:
                        continue
                    yield below
                    if not below.is_directory:
                        continue
                    if node is not None and self._merged.base_path(node) == below.path:
                        pending.append((node, below))
                        continue
                    for path, _ in objects_beneath(self._base, below, below.path):
                        inside = self._base.find(path)
                        if inside is not None:
                            yield inside

    def _handle_told(self, node: TreeNode, part: Part) -> bytes | None:
        """Return the handle of the base's object that a layer's one was copied from."""
        if part.layer == self._merged.base_layer:
            return None
        if node.kind not in {stat.S_IFREG, stat.S_IFDIR}:
            return None
        mark = self._merged.read_mark(part, b"origin")
        if not mark or len(mark) <= _ORIGIN_HEADER_BYTES:
            return None
        kind = mark[_ORIGIN_TYPE_OFFSET : _ORIGIN_TYPE_OFFSET + 1]
        handle = kind + mark[_ORIGIN_HEADER_BYTES:]
        return self._stand_ins.get(handle, handle)


def _facts(node: TreeNode) -> tuple[int, int, int]:
    """Return what a rename leaves as it was."""
    return node.kind, node.status.st_size, node.status.st_mtime_ns


def _lies_on_sealed(node: TreeNode, base_layer: int) -> bool:
    """Tell whether the upper's part of a directory was copied from a sealed layer."""
    return len(node.parts) > 1 and node.parts[1].layer < base_layer


def _handle_of(tree: LayeredTree, part: Part) -> bytes | None:
    with closing_fd(tree.open(part)) as fd:
        return read_file_handle(fd)


def _parts_of(tree: LayeredTree, layer: int) -> Iterator[Part]:
    """Yield all that one layer has."""
    pending = [b""]
    while pending:
        directory = pending.pop()
        with closing_fd(tree.open(Part(layer, directory), DIRECTORY)) as fd:
            with os.scandir(fd) as entries:
                for entry in entries:
                    part = Part(layer, join(directory, os.fsencode(entry.name)))
                    yield part
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(part.path)
