"""The staging directory of a commit: what is new, written beside the base.

Spec WS12.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hostlib.linux.files import closing_fd
from supervisor.workspace.attributes import user_attributes
from supervisor.workspace.changes import Change, Row
from supervisor.workspace.commit_journal import (
    BaseChangedError,
    Identity,
    Put,
    SetAttributes,
    SetMode,
    SetTimes,
    Step,
    Take,
    content_of,
    identity_of,
)
from supervisor.workspace.copier import NEW_FILE, Copier
from supervisor.workspace.record import digest_inside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from supervisor.workspace.layers import LayeredTree, TreeNode


@dataclass(frozen=True, slots=True)
class MergedFile:
    """The new form of a file of the base, made from both sides.

    Attributes:
        content: the new one.
        mode: permission bits.
        attributes: extended ones: name, value.
        expected: the base's file that was merged.
        ctime_ns: when that was last changed.
    """

    content: bytes
    mode: int
    attributes: tuple[tuple[str, bytes], ...]
    expected: Identity
    ctime_ns: int

    def is_of(self, node: TreeNode | None) -> bool:
        """Tell whether the base still has what was merged."""
        if node is None or node.status.st_ctime_ns != self.ctime_ns:
            return False
        return identity_of(node.status) == self.expected


class Staging:
    """Writes what is new into the staging directory, and returns the steps.

    Args:
        staging: a descriptor of the directory.
        merges: by path, what takes the place of the workspace's file.
    """

    def __init__(
        self,
        staging: int,
        merged: LayeredTree,
        base: LayeredTree,
        merges: Mapping[bytes, MergedFile],
    ) -> None:
        self._staging = staging
        self._merged = merged
        self._base = base
        self._merges = merges
        self._count = 0
        self._moved: frozenset[bytes] = frozenset()
        self._copier = Copier(merged, staging, _copy_xattrs)

    def prepare(self, rows: Sequence[Row]) -> list[Step]:
        """Return the steps; the base is as it was."""
        renamed = [row for row in rows if row.origin is not None]
        renamed.sort(key=lambda row: (row.origin or b"").count(b"/"), reverse=True)
        self._moved = frozenset(row.origin for row in renamed if row.origin is not None)
        places: dict[bytes, tuple[bytes, int]] = {}
        steps: list[Step] = []
        for row in renamed:
            origin = row.origin or b""
            expected = self._expect(origin, is_whole=False)
            take = Take(origin, self._name(), expected, row.path)
            places[row.path] = take.staged, take.expected.inode
            steps.append(take)
        times: list[Step] = []
        for row in rows:
            if row.path in self._merges:
                steps.append(self._put_merged(row.path, self._merges[row.path]))
            elif row.origin is not None:
                steps += self._move(row, *places[row.path])
            elif row.change is Change.DELETED:
                steps.append(self._removal(row))
            elif row.old is not None and self._is_mode_alone(row, row.old):
                steps += self._facts_steps(row, row.old.status.st_ino)
            elif row.new is not None:
                put = self._put(row, row.new)
                steps.append(put)
                times += _times(row, put)
        return steps + times[::-1]

    def _name(self) -> bytes:
        self._count += 1
        return b"%d" % self._count

    def _move(self, row: Row, staged: bytes, inode: int) -> list[Step]:
        """Return the steps that bring a directory to its new path."""
        replaced = None
        if row.replaced is not None:
            replaced = self._expect(row.replaced.path, is_whole=True)
        put = Put(row.path, staged, inode, replaced, is_moved=True)
        return [put, *self._facts_steps(row, inode)]

    def _removal(self, row: Row) -> Take:
        """Return the step of a deletion; its object may lie in a renamed directory."""
        where = row.path if row.old is None else row.old.path
        expected = self._expect(where, is_whole=True)
        return Take(row.path, self._name(), expected)

    def _expect(self, path: bytes, *, is_whole: bool) -> Identity:
        node = self._base.find(path)
        if node is None:
            raise BaseChangedError(path, "it is not there any more")
        with closing_fd(self._base.open(node.parts[0])) as fd:
            found = identity_of(os.fstat(fd))
        if is_whole and node.is_directory:
            # A path that is renamed out of it is gone by then.
            inside = digest_inside(self._base, node, self._moved)
            found = msgspec.structs.replace(found, inside=inside)
        return found

    def _is_mode_alone(self, row: Row, old: TreeNode) -> bool:
        """Tell whether a new mode of the base's own object is all that there is to do."""
        new = row.new
        if row.change is not Change.MODE or new is None:
            return False
        if new.is_directory:
            return True
        # A change of the inode shows under each of its names.
        if old.status.st_nlink > 1 or _facts(new.status) != _facts(old.status):
            return False
        if new.kind != stat.S_IFREG:
            return True
        return _xattrs_in(self._merged, new) == _xattrs_in(self._base, old)

    def _facts_steps(self, row: Row, inode: int) -> list[Step]:
        """Return the steps that set the mode and the attributes of a base's object."""
        if row.new is None or row.old is None:
            return []
        steps = self._attribute_steps(row.path, inode, row.new, row.old)
        old = stat.S_IMODE(row.old.status.st_mode)
        new = stat.S_IMODE(row.new.status.st_mode)
        if old != new:
            expected = identity_of(row.old.status)
            # The attributes of what cannot be written to cannot be set.
            at = 0 if new & stat.S_IWUSR else len(steps)
            steps.insert(at, SetMode(row.path, inode, old, new, expected))
        return steps

    def _attribute_steps(
        self, path: bytes, inode: int, new: TreeNode, old: TreeNode
    ) -> list[Step]:
        """Return the step that brings along what was changed of a directory's attributes."""
        if not new.is_directory:
            return []
        olds, news = _xattrs_in(self._base, old), _xattrs_in(self._merged, new)
        values = {
            name: (olds.get(name), news.get(name))
            for name in sorted(olds.keys() | news.keys())
            if olds.get(name) != news.get(name)
        }
        return [SetAttributes(path, inode, values)] if values else []

    def _put(self, row: Row, new: TreeNode) -> Put:
        expected = None
        if row.old is not None:
            expected = self._expect(row.old.path, is_whole=True)
        name = self._name()
        self._copier.copy(new, self._staging, name)
        status = os.stat(name, dir_fd=self._staging, follow_symlinks=False)
        content = content_of(status)
        return Put(row.path, name, status.st_ino, expected, content=content)

    def _put_merged(self, path: bytes, merged: MergedFile) -> Put:
        name = self._name()
        fd = os.open(name, NEW_FILE, 0o600, dir_fd=self._staging)
        with open(fd, "wb") as file:
            file.write(merged.content)
            file.flush()
            os.fchown(file.fileno(), *merged.expected.owner)
            for attribute, value in merged.attributes:
                os.setxattr(file.fileno(), attribute, value)
            os.fchmod(file.fileno(), merged.mode)
            status = os.fstat(file.fileno())
        content = content_of(status)
        return Put(path, name, status.st_ino, merged.expected, content=content)


def _times(row: Row, put: Put) -> list[Step]:
    """Return the step that sets the times of a new directory when it is full."""
    if row.new is None or not row.new.is_directory:
        return []
    status = row.new.status
    pair = (status.st_atime_ns, status.st_mtime_ns)
    return [SetTimes(row.path, put.inode, pair)]


def _facts(status: os.stat_result) -> tuple[int, int, int]:
    """Return what else comes along than mode and attributes."""
    return status.st_uid, status.st_gid, status.st_mtime_ns


def _xattrs_in(tree: LayeredTree, node: TreeNode) -> dict[str, bytes]:
    """Return the attributes of the user namespace of a file or a directory."""
    with closing_fd(tree.open_node(node)) as fd:
        return dict(user_attributes(fd))


def _copy_xattrs(source: int, target: int) -> None:
    for name, value in user_attributes(source):
        os.setxattr(target, name, value)
