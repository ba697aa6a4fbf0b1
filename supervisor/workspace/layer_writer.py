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
from supervisor.workspace.hiding import shows_hidden
from supervisor.workspace.layers import LayeredTree, Node, Part, split
from supervisor.workspace.linux import (
    copy_content,
    has_entry,
    held_entry,
    set_mode,
    set_owner,
)
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
        self._links: dict[tuple[int, int], bytes] = {}
        self._size_bytes = 0

    def write(self) -> int:
        """Write it; return how many bytes were copied."""
        directories = [self._tree.top()]
        for directory in directories:  # which grow
            with closing_fd(open_directory(directory.path, self._target)) as fd:
                directories += self._fill(directory, fd)
        for directory in reversed(directories):
            with closing_fd(open_directory(directory.path, self._target)) as fd:
                self._finish(directory, fd)
        return self._size_bytes

    def _is_over_base(self, node: Node) -> bool:
        """Tell whether a directory shows what the base has at its own path."""
        return node.parts[-1] == Part(self._tree.base_layer, node.path)

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
        status = node.status
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and key in self._links:
            first = self._links[key]
            os.link(
                first, name,
                src_dir_fd=self._target, dst_dir_fd=fd, follow_symlinks=False,
            )  # fmt: skip
            return
        self._links[key] = node.path
        self._copy(node, fd, name)

    def _copy(self, node: Node, directory: int, name: bytes) -> None:
        status = node.status
        if stat.S_ISREG(status.st_mode):
            self._copy_file(node, directory, name)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(self._tree.read_link(node), name, dir_fd=directory)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=directory)
        if not stat.S_ISREG(status.st_mode):
            set_owner(directory, name, status)
        if not stat.S_ISLNK(status.st_mode):
            with held_entry(directory, name) as fd:
                set_mode(fd, stat.S_IMODE(status.st_mode))
        os.utime(
            name,
            ns=(status.st_atime_ns, status.st_mtime_ns),
            dir_fd=directory,
            follow_symlinks=False,
        )

    def _copy_file(self, node: Node, directory: int, name: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with closing_fd(os.open(name, flags, 0o600, dir_fd=directory)) as target:
            with closing_fd(self._tree.open_file(node)) as source:
                copy_content(source, target)
                set_owner(directory, name, node.status)
                self._copy_xattrs(source, target)
            self._size_bytes += os.fstat(target).st_size

    def _finish(self, directory: Node, fd: int) -> None:
        """Give a directory its owner, attributes, mode and times."""
        status = directory.status
        with closing_fd(self._tree.open(directory.parts[0], DIRECTORY)) as source:
            now = os.fstat(fd)
            if (now.st_uid, now.st_gid) != (status.st_uid, status.st_gid):
                os.chown(fd, status.st_uid, status.st_gid)
            self._copy_xattrs(source, fd)
        self._copy_origin(directory, fd)
        os.chmod(fd, stat.S_IMODE(status.st_mode))
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))

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
