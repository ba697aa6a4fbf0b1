"""The rest of the layer that a workspace writes to, after a commit.

Rules:
 1. An object leaves the layer only if the tree shows the same without it.
 2. Marks go first: a directory that the base has now at its own path needs no pointer to
    an old one, and one in which nothing is removed any more needs nothing hidden. In one
    that still hides the base, a renamed directory keeps a pointer: to its own path.
 3. A whiteout over nothing stays while there are pointers: if the base had something there
    again, a pointer and a path could show one directory twice, which the kernel refuses.
 4. All of it can be done again after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.linux.files import closing_fd, open_directory
from hostlib.linux.syscalls import open_exactly
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.changes import Change, Row, compare
from supervisor.workspace.layers import (
    GONE,
    LayeredTree,
    TreeNode,
    join,
    parents,
    split,
    with_parents,
)
from supervisor.workspace.linux import held_entry, is_whiteout, set_mode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

_UPPER = 0
_NO_MARK = frozenset({errno.ENODATA, errno.EOPNOTSUPP})


def remove_committed(
    upper: int,
    base: int,
    marks: bytes,
    paths: Collection[bytes],
    dropped: Collection[bytes] = (),
    moved: Collection[bytes] = (),
) -> None:
    """Remove from the upper layer what the base has now, and what is to be dropped.

    Args:
        upper: a descriptor of its top.
        base: of the base's top.
        marks: how the names of overlayfs's attributes begin.
        paths: that the commit changed.
        dropped: where the base's side was chosen.
        moved: where the commit has put directories that the base had elsewhere. A pointer
            anywhere else was made by the child since.
    """
    merged = LayeredTree((upper, base), marks)
    alone = LayeredTree((base,))
    directories = _directories_in(alone, with_parents(paths))
    pointing = directories & frozenset(moved)
    for path in pointing:
        _point_to_itself(upper, path, marks + b"redirect")
    for path in _unneeded_opaque(alone, merged, directories):
        _remove_mark_of(upper, path, marks + b"opaque")
    for path in pointing:
        directory = split(path)[0]
        around = merged.find(directory)
        if around is not None and merged.base_path(around) == directory:
            _remove_mark_of(upper, path, marks + b"redirect")
    rows = compare(alone, merged)
    if dropped:
        drop_changes(upper, [row for row in rows if row.path in dropped])
        rows = compare(alone, merged)
    needed = with_parents(row.path for row in rows)
    is_pointing = any(has_pointer(merged, row.new) for row in rows)
    pruning = _Pruning(upper, merged, needed, frozenset(paths), is_pointing=is_pointing)
    pruning.prune(merged.top())


def _point_to_itself(upper: int, path: bytes, mark: bytes) -> None:
    """Let a directory that pointed elsewhere show what the base has at its own path.

    Without a pointer it would show nothing of that in a directory that is opaque.
    """
    with _directory_at(upper, path) as fd:
        if fd is not None and _has_mark(fd, mark):
            os.setxattr(fd, mark, b"/" + path)


def _directories_in(tree: LayeredTree, paths: Iterable[bytes]) -> set[bytes]:
    nodes = ((path, tree.find(path)) for path in sorted(paths))
    return {path for path, node in nodes if node is not None and node.is_directory}


def _unneeded_opaque(
    base: LayeredTree, merged: LayeredTree, directories: Iterable[bytes]
) -> set[bytes]:
    """Return opaque directories of the layer that hide no removed path."""
    opaque: set[bytes] = set()
    for path in directories:
        node = merged.find(path)
        if node is not None and node.is_directory and node.parts[0].layer == _UPPER:
            is_opaque, _ = merged.directory_marks(node.parts[0])
            if is_opaque:
                opaque.add(path)
    needed: set[bytes] = set()
    for row in compare(base, merged) if opaque else ():
        gone = row.path if row.change is Change.DELETED else row.origin
        if gone is not None:
            # The nearest one above it hides it.
            needed.update([one for one in parents(gone) if one in opaque][:1])
        if row.change is not Change.MODE:
            needed.add(row.path)  # a new one, where the base's was moved or removed
    return opaque - needed


def detach(upper: int, marks: bytes, paths: Collection[bytes]) -> None:
    """Take from objects of an upper layer what they say of the base's.

    Of objects whose base object was moved or replaced: the kernel would take the path where
    that one is now for the same file, or show a directory twice. The layer must not be
    mounted.
    """
    for path in paths:
        with closing_fd(
            open_exactly(path, upper, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        ) as fd:
            if _has_mark(fd, marks + b"redirect"):
                os.setxattr(fd, marks + b"opaque", b"y")
            for mark in (b"redirect", b"origin"):
                _remove_mark(fd, marks + mark)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                _remove_whiteouts(fd)


def _remove_whiteouts(directory: int) -> None:
    """Remove them from a directory of the layer alone, where the kernel lists them."""
    for name in os.listdir(directory):
        if is_whiteout(os.stat(name, dir_fd=directory, follow_symlinks=False)):
            os.unlink(name, dir_fd=directory)


def _has_mark(fd: int, mark: bytes) -> bool:
    try:
        os.getxattr(fd, mark)
    except OSError as why:
        if why.errno not in _NO_MARK:
            raise
        return False
    return True


def _remove_mark(fd: int, mark: bytes) -> None:
    try:
        os.removexattr(fd, mark)
    except OSError as why:
        if why.errno not in _NO_MARK:
            raise


def has_pointer(merged: LayeredTree, node: TreeNode | None) -> bool:
    """Tell whether a directory of the layer points to where the base has it."""
    if node is None or not node.is_directory:
        return False
    part = node.parts[0]
    return part.layer == _UPPER and merged.directory_marks(part)[1] is not None


def remove_merged(upper: int, paths: Sequence[bytes]) -> None:
    """Remove files from the upper layer of which the base has another version now."""
    for path in paths:
        try:
            with _directory_of(upper, path) as (fd, name):
                os.unlink(name, dir_fd=fd)
        except OSError as why:
            if why.errno not in {errno.ENOENT, errno.ENOTDIR}:
                raise


def mark_opaque(upper: int, marks: bytes, paths: Sequence[bytes]) -> None:
    """Mark directories that are new, so that nothing that the base has there shows.

    A mount that is in use looks at that mark alone, when it finds a directory anew.
    """
    for path in paths:
        with _directory_at(upper, path) as fd:
            # One that points elsewhere shows nothing of its own path already.
            if fd is not None and not _has_mark(fd, marks + b"redirect"):
                os.setxattr(fd, marks + b"opaque", b"y")


def unmark_opaque(upper: int, marks: bytes, paths: Sequence[bytes]) -> None:
    """Take back ``mark_opaque`` where the base has nothing that could show."""
    for path in paths:
        _remove_mark_of(upper, path, marks + b"opaque")


def put_whiteouts(upper: int, paths: Sequence[bytes]) -> None:
    """Hide the base's objects at some paths where the layer has a directory around."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with _directory_of(upper, path) as (fd, name):
                os.mknod(name, stat.S_IFCHR, dir_fd=fd)


