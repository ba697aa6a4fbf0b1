"""Sealed layers that show what a workspace does: for snapshots, forks and commits.

Rules:
 1. A sealed layer has no redirects: with one, or while a child runs, one new layer is
    written that shows what all the layers did.
 2. The files of a sealed layer may be another layer's as well, so nothing writes to them.
    Its directories are made anew, so entries and marks can be taken from it alone.
 3. The base's content of a renamed directory is copied, but for hidden paths.
 4. A whiteout stands only where the base has something, for overlayfs lists those that
    hide nothing.
 5. A layer that is written is synced before a state names it: then those that had its
    content may go.

Spec WS12a, WS15.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostlib.linux.files import DIRECTORY, closing_fd, open_directory
from supervisor.workspace.attributes import attribute_names, is_escaped
from supervisor.workspace.changes import Change, Row, compare
from supervisor.workspace.copier import Copier
from supervisor.workspace.directory import WorkspaceError, read_top
from supervisor.workspace.hidden_files import shows_hidden
from supervisor.workspace.layer_store import new_layer_id
from supervisor.workspace.layers import LayeredTree, Part, TreeNode, is_beneath, split
from supervisor.workspace.linux import has_entry, sync_file_system
from supervisor.workspace.record import BaseObject, Record, look_at_base
from supervisor.workspace.selection import Patterns

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from supervisor.workspace.held_workspace import HeldWorkspace
    from supervisor.workspace.layers import DirectoryReader

MAX_LAYERS = 64
LAYERS_AFTER_MERGE = 32
_UNKNOWN = BaseObject(stat.S_IFDIR, inside=b"unknown")
"""Record of a directory with a conflict in it: it equals no other."""

_KEPT = ("user.", "system.posix_acl_", "security.capability")
_NOT_KEPT = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EPERM})
_NOTHING_HIDDEN = Patterns(())


@dataclass(slots=True)
class SealedLayers:
    """Sealed layers that show what a workspace does.

    Attributes:
        layers: newest first.
        outgoing: as which layer the upper is to go away; "" if it stays.
        copied_bytes: how much was copied.
        stopped_ns: how long the child's processes were stopped.
        record: of the base, if that is told otherwise than before; else None.
    """

    layers: tuple[str, ...]
    outgoing: str = ""
    copied_bytes: int = 0
    stopped_ns: int = 0
    record: Record | None = None


def seal(held: HeldWorkspace, store: int) -> SealedLayers:
    """Return sealed layers that show what the workspace does now.

    Raises:
        WorkspaceError: a renamed directory cannot be copied.
    """
    state = held.state
    if held.directory.user():
        return _seal_running(held, store)
    if state.may_redirect or state.is_running:
        with held.trees() as trees:
            held.changes(trees)  # which looks, and records what the base has
        if held.has_redirects:
            sealed = write_united(held, store)
            sealed.outgoing = new_layer_id()
            return sealed
    if _is_upper_empty(held, store):
        return SealedLayers(state.layers)
    layer = new_layer_id()
    return SealedLayers((layer, *_bounded(held, store)), layer)


def _seal_running(held: HeldWorkspace, store: int) -> SealedLayers:
    """Copy the upper of a workspace that a child has; it goes on being written to."""
    with held.stopped():
        began_ns = time.monotonic_ns()
        sealed = _write_united(held, store, copied=(0,))
        sealed.stopped_ns = time.monotonic_ns() - began_ns
    sync_file_system(store)
    return sealed


def write_united(held: HeldWorkspace, store: int) -> SealedLayers:
    """Write one layer that shows what all of them do; it is on the disk then."""
    sealed = _write_united(held, store)
    sync_file_system(store)
    return sealed


def _write_united(
    held: HeldWorkspace, store: int, copied: tuple[int, ...] = ()
) -> SealedLayers:
    with held.trees() as trees:
        rows = held.changes(trees)
        judge = held.judge(trees)
        moved = [row for row in rows if row.change is Change.RENAMED]
        conflicts = (
            {row.path for row in rows if judge.conflict(row)} if moved else set()
        )
        for row in moved:
            if row.path in conflicts:
                raise _cannot_copy(held, row.path, "it was in the base")
        layer = new_layer_id()
        with closing_fd(_make_layer(store, layer)) as fd:
            try:
                writer = _LayerWriter(trees.merged, fd, copied, held.hide)
                copied_bytes = writer.write()
            except _LostOriginError as why:
                raise _cannot_copy(held, why.path, "it was there") from None
        sealed = SealedLayers((layer,), copied_bytes=copied_bytes)
        if moved:
            sealed.record = _record_of_copies(held, layer, moved, conflicts)
    return sealed


def _cannot_copy(held: HeldWorkspace, path: bytes, place: str) -> WorkspaceError:
    name = os.fsdecode(path)
    text = f"cannot seal {held.name!r}: {name!r} was renamed, and is not what {place}"
    return WorkspaceError(f"{text}; commit or drop it first")


def _bounded(held: HeldWorkspace, store: int) -> tuple[str, ...]:
    """Return the sealed layers, the older ones merged if there are too many."""
    layers = held.state.layers
    if len(layers) < MAX_LAYERS:
        return layers
    newer, older = layers[:LAYERS_AFTER_MERGE], layers[LAYERS_AFTER_MERGE:]
    layer = new_layer_id()
    with (
        closing_fd(held.open_base()) as base,
        held.store.open_layers(older) as tops,
        closing_fd(_make_layer(store, layer)) as fd,
    ):
        _LayerWriter(LayeredTree((*tops, base), held.state.marks), fd).write()
    sync_file_system(store)
    return (*newer, layer)


def _make_layer(store: int, layer: str) -> int:
    os.mkdir(layer, 0o700, dir_fd=store)
    return os.open(layer, DIRECTORY, dir_fd=store)


def _is_upper_empty(held: HeldWorkspace, store: int) -> bool:
    """Tell whether the upper shows nothing of its own."""
    with closing_fd(os.open("upper", DIRECTORY, dir_fd=held.directory.fd)) as fd:
        with os.scandir(fd) as entries:
            if next(entries, None) is not None:
                return False
        return read_top(fd) == held.top_below(store, held.state.layers)


def _record_of_copies(
    held: HeldWorkspace, layer: str, moved: Sequence[Row], conflicts: set[bytes]
) -> Record:
    """Return what was seen of the base where renamed directories are copies now."""
    record = held.records.load()
    places = [place for row in moved for place in (row.path, row.origin or b"")]
    torn = [
        row.origin or b""
        for row in moved
        if any(_is_within(path, row.path) for path in conflicts)
    ]
    with (
        closing_fd(held.open_base()) as base,
        held.store.open_layers((layer,)) as tops,
    ):
        alone = LayeredTree((base,))
        merged = LayeredTree((*tops, base), held.state.marks)
        for row in compare(alone, merged):
            if any(_is_within(row.path, place) for place in places):
                record[row.path] = look_at_base(alone, row)
            if any(_is_within(origin, row.path) for origin in torn):
                record[row.path] = _UNKNOWN
    return record


def _is_within(path: bytes, directory: bytes) -> bool:
    return path == directory or is_beneath(path, directory)


class _LostOriginError(Exception):
    """A renamed directory points to one that is not there any more: its path."""

    def __init__(self, path: bytes) -> None:
        super().__init__(os.fsdecode(path))
        self.path = path


class _LayerWriter:
    """Writes into an empty directory what a tree shows above its base.

    Args:
        copied: numbers of layers whose files are copied, because they may be written to;
            those of sealed layers are linked.
        hide: patterns of what no child sees of the base; it is not copied.
    """

    def __init__(
        self,
        tree: LayeredTree,
        target: int,
        copied: Collection[int] = (),
        hide: Patterns = _NOTHING_HIDDEN,
    ) -> None:
        self._hide = hide
        self._tree = tree
        self._target = target
        self._copied = frozenset((*copied, tree.base_layer))
        self._mark = os.fsdecode(tree.marks)
        self._copier = Copier(tree, target, self._copy_xattrs)

    def write(self) -> int:
        """Write it; return how many bytes were copied, by data or by reference.

        Raises:
            _LostOriginError: something cannot be shown any more.
            OSError: something cannot be read or written.
        """
        directories = [self._tree.top()]
        for directory in directories:  # which grow
            with closing_fd(open_directory(directory.path, self._target)) as fd:
                directories += self._fill(directory, fd)
        for directory in reversed(directories):
            with closing_fd(open_directory(directory.path, self._target)) as fd:
                self._finish(directory, fd)
        return self._copier.size_bytes

    def _is_over_base(self, node: TreeNode) -> bool:
        """Tell whether a directory shows what the base has at its own path."""
        return self._tree.base_path(node) == node.path

    def _fill(self, directory: TreeNode, fd: int) -> list[TreeNode]:
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

    def _check_origin(self, node: TreeNode) -> None:
        """Raise ``_LostOriginError`` for a directory whose redirect leads nowhere."""
        _, redirect = self._tree.directory_marks(node.parts[0])
        if redirect is not None and len(node.parts) == 1:
            raise _LostOriginError(node.path)

    def _put(
        self, node: TreeNode, reader: DirectoryReader, fd: int, name: bytes
    ) -> None:
        part = node.parts[0]
        if part.layer not in self._copied:
            source = reader.descriptor(Part(part.layer, split(part.path)[0]))
            os.link(
                split(part.path)[1], name,
                src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False,
            )  # fmt: skip
            return
        self._copier.copy(node, fd, node.path)

    def _finish(self, directory: TreeNode, fd: int) -> None:
        """Give a directory what its object has, and the mark of its origin."""
        self._copy_origin(directory, fd)
        self._copier.finish_directory(directory, fd)

    def _copy_origin(self, directory: TreeNode, fd: int) -> None:
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
