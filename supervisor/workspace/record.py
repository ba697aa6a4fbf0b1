"""The base's object when a workspace first saw it, for each changed path.

The kernel reports no copy-up, so the source of a path is recorded at every end of a run,
look and commit. A workspace has a file of it, and one for each snapshot, which
is a link to the record of the moment; forks share both. Before an upper goes away, the
record without it is written as ``record.next``; it takes the record's place when the upper
has gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from typing import TYPE_CHECKING

import msgspec

from hostlib.linux.files import closing_fd
from supervisor.workspace.attributes import user_attributes
from supervisor.workspace.changes import Change, Row
from supervisor.workspace.layers import objects_beneath

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.workspace.directory import WorkspaceDirectory
    from supervisor.workspace.layers import LayeredTree, TreeNode

_SETS_ATTRIBUTES = frozenset({Change.MODE, Change.RENAMED})
"""Changes of a directory for which a commit sets its attributes in the base."""


class BaseObject(msgspec.Struct, frozen=True, array_like=True):
    """The base's object at a path.

    Attributes:
        kind: as of ``stat.S_IFMT``; 0 for nothing.
        device: of its file system.
        inode: its number there.
        ctime_ns: when it was last changed. Of a directory, which every new entry changes,
            when a commit last wrote in it while a child had the workspace; else 0.
        mode: permission bits.
        inside: of a directory that was removed, a digest of all that was in it; of one that
            was renamed, of what the base had at the new path; else b"".
        text: of a file, what names its content among the kept texts; b"" if it was not kept.
        origin: of a directory that was renamed, where the base has it: all but ``inside``
            is of that path.
        attributes: of a directory of which a commit sets the mode, or that it renames, a
            digest of its extended attributes; else, and in an older record, b"".
    """

    kind: int
    device: int = 0
    inode: int = 0
    ctime_ns: int = 0
    mode: int = 0
    inside: bytes = b""
    text: bytes = b""
    origin: bytes = b""
    attributes: bytes = b""

    def is_still(self, now: BaseObject) -> bool:
        """Tell whether the base has this now; of that no text is kept yet."""
        ctime_ns = self.ctime_ns if self.kind == stat.S_IFDIR else now.ctime_ns
        are_known = bool(self.attributes and now.attributes)
        attributes = now.attributes if are_known else self.attributes
        known = msgspec.structs.replace(
            now, text=self.text, ctime_ns=ctime_ns, attributes=attributes
        )
        return known == self


NOTHING = BaseObject(0)
CHANGED = BaseObject(-1)
"""Record of a path in conflict: the base never has this, so it stays in conflict."""

Record = dict[bytes, BaseObject]
_decoder = msgspec.msgpack.Decoder(Record)
_RECORD, _NEXT_RECORD = "record", "record.next"


class RecordUpdate(msgspec.Struct, frozen=True):
    """Changes of a record by a commit, besides the paths that it takes.

    Attributes:
        linked: other paths whose base object changes with it: hard links.
        contested: paths in conflict of which the workspace's side was chosen, or both.
        left: digests of what it leaves in directories that the workspace has no more.
        around: the record of the directories that it writes in, if a child runs.
    """

    linked: list[bytes] = []
    contested: list[bytes] = []
    left: dict[bytes, bytes] = {}
    around: dict[bytes, BaseObject] = {}


def look_at_base(
    base: LayeredTree, row: Row, left_out: frozenset[bytes] = frozenset()
) -> BaseObject:
    """Return what the base has where a row's object comes from."""
    # A new object may stand where a directory was that was renamed: the base has it still.
    old = base.find(row.path) if row.change is Change.ADDED else row.old
    seen = seen_of(base, old, is_whole=takes_all(row), left_out=left_out)
    if old is not None and old.is_directory and row.change in _SETS_ATTRIBUTES:
        attributes = digest_attributes(base, old)
        seen = msgspec.structs.replace(seen, attributes=attributes)
    if row.origin is None:
        return seen
    inside = digest_of(base, row.replaced, left_out)
    return msgspec.structs.replace(seen, inside=inside, origin=row.origin)


def seen_of(
    base: LayeredTree,
    node: TreeNode | None,
    *,
    is_whole: bool,
    left_out: frozenset[bytes] = frozenset(),
) -> BaseObject:
    """Return what is recorded of one of the base's objects.

    Args:
        base: that has it.
        node: the object; None for nothing.
        is_whole: with all that is in it, if it is a directory.
        left_out: as of ``digest_inside``.
    """
    if node is None:
        return NOTHING
    status = node.status
    return BaseObject(
        node.kind,
        status.st_dev,
        status.st_ino,
        0 if node.is_directory else status.st_ctime_ns,
        stat.S_IMODE(status.st_mode),
        digest_inside(base, node, left_out) if is_whole and node.is_directory else b"",
    )