def drop_changes(upper: int, rows: Sequence[Row]) -> None:
    """Remove changes from the upper layer, so that the base shows again.

    Args:
        upper: a descriptor of its top.
        rows: of ``compare``, sorted.
    """
    for row in reversed(rows):  # the content of a directory first
        with _directory_of(upper, row.path) as (fd, name):
            if row.change is Change.MODE and row.old and row.old.is_directory:
                with held_entry(fd, name) as held:
                    set_mode(held, stat.S_IMODE(row.old.status.st_mode))
            elif row.new is not None and row.new.is_directory:
                why = remove_tree(Path(os.fsdecode(name)), fd)
                if why is not None:
                    raise why
            else:
                # The base may have changed during the look: then nothing is in the layer.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        if row.origin is not None:
            # In a directory that was renamed itself, it went with the new place of that.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                with _directory_of(upper, row.origin) as (fd, name):
                    os.unlink(name, dir_fd=fd)  # the whiteout at its old place


@contextlib.contextmanager
def _directory_of(upper: int, path: bytes) -> Iterator[tuple[int, bytes]]:
    """Hold the layer's directory that a path is in; gives it, and the name there."""
    directory, name = split(path)
    with closing_fd(open_directory(directory, upper)) as fd:
        yield fd, name


def _remove_mark_of(upper: int, path: bytes, mark: bytes) -> None:
    """Take a mark from one of the layer's directories."""
    with _directory_at(upper, path) as fd:
        if fd is not None:
            _remove_mark(fd, mark)


@contextlib.contextmanager
def _directory_at(upper: int, path: bytes) -> Iterator[int | None]:
    """Hold one of the layer's directories; gives None where it has none at a path."""
    try:
        fd = open_directory(path, upper)
    except OSError as why:
        if why.errno not in GONE:
            raise
        yield None
        return
    with closing_fd(fd):
        yield fd


class _Pruning:
    def __init__(
        self,
        upper: int,
        merged: LayeredTree,
        needed: set[bytes],
        committed: frozenset[bytes],
        *,
        is_pointing: bool,
    ) -> None:
        self._upper = upper
        self._merged = merged
        self._needed = needed
        self._committed = committed
        self._is_pointing = is_pointing

    def prune(self, top: TreeNode) -> None:
        """Prune a directory and what lies in it, the innermost first."""
        pending = [(top, False)]
        while pending:
            directory, is_inside_done = pending.pop()
            if is_inside_done:
                self._prune_directory(directory)
                continue
            pending.append((directory, True))
            with self._merged.read(directory) as reader:
                for name in reader.names_in(directory.parts[:1]):
                    node = reader.look_up(name)
                    if node is not None and self._may_have_any(node):
                        pending.append((node, False))

    def _may_have_any(self, node: TreeNode) -> bool:
        """Tell whether a directory is at one path in the layer and the base, or is new.

        In a new one there may be whiteouts over nothing, where a commit was undone.
        """
        if not node.is_directory:
            return False
        return {part.path for part in node.parts} == {node.path}

    def _prune_directory(self, directory: TreeNode) -> None:
        with closing_fd(open_directory(directory.path, self._upper)) as fd:
            below = TreeNode(directory.path, directory.status, directory.parts[1:])
            with self._merged.read(below) as older:
                for name in map(os.fsencode, os.listdir(fd)):
                    self._prune_entry(fd, name, directory, older.look_up(name))

    def _prune_entry(
        self, fd: int, name: bytes, directory: TreeNode, below: TreeNode | None
    ) -> None:
        """Remove an entry of the layer if what lies below shows the same without it."""
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        path = join(directory.path, name)
        if is_whiteout(status):
            if below is None and not self._is_pointing:
                os.unlink(name, dir_fd=fd)
            return
        if path in self._needed or below is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            if path in self._committed:
                os.unlink(name, dir_fd=fd)
            return
        if not below.is_directory:
            return
        with contextlib.suppress(OSError):  # something is still in it
            os.rmdir(name, dir_fd=fd)
