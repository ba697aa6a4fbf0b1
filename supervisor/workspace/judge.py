"""Conflicts: the base has changed where a workspace has changed it as well.

The first that holds is the reason:
 1. The base has not what the record of the path says.
 2. There is no record of what a commit would replace, and (a) a directory above was made
    anew, and is not as recorded, (b) where the object was is not as recorded, (c) something
    in what goes is not as recorded, (d) times say so, (e) so do those of a directory above.
 3. The directory that the path is in is another one.
Times: the birth of the upper inode is the moment of the copy-up; a path that was removed, or
replaced without one, is of the time when the run began. Both clocks tick coarsely, so an
equal time counts as changed (spec WS11).
"""

from __future__ import annotations

import bisect
import os
import stat
from typing import TYPE_CHECKING

import msgspec

from supervisor.workspace.changes import Change, Row
from supervisor.workspace.layers import (
    LayeredTree,
    TreeNode,
    is_beneath,
    objects_beneath,
    parents,
    split,
    with_parents,
)
from supervisor.workspace.record import (
    CHANGED,
    BaseObject,
    Record,
    RecordUpdate,
    digest_of,
    look_at_base,
    seen_of,
    takes_all,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.workspace.origins import Origins

_CHANGED = "it was changed in the base"


class Judge:
    """Decides whether the base has changed where a workspace has changed it.

    Args:
        started_ns: when the run began of which there is no record yet.
        is_running: a child has the workspace, and may still see what the base had.
    """

    def __init__(
        self,
        base: LayeredTree,
        merged: LayeredTree,
        record: Record,
        started_ns: int,
        origins: Origins,
        *,
        is_running: bool = False,
    ) -> None:
        self._base = base
        self._merged = merged
        self._record = record
        self._started_ns = started_ns
        self._origins = origins
        self._is_running = is_running
        self._directories: dict[bytes, str] = {}
        self._paths: list[bytes] | None = None
        self._covers: dict[bytes, bool] = {}

    def conflict(self, row: Row) -> str:
        """Return why a row is in conflict; "" if it is not: the rules in their order."""
        return self._conflict_at(row) or self._directory_conflict(row)

    def _conflict_at(self, row: Row) -> str:
        """Return why the base's object of a row is not what was seen (rules 1 and 2)."""
        seen = self._record.get(row.path)
        if seen is None:
            return self._conflict_unrecorded(row)
        if _is_of_another(row, seen):
            is_still = self._is_still_at(row.path, seen)
            return self._conflict_unrecorded(row) if is_still else _CHANGED
        now = look_at_base(self._base, row)
        is_whole = row.change is Change.RENAMED or (seen.inside and now.inside)
        if not is_whole:  # its content has rows of its own
            now = msgspec.structs.replace(now, inside=seen.inside)
        if not seen.is_still(now):
            return _CHANGED if now.kind else "it was removed in the base"
        return self._conflict_unrecorded(row) if _lacks(row, seen) else ""

    def _is_still_at(self, path: bytes, seen: BaseObject) -> bool:
        """Tell whether the base has at a path what was seen there."""
        node = self._base.find(path)
        if seen.origin:
            return digest_of(self._base, node) == seen.inside
        return seen.is_still(seen_of(self._base, node, is_whole=bool(seen.inside)))

    def update(self, rows: Sequence[Row]) -> Record:
        """Return the record with what it lacks, and without what is settled."""
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

    def seen_text(self, row: Row) -> BaseObject | None:
        """Return what was seen of a file whose conflict a merge of its text can settle.

        Returns:
            None if no text is kept, or if more than the file is in conflict.
        """
        seen = self._record.get(row.path)
        if seen is None or not seen.text or not row.is_edit:
            return None
        directory, _ = split(row.path)
        around = self._merged.find(directory)
        if around is None or self._merged.base_path(around) != directory:
            return None  # made anew: without the layer's file the base's does not show
        return None if self._directory_conflict(row) else seen

    def update_by_commit(
        self, chosen: Sequence[Row], rows: Sequence[Row]
    ) -> RecordUpdate:
        """Return what of the record changes with a commit."""
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
            if takes_all(row):
                for _, node in objects_beneath(self._base, row.old, row.old.path):
                    touched.add((node.status.st_dev, node.status.st_ino))
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
            if any(is_beneath(path, old.path) for path in taken):
                left = look_at_base(self._base, row, taken).inside
                # In this order what is changed meanwhile makes the record another one.
                if seen.is_still(look_at_base(self._base, row)):
                    found[row.path] = left
        return found

    def _directories_around(self, chosen: Sequence[Row]) -> dict[bytes, BaseObject]:
        """Return what was seen of the base's directories that a commit writes in."""
        around = {split(row.path)[0] for row in chosen}
        around.update(split(row.origin)[0] for row in chosen if row.origin is not None)
        found = {}
        for path in around:
            new = self._merged.find(path)
            if new is None or not new.is_directory:
                continue
            # Of one that was made here and committed the last part is not the base's.
            place = self._merged.base_path(new)
            old = self._base.find(path if place is None else place)
            if old is not None and old.is_directory:
                # The mode as the child sees it: another one of the base has a row.
                mode = stat.S_IMODE(new.status.st_mode)
                status = old.status
                found[path] = BaseObject(
                    old.kind, status.st_dev, status.st_ino, mode=mode
                )
        return found

    def _conflict_unrecorded(self, row: Row) -> str:
        """Return why a row without a record is in conflict: rule 2, from (a) to (e)."""
        return (
            self._conflict_made_anew(row)
            or self._conflict_where_it_was(row)
            or self._conflict_inside(row)
            or self._conflict_by_times(row)
            or self._conflict_above(row)
        )

    def _conflict_made_anew(self, row: Row) -> str:
        """Return why a directory that was removed, and made anew since, is in conflict."""
        places = {path: _place_of(path, row) for path in parents(row.path)}
        if row.old is not None:
            places |= {path: path for path in parents(row.old.path)}
        for path, place in places.items():
            seen = self._record.get(path)
            if seen is None:
                continue
            # A renamed directory has a row of its own.
            where = path if seen.origin else place
            if self._is_changed_inside(where, seen):
                return f"its directory {os.fsdecode(path)!r} was changed in the base"
        return ""

    def _is_changed_inside(self, path: bytes, seen: BaseObject) -> bool:
        if seen == CHANGED:
            return True
        if seen.origin:
            return not self._is_still_at(path, seen)
        if not stat.S_ISDIR(seen.kind):
            return False
        now = seen_of(self._base, self._base.find(path), is_whole=bool(seen.inside))
        return (now.inode, now.inside) != (seen.inode, seen.inside)

    def _conflict_where_it_was(self, row: Row) -> str:
        """Return why a row is in conflict by the record of where its object was."""
        if row.old is None or row.old.path == row.path:
            return ""
        seen = self._record.get(row.old.path)
        if seen is None:
            return ""
        now = seen_of(self._base, row.old, is_whole=bool(seen.inside))
        return "" if seen.is_still(now) else _CHANGED

    def _conflict_inside(self, row: Row) -> str:
        """Return why something recorded in a directory that was removed is in conflict."""
        taken = row.old if takes_all(row) else row.replaced
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

    def _conflict_by_times(self, row: Row) -> str:
        old = row.old
        if row.change is Change.RENAMED:
            if not self._origins.has_origin(row):
                return "its old directory is another one"
            return self._removal_conflict(row.replaced)
        if row.new is None:
            return self._removal_conflict(old)
        if old is None:
            return (
                "it was removed in the base"
                if self._origins.has_lost_origin(row.new)
                else ""
            )
        if old.is_directory and not row.new.is_directory:
            return self._removal_conflict(old)
        seen_ns = self._started_ns
        if old.is_directory or self._origins.is_copy(row.new, old):
            seen_ns = self._origins.born_ns(row.new)
        is_seen = old.status.st_ctime_ns < seen_ns or self._is_recorded(old.path)
        return "" if is_seen else _CHANGED

    def _removal_conflict(self, old: TreeNode | None) -> str:
        if old is None:
            return ""
        if not old.is_directory:
            return _CHANGED if self._is_newer(old.path, old.status) else ""
        for path, node in objects_beneath(self._base, old, old.path):
            # An entry that is made or removed in a directory changes the directory as
            # well.
            if self._is_newer(path, node.status):
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

    def _conflict_above(self, row: Row) -> str:
        """Return why the base's directory, which the child does not see, is in conflict.

        The child has another directory of that name: it never saw the operator's changes in
        the base's one since the run began.
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

    def _directory_conflict(self, row: Row) -> str:
        """Return why the directory that a path is in can't take it (rule 3)."""
        directory, _ = split(row.path)
        if directory not in self._directories:
            self._directories[directory] = self._changed_directory(directory)
        return self._directories[directory]

    def _changed_directory(self, directory: bytes) -> str:
        new = self._merged.find(directory)
        place = None if new is None else self._merged.base_path(new)
        if new is None or place is None:
            return ""  # made in the workspace, or removed there
        if len(new.parts) > 1 and place == directory:
            old = self._base.find(directory)
            if old is not None and not self._origins.is_copied_from(new, old):
                return f"its directory {os.fsdecode(directory)!r} is another one"
        return ""


def _lacks(row: Row, seen: BaseObject | None) -> bool:
    """Tell whether a record does not say what a commit of the row would replace."""
    if seen is None or _is_of_another(row, seen):
        return True
    return seen != CHANGED and takes_all(row) and not seen.inside


def _is_of_another(row: Row, seen: BaseObject) -> bool:
    """Tell whether a record is of what the path had before a rename, or since."""
    return seen != CHANGED and seen.origin != (row.origin or b"")


def _place_of(directory: bytes, row: Row) -> bytes:
    """Return where the base has a directory above a row's path, which may be renamed."""
    inside = row.path[len(directory) :]
    if row.old is None or not row.old.path.endswith(inside):
        return directory
    return row.old.path[: -len(inside)]
