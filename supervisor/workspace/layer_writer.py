"""One layer that shows over a base what several layers show over it.

It serves a workspace's commit, a snapshot in which a directory of the base was renamed, a
snapshot while a child runs, and a stack that has become too deep.

Rules:
 1. Files of sealed layers are linked: they are never written to again. Directories are
    made anew, so entries and marks can be taken from the new layer alone.
 2. The base's content of a renamed directory is copied, but for hidden paths; no
    redirect is written.
 3. A whiteout stands only where the base has something, for overlayfs lists those that
    hide nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from hostlib.linux.files import DIRECTORY, closing_fd, open_directory
from supervisor.workspace.attributes import attribute_names, is_escaped
from supervisor.workspace.copier import Copier
from supervisor.workspace.hiding import shows_hidden
from supervisor.workspace.layers import LayeredTree, Node, Part, split
from supervisor.workspace.linux import has_entry
from supervisor.workspace.selection import Patterns

if TYPE_CHECKING:
    from collections.abc import Collection

    from supervisor.workspace.layers import DirectoryReader

_KEPT = ("user.", "system.posix_acl_", "security.capability")
NOTHING_HIDDEN = Patterns(())
_NOT_KEPT = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EPERM})


class LostOriginError(Exception):
    """A renamed directory points to one that is not there any more: its path."""

    def __init__(self, path: bytes) -> None:
        super().__init__(os.fsdecode(path))
        self.path = path


def write_layer(
    tree: LayeredTree,
    target: int,
    copied: Collection[int] = (),
    hide: Patterns = NOTHING_HIDDEN,
) -> int:
    """Write into an empty directory what a tree shows above its base.

    Args:
        tree: the layers, the base the last of them.
        target: a descriptor of the directory.
        copied: numbers of layers whose files are copied, because they may be written to.
        hide: patterns of what no child sees of the base; it is not copied.

    Returns:
        How many bytes were copied, by data or by reference.

    Raises:
        LostOriginError: something cannot be shown any more.
        OSError: something cannot be read or written.
    """
    return _Writer(tree, target, copied, hide).write()


class _Writer:
    def __init__(
        self,
        tree: LayeredTree,
        target: int,
        copied: Collection[int],
        hide: Patterns,
    ) -> None:
        self._hide = hide
        self._tree = tree
        self._target = target
        self._copied = frozenset((*copied, tree.base_layer))
        self._mark = os.fsdecode(tree.marks)
        self._copier = Copier(tree, target, self._copy_xattrs)

    def write(self) -> int:
        """Write it; return how many bytes were copied."""
        directories = [self._tree.top()]
        for directory in directories:  # which grow
            with closing_fd(open_directory(directory.path, self._target)) as fd:
                directories += self._fill(directory, fd)
        for directory in reversed(directories):
            with closing_fd(open_directory(directory.path, self._target)) as fd:
                self._finish(directory, fd)
        return self._copier.size_bytes

    def _is_over_base(self, node: Node) -> bool:
        """Tell whether a directory shows what the base has at its own path."""
        return self._tree.base_path(node) == node.path

    def _fill(self, directory: Node, fd: int) -> list[Node]:
        """Write what is in a directory; return the directories in it."""
        is_over_base = self._is_over_base(directory)
        inner = []
        with self._tree.read(directory) as reader:
            names = reader.names_above_base() if is_over_base else reader.names()
            oldest = reader.descriptor(directory.parts[-1])
            for name in sorted(names):
                node = reader.look_up(name)
                if node is None:
                    if is_over_base and has_entry(oldest, name):
                        os.mknod(name, stat.S_IFCHR, dir_fd=fd)
                elif shows_hidden(node, self._hide, self._tree.base_layer):
                    continue
                elif node.is_directory:
                    os.mkdir(name, 0o700, dir_fd=fd)
                    inner.append(node)
                    hides = is_over_base and has_entry(oldest, name)
                    if hides and not self._is_over_base(node):
                        self._set_opaque(fd, name)
                    self._check_origin(node)
                else:
                    self._put(node, reader, fd, name)
        return inner

    def _set_opaque(self, directory: int, name: bytes) -> None:
        with closing_fd(os.open(name, DIRECTORY, dir_fd=directory)) as fd:
            os.setxattr(fd, f"{self._mark}opaque", b"y")

    def _check_origin(self, node: Node) -> None:
        """Refuse a directory whose redirect leads nowhere.

        Raises:
            LostOriginError: that is so.
        """
        _, redirect = self._tree.directory_marks(node.parts[0])
        if redirect is not None and len(node.parts) == 1:
            raise LostOriginError(node.path)

    def _put(self, node: Node, reader: DirectoryReader, fd: int, name: bytes) -> None:
        part = node.parts[0]
        if part.layer not in self._copied:
            source = reader.descriptor(Part(part.layer, split(part.path)[0]))
            os.link(
                split(part.path)[1], name,
                src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False,
            )  # fmt: skip
            return
        self._copier.copy(node, fd, node.path)

    def _finish(self, directory: Node, fd: int) -> None:
        """Give a directory what its object has, and the mark of its origin."""
        self._copy_origin(directory, fd)
        self._copier.finish_directory(directory, fd)

    def _copy_origin(self, directory: Node, fd: int) -> None:
        """Keep which directory of the base one was copied from."""
        if len(directory.parts) == 1 or not self._is_over_base(directory):
            return
        origin = self._tree.read_mark(directory.parts[-2], b"origin")
        if origin is not None:
            os.setxattr(fd, f"{self._mark}origin", origin)

    def _copy_xattrs(self, source: int, target: int) -> None:
        is_file = stat.S_ISREG(os.fstat(source).st_mode)
        for name in attribute_names(source):
            if not self._is_kept(name, is_file=is_file):
                continue
            try:
                os.setxattr(target, name, os.getxattr(source, name))
            except OSError as why:
                if why.errno not in _NOT_KEPT:
                    raise

    def _is_kept(self, name: str, *, is_file: bool) -> bool:
        """Tell whether an attribute goes along; of overlayfs's a file's origin does."""
        if not name.startswith(self._mark) or is_escaped(name, self._mark):
            return name.startswith(_KEPT)
        return is_file and name == f"{self._mark}origin"