def digest_of(
    base: LayeredTree, node: TreeNode | None, left_out: frozenset[bytes] = frozenset()
) -> bytes:
    """Return a digest of one of the base's objects, with all that is in it."""
    if node is None:
        return b""
    facts = seen_of(base, node, is_whole=True, left_out=left_out)
    data = msgspec.msgpack.encode(facts)
    return hashlib.blake2b(data, digest_size=16).digest()


def digest_inside(
    base: LayeredTree, directory: TreeNode, left_out: frozenset[bytes] = frozenset()
) -> bytes:
    """Return a digest of what lies in a directory: names, inodes, sizes, times.

    The times are those of content. Times of change do not count: a commit of another hard
    link moves them on.

    Args:
        base: that has it.
        directory: it.
        left_out: paths that do not count, nor what lies beneath.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, node in objects_beneath(base, directory, directory.path, left_out):
        status = node.status
        facts = [status.st_dev, status.st_ino, status.st_mode]
        if not stat.S_ISDIR(status.st_mode):  # whose entries have facts of their own
            facts += [status.st_size, status.st_mtime_ns]
        inside = path[len(directory.path) :]
        digest.update(inside + b"\0" + repr(facts).encode() + b"\0")
    return digest.digest()


def digest_attributes(base: LayeredTree, directory: TreeNode) -> bytes:
    """Return a digest of the extended attributes of one of the base's directories."""
    with closing_fd(base.open_node(directory)) as fd:
        facts = list(user_attributes(fd))
    return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16).digest()


def takes_all(row: Row) -> bool:
    """Tell whether a commit of the row takes away all that is in the base's directory."""
    if row.old is None or not row.old.is_directory:
        return False
    return row.change is Change.DELETED or row.change is Change.TYPE


class RecordFiles:
    """The records of one workspace."""

    def __init__(self, directory: WorkspaceDirectory) -> None:
        self._directory = directory

    def load(self) -> Record:
        """Return what the base had when the workspace first saw it."""
        return self._load(_RECORD) or {}

    def save(self, record: Record) -> None:
        """Keep what the base had."""
        self._directory.write(_RECORD, msgspec.msgpack.encode(record))

    def load_for(self, label: str) -> Record | None:
        """Return what was seen when a snapshot was taken; None if nothing was kept."""
        return self._load(_name_for(label))

    def keep_for(self, label: str, record: Record | None) -> None:
        """Keep what was seen when a snapshot was taken.

        Args:
            label: of the snapshot.
            record: of that time; None for the present one.
        """
        name = _name_for(label)
        self._directory.write(
            name, None if record is None else msgspec.msgpack.encode(record)
        )
        if record is None:
            own = self._directory.fd
            with contextlib.suppress(FileNotFoundError):
                os.link(_RECORD, name, src_dir_fd=own, dst_dir_fd=own)

    def drop_for(self, label: str) -> None:
        """Remove what was seen when a snapshot was taken."""
        self._directory.write(_name_for(label), None)

    def save_next(self, record: Record | None) -> None:
        """Keep what is seen once the upper has gone; None if that is what the record says."""
        data = None if record is None else msgspec.msgpack.encode(record)
        self._directory.write(_NEXT_RECORD, data)

    def take_next(self) -> bool:
        """Put the next record in the place of the record; tell whether there was one."""
        own = self._directory.fd
        try:
            os.rename(_NEXT_RECORD, _RECORD, src_dir_fd=own, dst_dir_fd=own)
        except FileNotFoundError:
            return False
        return True

    def links_for_fork(
        self, labels: Iterable[str], record: Record | None
    ) -> dict[str, str]:
        """Return the files that a fork shares: name in the fork -> name here.

        Args:
            labels: of the snapshots.
            record: of the fork; None for the one here.
        """
        links = {name: name for name in map(_name_for, labels)}
        if record is None:
            return links | {_RECORD: _RECORD}
        self.save_next(record)
        return links | {_RECORD: _NEXT_RECORD}

    def texts_named(self, labels: Iterable[str]) -> set[bytes]:
        """Return what names the kept texts, in the record and those of some snapshots."""
        found: set[bytes] = set()
        for name in (_RECORD, _NEXT_RECORD, *map(_name_for, labels)):
            record = self._load(name) or {}
            found.update(seen.text for seen in record.values())
        return found

    def _load(self, name: str) -> Record | None:
        data = self._directory.read(name)
        return None if data is None else _decoder.decode(data)


def _name_for(label: str) -> str:
    """Return the file that keeps what was seen when a snapshot was taken."""
    return f"seen-{label}"
