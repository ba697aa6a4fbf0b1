"""What the base had when a workspace first saw it, for each changed path; and conflicts.

The kernel tells nobody of a copy-up, so what a path was copied from is recorded at every
end of a run, look and commit. Before there is a record, times decide: the birth of the
upper inode is the moment of the copy-up; what was removed, or replaced by something that
was not copied from it, was there when the run began. Both clocks tick coarsely, so an
equal time counts as changed (spec WS11).
"""

from __future__ import annotations

import bisect
import hashlib
import os
import stat
from typing import TYPE_CHECKING

import msgspec

from supervisor.workspace.attributes import user_attributes
from supervisor.workspace.changes import Change, Row
from supervisor.workspace.layers import (
    LayeredTree,
    Node,
    Part,
    join,
    parents,
    split,
    with_parents,
)
from supervisor.workspace.linux import has_inode, read_birth_time_ns, read_file_handle
from supervisor.workspace.upper import has_pointer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_ORIGIN_HEADER_BYTES = 21
"""Of ``struct ovl_fb``: version, magic, length, flags, type, and 16 bytes of a UUID."""

_ORIGIN_TYPE_OFFSET = 4

_SETS_ATTRIBUTES = frozenset({Change.MODE, Change.RENAMED})
"""How a directory differs of which a commit sets what the base has."""


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """What the base had at a path.

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

    def is_still(self, now: Seen) -> bool:
        """Tell whether the base has this now; of that no text is kept yet."""
        ctime_ns = self.ctime_ns if self.kind == stat.S_IFDIR else now.ctime_ns
        are_known = bool(self.attributes and now.attributes)
        attributes = now.attributes if are_known else self.attributes
        known = msgspec.structs.replace(
            now, text=self.text, ctime_ns=ctime_ns, attributes=attributes
        )
        return known == self


NOTHING = Seen(0)
CHANGED = Seen(-1)
"""Of a path that is in conflict: the base never has this, so it stays in conflict."""

Record = dict[bytes, Seen]
_decoder = msgspec.msgpack.Decoder(Record)


class RecordUpdate(msgspec.Struct, frozen=True):
    """What of a record changes with a commit, besides the paths that it takes.

    Attributes:
        linked: other paths whose base object changes with it: hard links.
        contested: paths in conflict of which the workspace's side was chosen, or both.
        left: digests of what it leaves in directories that the workspace has no more.
        around: what was seen of the directories that it writes in, if a child runs.
    """

    linked: list[bytes] = []
    contested: list[bytes] = []
    left: dict[bytes, bytes] = {}
    around: dict[bytes, Seen] = {}


def load_record(data: bytes) -> Record:
    """Return a record that ``save_record`` wrote.

    Raises:
        msgspec.DecodeError: it is damaged.
    """
    return _decoder.decode(data)


def save_record(record: Record) -> bytes:
    """Return a record as bytes."""
    return msgspec.msgpack.encode(record)


def look_at_base(
    base: LayeredTree, row: Row, left_out: frozenset[bytes] = frozenset()
) -> Seen:
    """Return what the base has where a row's object comes from.

    Args:
        base: that has it.
        row: of a changed path.
        left_out: as of ``digest_inside``.
    """
    # A new object may stand where a directory was that was renamed: the base has it still.
    old = base.find(row.path) if row.change is Change.ADDED else row.old
    seen = seen_of(base, old, is_whole=_takes_all(row), left_out=left_out)
    if old is not None and old.is_directory and row.change in _SETS_ATTRIBUTES:
        attributes = digest_attributes(base, old)
        seen = msgspec.structs.replace(seen, attributes=attributes)
    if row.origin is None:
        return seen
    inside = _digest(base, row.replaced, left_out)
    return msgspec.structs.replace(seen, inside=inside, origin=row.origin)


def _digest(
    base: LayeredTree, node: Node | None, left_out: frozenset[bytes] = frozenset()
) -> bytes:
    """Return a digest of one of the base's objects, with all that is in it."""
    if node is None:
        return b""
    facts = seen_of(base, node, is_whole=True, left_out=left_out)
    data = msgspec.msgpack.encode(facts)
    return hashlib.blake2b(data, digest_size=16).digest()


def _takes_all(row: Row) -> bool:
    """Tell whether a commit of the row takes away all that is in the base's directory."""
    if row.old is None or not row.old.is_directory:
        return False
    return row.change is Change.DELETED or row.change is Change.TYPE


