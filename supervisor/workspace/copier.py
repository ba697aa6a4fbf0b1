"""Copies of a tree's objects in another directory, each with its attributes.

A file that has several names in the tree is one file in the copies as well.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.workspace.layers import split
from supervisor.workspace.linux import (
    copy_content,
    held_entry,
    set_mode,
    set_owner,
    set_times,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.workspace.layers import LayeredTree, TreeNode

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of open(2) for a file that is not there yet."""


class Copier:
    """Copies objects of a tree beneath a directory.

    Args:
        top: a descriptor of the directory.
        copy_attributes: gives a copy extended attributes of its object: a descriptor
            of the object, one of the copy.

    Attributes:
        size_bytes: how much content was copied, by data or by reference.
    """

    def __init__(
        self,
        tree: LayeredTree,
        top: int,
        copy_attributes: Callable[[int, int], None],
    ) -> None:
        self._tree = tree
        self._top = top
        self._copy_attributes = copy_attributes
        self._paths: dict[tuple[int, int], bytes] = {}
        self.size_bytes = 0

    def copy(self, node: TreeNode, directory: int, path: bytes) -> None:
        """Copy an object; a directory without what is in it.

        Args:
            node: the object.
            directory: a descriptor of where the copy is made.
            path: of the copy, from the top.

        Raises:
            GoneError: the object is not there any more.
            OSError: it cannot be read, or the copy not be made.
        """
        _, name = split(path)
        status = node.status
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and not node.is_directory and key in self._paths:
            os.link(
                self._paths[key], name,
                src_dir_fd=self._top, dst_dir_fd=directory, follow_symlinks=False,
            )  # fmt: skip
            return
        self._paths[key] = path
        if node.is_directory:
            os.mkdir(name, 0o700, dir_fd=directory)
            with closing_fd(os.open(name, DIRECTORY, dir_fd=directory)) as copy:
                self.finish_directory(node, copy)
        elif stat.S_ISREG(status.st_mode):
            self._copy_file(node, directory, name)
        else:
            if stat.S_ISLNK(status.st_mode):
                os.symlink(self._tree.read_link(node), name, dir_fd=directory)
            else:
                os.mknod(name, status.st_mode, status.st_rdev, dir_fd=directory)
            with held_entry(directory, name) as copy:
                self._finish(node, copy, None)

    def finish_directory(self, node: TreeNode, copy: int) -> None:
        """Give the copy of a directory what its object has, once all is in it."""
        with closing_fd(self._tree.open_node(node)) as source:
            self._finish(node, copy, source)

    def _copy_file(self, node: TreeNode, directory: int, name: bytes) -> None:
        with (
            closing_fd(os.open(name, NEW_FILE, 0o600, dir_fd=directory)) as copy,
            closing_fd(self._tree.open_node(node)) as source,
        ):
            copy_content(source, copy)
            self.size_bytes += os.fstat(copy).st_size
            self._finish(node, copy, source)

    def _finish(self, node: TreeNode, copy: int, source: int | None) -> None:
        """Give a copy the owner, extended attributes, mode and times of its object.

        In this order: chown(2) takes away capabilities and set-user-ID. ``source`` is None
        for a link, device, pipe or socket, which cannot be opened for its attributes.
        """
        status = node.status
        set_owner(copy, status.st_uid, status.st_gid)
        if source is not None:
            self._copy_attributes(source, copy)
        if not stat.S_ISLNK(status.st_mode):
            set_mode(copy, stat.S_IMODE(status.st_mode))
        set_times(copy, (status.st_atime_ns, status.st_mtime_ns))