def _lacks(row: Row, seen: Seen | None) -> bool:
    """Tell whether a record does not say what a commit of the row would replace."""
    if seen is None or _is_of_another(row, seen):
        return True
    return seen != CHANGED and _takes_all(row) and not seen.inside


def _is_of_another(row: Row, seen: Seen) -> bool:
    """Tell whether a record is of what the path had before it was renamed there, or since."""
    return seen != CHANGED and seen.origin != (row.origin or b"")


def seen_of(
    base: LayeredTree,
    node: Node | None,
    *,
    is_whole: bool,
    left_out: frozenset[bytes] = frozenset(),
) -> Seen:
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
    return Seen(
        node.kind,
        status.st_dev,
        status.st_ino,
        0 if node.is_directory else status.st_ctime_ns,
        stat.S_IMODE(status.st_mode),
        digest_inside(base, node, left_out) if is_whole and node.is_directory else b"",
    )


def digest_inside(
    base: LayeredTree, directory: Node, left_out: frozenset[bytes] = frozenset()
) -> bytes:
    """Return a digest of what lies in a directory: names, inodes, sizes, times of content.

    Times of change do not count: a commit of another hard link moves them on.

    Args:
        base: that has it.
        directory: it.
        left_out: paths that do not count, nor what lies beneath.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, status in _walk(base, directory, left_out):
        facts = [status.st_dev, status.st_ino, status.st_mode]
        if not stat.S_ISDIR(status.st_mode):  # whose entries have facts of their own
            facts += [status.st_size, status.st_mtime_ns]
        inside = path[len(directory.path) :]
        digest.update(inside + b"\0" + repr(facts).encode() + b"\0")
    return digest.digest()


def digest_attributes(base: LayeredTree, directory: Node) -> bytes:
    """Return a digest of the extended attributes of one of the base's directories."""
    fd = base.open(directory.parts[0], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        facts = list(user_attributes(fd))
    finally:
        os.close(fd)
    return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16).digest()


def _walk(
    base: LayeredTree, directory: Node, left_out: frozenset[bytes] = frozenset()
) -> Iterable[tuple[bytes, os.stat_result]]:
    pending = [directory]
    while pending:
        with base.read(pending.pop()) as reader:
            for node in reader.entries():
                if node.path in left_out:
                    continue
                yield node.path, node.status
                if node.is_directory:
                    pending.append(node)


class Judge:
    """Decides whether the base has changed where a workspace has changed it.

    Args:
        base: the base alone.
        merged: the workspace's layers.
        record: what was seen.
        started_ns: when the run began of which there is no record yet.
        origins: handles of directories that stand for the base's, as of ``hidden``.
        is_running: a child has the workspace, and may still see what the base had.
    """

    def __init__(
        self,
        base: LayeredTree,
        merged: LayeredTree,
        record: Record,
        started_ns: int,
        origins: Mapping[bytes, bytes] | None = None,
        *,
        is_running: bool = False,
    ) -> None:
        self._base = base
        self._merged = merged
        self._record = record
        self._started_ns = started_ns
        self._origins = origins or {}
        self._is_running = is_running
        self._directories: dict[bytes, str] = {}
        self._handles: frozenset[bytes] | None = None
        self._paths: list[bytes] | None = None
        self._covers: dict[bytes, bool] = {}

    def conflict(self, row: Row) -> str:
        """Return why a row is in conflict; "" if it is not."""
        return self._conflict_at(row) or self._directory_conflict(row)

    def _conflict_at(self, row: Row) -> str:
        """Return why the base's object of a row is another one than was seen."""
        seen = self._record.get(row.path)
        if seen is None:
            return self._conflict_unrecorded(row)
        if _is_of_another(row, seen):
            is_still = self._is_still_at(row.path, seen)
            return self._conflict_unrecorded(row) if is_still else _CHANGED
        now = look_at_base(self._base, row)
        is_whole = row.change is Change.RENAMED or (seen.inside and now.inside)
        if not is_whole:  # what is inside has rows of its own
            now = msgspec.structs.replace(now, inside=seen.inside)
        if not seen.is_still(now):
            return _CHANGED if now.kind else "it was removed in the base"
        return self._conflict_unrecorded(row) if _lacks(row, seen) else ""

    def _is_still_at(self, path: bytes, seen: Seen) -> bool:
        """Tell whether the base has at a path what was seen there."""
        node = self._base.find(path)
        if seen.origin:
            return _digest(self._base, node) == seen.inside
        return seen.is_still(seen_of(self._base, node, is_whole=bool(seen.inside)))

    def update(self, rows: Sequence[Row]) -> Record:
        """Return the record with what it lacks, and without what is settled.

        Args:
            rows: all that was changed.
        """
        record = dict(self._record)
        for row in rows:
            if _lacks(row, record.get(row.path)):
                is_changed = self._conflict_at(row)
                record[row.path] = (
                    CHANGED if is_changed else look_at_base(self._base, row)
                )
        self._refresh(record, rows)
        return record

    def _refresh(self, record: Record, rows: Sequence[Row]) -> None:
        """Record anew what both sides have alike: the workspace sees it as it is now.

        A child that runs may not (spec WS3c): of that there is no record any more.
        """
        changed = with_parents(row.path for row in rows)
        apart = {row.path for row in rows if row.change is not Change.MODE}
        apart.update(row.origin for row in rows if row.origin is not None)
        for path, seen in self._record.items():
            if path in changed or not apart.isdisjoint((path, *parents(path))):
                continue
            node = self._base.find(path)
            now = seen_of(self._base, node, is_whole=bool(seen.inside))
            if seen.is_still(now):
                continue
            # The layer has attributes of its own still, which go by what was seen first.
            record[path] = msgspec.structs.replace(now, attributes=seen.attributes)
            if self._is_running:
                del record[path]  # times decide again

    def seen_text(self, row: Row) -> Seen | None:
        """Return what was seen of a file whose conflict a merge of its text can settle.

        Returns:
            None if no text is kept, or if more than the file is in conflict.
        """
        seen = self._record.get(row.path)
        if seen is None or not seen.text or not row.is_edit:
            return None
        around = self._merged.find(split(row.path)[0])
        place = Part(self._merged.base_layer, split(row.path)[0])
        if around is None or around.parts[-1] != place:
            return None  # made anew: without the layer's file the base's does not show
        return None if self._directory_conflict(row) else seen

    def strays(self, rows: Sequence[Row]) -> tuple[dict[bytes, bytes], list[bytes]]:
        """Return the paths of objects whose base object is not where it was.

        Returns:
            Directories that were renamed, by path where the base has another one now, or
            b""; and the paths of other files and directories.
        """
        base = self._merged.base_layer
        pointers = {
            node.path: node.parts[-1].path if node.parts[-1].layer == base else b""
            for node in self._upper_directories()
            if self._is_lost(node)
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

    def _upper_directories(self) -> Iterator[Node]:
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

    def _is_lost(self, node: Node) -> bool:
        """Tell whether a directory points to what the base has no more."""
        if not has_pointer(self._merged, node):
            return False
        part = node.parts[-1]
        if part.layer != self._merged.base_layer:
            return len(node.parts) == 1  # else it points into a sealed layer
        old = self._base.find(part.path)
        return old is None or not self._is_copied_from(node, old)

    def _is_stray(self, new: Node, old: Node | None) -> bool:
        if new.parts[0].layer != 0 or _lies_on_sealed(new, self._merged.base_layer):
            return False
        handle = self._origin_handle(new, new.parts[0])
        if handle is None:
            return False
        return old is None or _handle_of(self._base, old.parts[0]) not in {None, handle}

    def update_by_commit(
        self, chosen: Sequence[Row], rows: Sequence[Row]
    ) -> RecordUpdate:
        """Return what of the record changes with a commit.

        Args:
            chosen: what is committed.
            rows: all that was changed.
        """
        return RecordUpdate(
            self._linked_paths(chosen, rows),
            [row.path for row in chosen if self.conflict(row)],
            self._digests_left(chosen, rows),
            self._directories_around(chosen) if self._is_running else {},
        )

    def _linked_paths(self, chosen: Sequence[Row], rows: Sequence[Row]) -> list[bytes]:
        """Return the recorded paths whose base object changes with a commit.

        They are other hard links to what the commit replaces or removes: the number of
        links is part of an inode, so its time of change moves on.
        """
        touched = set()
        for row in chosen:
            if row.old is None or row.change is Change.RENAMED:
                continue
            touched.add((row.old.status.st_dev, row.old.status.st_ino))
            if _takes_all(row):
                inside = _walk(self._base, row.old)
                touched.update((one.st_dev, one.st_ino) for _, one in inside)
        taken = {row.path for row in chosen}
        linked = []
        for row in rows:
            seen = self._record.get(row.path)
            if row.path in taken or seen is None:
                continue
            is_touched = (seen.device, seen.inode) in touched
            if is_touched and seen.is_still(look_at_base(self._base, row)):
                linked.append(row.path)
        return linked

    def _digests_left(
        self, chosen: Sequence[Row], rows: Sequence[Row]
    ) -> dict[bytes, bytes]:
        """Return digests of what a commit leaves in directories that it takes a part of.

        Of those that the workspace has no more, and that are as they were seen.
        """
        places = [row.origin or (row.old.path if row.old else b"") for row in chosen]
        taken = frozenset(filter(None, places))
        committed = {row.path for row in chosen}
        found = {}
        for row in rows:
            seen = self._record.get(row.path)
            old = row.old if row.replaced is None else row.replaced
            if row.path in committed or seen is None or not seen.inside or old is None:
                continue
            if any(path.startswith(old.path + b"/") for path in taken):
                left = look_at_base(self._base, row, taken).inside
                # In this order what is changed meanwhile makes the record another one.
                if seen.is_still(look_at_base(self._base, row)):
                    found[row.path] = left
        return found

    def _directories_around(self, chosen: Sequence[Row]) -> dict[bytes, Seen]:
        """Return what was seen of the base's directories that a commit writes in."""
        around = {split(row.path)[0] for row in chosen}
        around.update(split(row.origin)[0] for row in chosen if row.origin is not None)
        found = {}
        for path in around:
            new = self._merged.find(path)
            if new is None or not new.is_directory:
                continue
            # Of one that was made here and committed the last part is not the base's.
            last = new.parts[-1]
            is_base = last.layer == self._merged.base_layer
            old = self._base.find(last.path if is_base else path)
            if old is not None and old.is_directory:
                # The mode as the child sees it: another one of the base has a row.
                mode = stat.S_IMODE(new.status.st_mode)
                status = old.status
                found[path] = Seen(old.kind, status.st_dev, status.st_ino, mode=mode)
        return found

    def _conflict_unrecorded(self, row: Row) -> str:
        """Return why a row without a record is in conflict; "" if it is not."""
        places = {path: _place_of(path, row) for path in parents(row.path)}
        if row.old is not None:
            places |= {path: path for path in parents(row.old.path)}
        for path, place in places.items():
            # The directory was removed in the workspace, and made anew since.
            seen = self._record.get(path)
            if seen is None:
                continue
            # A renamed directory has a row of its own.
            where = path if seen.origin else place
            if self._is_changed_inside(where, seen):
                return f"its directory {os.fsdecode(path)!r} was changed in the base"
        return (
            self._conflict_where_it_was(row)
            or self._conflict_inside(row)
            or self._conflict_by_times(row)
            or self._conflict_above(row)
        )

    def _conflict_above(self, row: Row) -> str:
        """Return why the base's directory, which the child does not see, is in conflict.

        The child has another directory of that name: what the operator brought into the
        base's one since the run began was never seen.
        """
        if row.old is None or row.change is Change.RENAMED:
            return ""
        for path in parents(row.path):
            if path not in self._covers:
                self._covers[path] = self._covers_changed(path)
            if self._covers[path]:
                return f"its directory {os.fsdecode(path)!r} was changed in the base"
        return ""

    def _covers_changed(self, path: bytes) -> bool:
        new, old = self._merged.find(path), self._base.find(path)
        if new is None or old is None:
            return False
        if any(part.layer == self._merged.base_layer for part in new.parts):
            return False
        return self._is_newer(path, old.status)

    def _conflict_inside(self, row: Row) -> str:
        """Return why something recorded in a directory that was removed is in conflict."""
        taken = row.old if _takes_all(row) else row.replaced
        # It may lie in a renamed directory, and what is in it was seen before or after.
        for path in () if taken is None else {row.path, taken.path}:
            if conflict := self._conflict_beneath(path):
                return conflict
        return ""

    def _conflict_beneath(self, directory: bytes) -> str:
        if self._paths is None:
            self._paths = sorted(self._record)
        first = directory + b"/"
        for path in self._paths[bisect.bisect(self._paths, first) :]:
            if not path.startswith(first):
                break
            seen = self._record[path]
            node = self._base.find(path)
            if node is None:
                continue  # nothing there that a removal could take
            if not self._is_still_at(path, seen):
                return f"{os.fsdecode(path)!r} in it was changed in the base"
        return ""

    def _conflict_where_it_was(self, row: Row) -> str:
        """Return why a row is in conflict by the record of where its object was."""
        if row.old is None or row.old.path == row.path:
            return ""
        seen = self._record.get(row.old.path)
        if seen is None:
            return ""
        now = seen_of(self._base, row.old, is_whole=bool(seen.inside))
        return "" if seen.is_still(now) else _CHANGED

    def _is_changed_inside(self, path: bytes, seen: Seen) -> bool:
        if seen == CHANGED:
            return True
        if seen.origin:
            return not self._is_still_at(path, seen)
        if not stat.S_ISDIR(seen.kind):
            return False
        now = seen_of(self._base, self._base.find(path), is_whole=bool(seen.inside))
        return (now.inode, now.inside) != (seen.inode, seen.inside)

    def _conflict_by_times(self, row: Row) -> str:
        old = row.old
        if row.change is Change.RENAMED:
            if not self._is_origin(row):
                return "its old directory is another one"
            return self._removal_conflict(row.replaced)
        if row.new is None:
            return self._removal_conflict(old)
        if old is None:
            return "it was removed in the base" if self._lost_origin(row.new) else ""
        if old.is_directory and not row.new.is_directory:
            return self._removal_conflict(old)
        seen_ns = self._started_ns
        if old.is_directory or self._is_copy(row.new, old):
            seen_ns = self._born_ns(row.new)
        is_seen = old.status.st_ctime_ns < seen_ns or self._is_recorded(old.path)
        return "" if is_seen else _CHANGED

    def _is_copy(self, new: Node, old: Node) -> bool:
        """Tell whether a file of the layer was copied from the base's one of now."""
        part = new.parts[0]
        if part.layer == self._merged.base_layer:
            return True
        if new.kind != stat.S_IFREG or self._merged.read_mark(part, b"origin") is None:
            return False
        handle = self._origin_handle(new, part)
        if handle is None:  # the layer does not say from which
            return True
        return _handle_of(self._base, old.parts[0]) in {None, handle}

    def _removal_conflict(self, old: Node | None) -> str:
        if old is None:
            return ""
        if not old.is_directory:
            return _CHANGED if self._is_newer(old.path, old.status) else ""
        for path, status in _walk(self._base, old):
            # What is made or removed in a directory changes the directory as well.
            if self._is_newer(path, status):
                return f"{os.fsdecode(path)!r} in it was changed in the base"
        return _CHANGED if self._is_newer(old.path, old.status) else ""

    def _is_newer(self, path: bytes, status: os.stat_result) -> bool:
        """Tell whether the base's object was changed since the run began, or its record.

        A commit of a child that goes on records what it has written.
        """
        if status.st_ctime_ns < self._started_ns:
            return False
        seen = self._record.get(path)
        if seen is None:
            return True
        if not self._is_still_at(path, seen):
            return True
        if seen.inside or not seen.ctime_ns:
            return False
        return seen.ctime_ns != status.st_ctime_ns

    def _is_recorded(self, path: bytes) -> bool:
        """Tell whether the base has at a path what a record says of it."""
        seen = self._record.get(path)
        return seen is not None and self._is_still_at(path, seen)

    def _born_ns(self, node: Node) -> int:
        """Return when an object came into the upper layer, in nanoseconds."""
        fd = self._merged.open(node.parts[0])
        try:
            born_ns = read_birth_time_ns(fd)
        finally:
            os.close(fd)
        # A file system that keeps no birth times: the run's beginning is earlier.
        return self._started_ns if born_ns is None else born_ns

    def _lost_origin(self, node: Node) -> bool:
        """Tell whether the base lacks what an object of the layer was copied from.

        A file that was renamed in the workspace has its origin at the old path.
        """
        handle = self._origin_handle(node, node.parts[0])
        if handle is None:
            return self._may_be_removed(node)
        is_there = self._has_inode(self._base, handle)
        if not is_there and self._merged.base_layer > 1:
            # It may come from a sealed layer.
            is_there = self._has_inode(self._merged, handle)
        if is_there is None:
            is_there = handle in self._handles_beneath()
        return not is_there

    def _may_be_removed(self, node: Node) -> bool:
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
        if around is None or around.status.st_ctime_ns < self._born_ns(node):
            return False
        return all(_facts(node) != _facts(other) for other in self._covered())

    def _is_marked_copy(self, node: Node) -> bool:
        """Tell whether the layer says that an object was copied, and not from what."""
        part = node.parts[0]
        if part.layer != 0 or node.kind not in {stat.S_IFREG, stat.S_IFDIR}:
            return False
        return self._merged.read_mark(part, b"origin") == b""

    def _has_inode(self, tree: LayeredTree, handle: bytes) -> bool | None:
        """Tell whether the file system of a tree's top has an inode; None: not known."""
        top = tree.open(tree.top().parts[0], os.O_RDONLY | os.O_DIRECTORY)
        try:
            return has_inode(top, handle)
        finally:
            os.close(top)

    def _handles_beneath(self) -> frozenset[bytes]:
        """Return the handles of what the base has where the layer has something.

        For an operator who may not ask for a handle: the layer has no redirects then.
        """
        if self._handles is None:
            found = set()
            for node in self._covered():
                found.add(_handle_of(self._base, node.parts[0]) or b"")
            for layer in range(1, self._merged.base_layer):
                for part in _parts_of(self._merged, layer):
                    found.add(_handle_of(self._merged, part) or b"")
            self._handles = frozenset(found)
        return self._handles

    def _covered(self) -> Iterator[Node]:
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
                    if node is not None and self._shows(node, below):
                        pending.append((node, below))
                        continue
                    for path, _ in _walk(self._base, below):
                        inside = self._base.find(path)
                        if inside is not None:
                            yield inside

    def _shows(self, node: Node, below: Node) -> bool:
        """Tell whether a merged directory shows what is in one of the base's."""
        last = node.parts[-1]
        is_base = last.layer == self._merged.base_layer
        return is_base and last.path == below.parts[0].path

    def _origin_handle(self, node: Node, part: Part) -> bytes | None:
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
        return self._origins.get(handle, handle)

    def _is_origin(self, row: Row) -> bool:
        """Tell whether the base has at a row's origin what was renamed there."""
        if row.origin is None or row.new is None:
            return False
        node = self._base.find(row.origin)
        if node is None or not node.is_directory:
            return False
        return len(row.new.parts) > 1 and self._is_copied_from(row.new, node)

    def _is_copied_from(self, new: Node, old: Node) -> bool:
        """Tell whether a merged directory was made over the base's one, as far as is told."""
        told = self._origin_handle(new, new.parts[-2])
        if told is None:
            return True
        return _handle_of(self._base, old.parts[0]) in {None, told}

    def _directory_conflict(self, row: Row) -> str:
        """Return why the directory that a path is in can't take it; "" if it can."""
        directory, _ = split(row.path)
        if directory not in self._directories:
            self._directories[directory] = self._changed_directory(directory)
        return self._directories[directory]

    def _changed_directory(self, directory: bytes) -> str:
        new = self._merged.find(directory)
        if new is None or new.parts[-1].layer != self._merged.base_layer:
            return ""  # made in the workspace, or removed there
        if len(new.parts) > 1 and new.parts[-1].path == directory:
            old = self._base.find(directory)
            if old is not None and not self._is_copied_from(new, old):
                return f"its directory {os.fsdecode(directory)!r} is another one"
        return ""


def _facts(node: Node) -> tuple[int, int, int]:
    """Return what a rename leaves as it was."""
    return node.kind, node.status.st_size, node.status.st_mtime_ns


def _place_of(directory: bytes, row: Row) -> bytes:
    """Return where the base has a directory above a row's path, which may be renamed."""
    inside = row.path[len(directory) :]
    if row.old is None or not row.old.path.endswith(inside):
        return directory
    return row.old.path[: -len(inside)]


def _lies_on_sealed(node: Node, base_layer: int) -> bool:
    """Tell whether the upper's part of a directory was copied from a sealed layer."""
    return len(node.parts) > 1 and node.parts[1].layer < base_layer


def _handle_of(tree: LayeredTree, part: Part) -> bytes | None:
    fd = tree.open(part)
    try:
        return read_file_handle(fd)
    finally:
        os.close(fd)


def _parts_of(tree: LayeredTree, layer: int) -> Iterator[Part]:
    """Yield all that one layer has."""
    pending = [b""]
    while pending:
        directory = pending.pop()
        fd = tree.open(Part(layer, directory), os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    part = Part(layer, join(directory, os.fsencode(entry.name)))
                    yield part
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(part.path)
        finally:
            os.close(fd)


_CHANGED = "it was changed in the base"
