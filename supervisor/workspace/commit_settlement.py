"""The settlement of a commit, applied or undone: its layer and record follow.

An applied change leaves the layer and is recorded as seen. A layer that a child has
mounted is not changed from outside, so there the paths are left for later: they leave
it when no child has the workspace.

Spec WS11, WS12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.workspace.changes import compare
from supervisor.workspace.commit_journal import (
    CommitJournal,
    SetAttributes,
    SetTimes,
    Take,
    identity_of,
    takes_directory,
)
from supervisor.workspace.layers import (
    LayeredTree,
    TreeNode,
    is_beneath,
    join,
    split,
    with_parents,
)
from supervisor.workspace.record import (
    CHANGED,
    NOTHING,
    BaseObject,
    Record,
    digest_attributes,
    look_at_base,
    seen_of,
)
from supervisor.workspace.upper import (
    mark_opaque,
    put_whiteouts,
    remove_committed,
    remove_merged,
    unmark_opaque,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from supervisor.workspace.held_workspace import HeldWorkspace, Trees

_LATER = "committed-in-use"
"""Paths that are to leave the layer when no child has it, in the workspace's directory.

They were committed while a child had it; or that was undone, and a whiteout hides nothing.
"""


def settle(held: HeldWorkspace, trees: Trees, journal: CommitJournal) -> None:
    """Take what was applied from the layer, and record it as seen."""
    if journal.state == "undone":
        if journal.is_in_use:
            _restore_marks(held, trees, journal)
            _leave_for_later(held, _hiding_nothing(trees, journal))
        _settle_undone(held, trees, journal)
        return
    paths = list(dict.fromkeys(step.path for step in journal.steps))
    if held.directory.user():  # a mounted layer is not to be changed from outside
        _leave_for_later(held, paths)
    else:
        tops = (trees.upper_fd, trees.base_fd)
        remove_merged(trees.upper_fd, journal.merged)
        moved = [
            step.goes_to
            for step in journal.steps
            if isinstance(step, Take) and step.goes_to is not None
        ]
        remove_committed(*tops, held.state.marks, paths, journal.dropped, moved)
    record = held.records.load()
    record_applied(record, trees, journal, paths)
    _forget_gone(record, trees.base, journal)
    _record_above(record, trees, paths)
    _record_left(record, journal.update.left)
    _record_around(record, trees.base, journal.update.around)
    linked = journal.update.linked
    for row in compare(trees.base, trees.merged) if linked else ():
        if row.path in linked:
            record[row.path] = look_at_base(trees.base, row)
    held.records.save(record)


def prune_later(held: HeldWorkspace) -> None:
    """Take from the layer what it needs no more, of commits while a child had it."""
    later = _read_left_paths(held)
    if not later or held.directory.user():
        return
    if held.state.layers:
        # Paths that were left are sealed in these, and the marks that hide them above
        # have to stay.
        held.directory.write(_LATER, None)
        return
    with held.trees() as trees:
        # A path that has changed again is needed, and so are the marks of the
        # directories above it: something may have been removed there since.
        rows = compare(trees.base, trees.merged)
        changed = with_parents(row.path for row in rows)
        paths = [path for path in later if path not in changed]
        remove_committed(trees.upper_fd, trees.base_fd, held.state.marks, paths)
    left = [path for path in later if path in changed]
    held.directory.write(_LATER, msgspec.msgpack.encode(left) if left else None)


def _read_left_paths(held: HeldWorkspace) -> list[bytes]:
    """Return the paths that were committed while a child had the layer."""
    data = held.directory.read(_LATER)
    return [] if data is None else msgspec.msgpack.decode(data, type=list[bytes])


def _leave_for_later(held: HeldWorkspace, paths: Sequence[bytes]) -> None:
    """Have paths leave the layer when no child has it."""
    if paths:
        later = dict.fromkeys((*_read_left_paths(held), *paths))
        held.directory.write(_LATER, msgspec.msgpack.encode(list(later)))


def _settle_undone(held: HeldWorkspace, trees: Trees, journal: CommitJournal) -> None:
    """Record the times of what was moved and brought back: the moves changed them."""
    record = held.records.load()
    times_ns: dict[tuple[int, int], int] = {}
    for step in journal.steps:
        if isinstance(step, SetTimes | SetAttributes):
            continue  # of a directory
        expected = step.expected
        node = trees.base.find(journal.old_path(step.path))
        if expected is None or node is None or node.is_directory:
            continue
        if identity_of(node.status) == expected:
            key = (expected.device, expected.inode)
            times_ns[key] = node.status.st_ctime_ns
    for path in journal.update.contested:
        seen = record.get(path, NOTHING)
        times_ns.pop((seen.device, seen.inode), None)
    for path, seen in record.items():
        time_ns = times_ns.get((seen.device, seen.inode))
        if time_ns is not None:
            record[path] = msgspec.structs.replace(seen, ctime_ns=time_ns)
    _record_around(record, trees.base, journal.update.around)
    held.records.save(record)


def _restore_marks(held: HeldWorkspace, trees: Trees, journal: CommitJournal) -> None:
    """Let a layer show again what it does over the base without the commit.

    A path that the child removed stays removed: where it made something anew, or made
    and removed it, while the base had nothing there, it has marked nothing.
    """
    put = journal.put_paths()
    missing = [path for path in put if trees.base.find(path) is None]
    unmark_opaque(trees.upper_fd, held.state.marks, missing)
    taken = {step.path for step in journal.steps if isinstance(step, Take)}
    places = _places_of(trees.merged, taken)
    mark_opaque(trees.upper_fd, held.state.marks, places)
    shown = [path for path in places if _shows_any(trees.merged, path, taken)]
    put_whiteouts(trees.upper_fd, shown)


def _places_of(merged: LayeredTree, paths: Collection[bytes]) -> list[bytes]:
    """Return where the layer would show paths of the base: directories may be moved."""
    names: dict[bytes, list[bytes]] = {}
    for path in paths:
        directory, name = split(path)
        names.setdefault(directory, []).append(name)
    found: list[bytes] = []
    pending = [merged.top()]
    while pending:
        node = pending.pop()
        of_base = merged.base_path(node)
        if of_base is not None:
            found += (join(node.path, name) for name in names.get(of_base, ()))
        with merged.read(node) as reader:
            inner = map(reader.look_up, reader.names_above_base())
            pending += (one for one in inner if one is not None and one.is_directory)
    return found


def _shows_any(merged: LayeredTree, path: bytes, of_base: Collection[bytes]) -> bool:
    """Tell whether a path shows one of some objects of the base, and of no layer."""
    node = merged.find(path)
    if node is None:
        return False
    part = node.parts[0]
    return part.layer == merged.base_layer and part.path in of_base


def _hiding_nothing(trees: Trees, journal: CommitJournal) -> list[bytes]:
    """Return where a child may have hidden what a commit, now undone, had in the base."""
    missing = [path for path in journal.put_paths() if trees.base.find(path) is None]
    nodes = ((path, trees.merged.find(path)) for path in missing)
    return [path for path, node in nodes if node is None or node.is_directory]


def record_applied(
    record: Record,
    trees: Trees,
    journal: CommitJournal,
    paths: Sequence[bytes],
) -> None:
    """Record what a commit has written of what the layer still has."""
    written = {one.path for one in journal.steps if not isinstance(one, Take)}
    for path in paths:
        record.pop(path, None)
        node = trees.merged.find(path)
        if node is not None and node.parts[0].layer == 0:
            old = trees.base.find(path)
            record[path] = seen_of(trees.base, old, is_whole=False)
            if old is not None and old.is_directory:
                record[path] = msgspec.structs.replace(
                    _written_in(record[path], old),
                    attributes=digest_attributes(trees.base, old),
                )
            is_edited = path in written and not _has_facts_of(old, node)
            if is_edited or path in journal.merged:
                # The layer lacks what the base has.
                record[path] = CHANGED


def _has_facts_of(old: TreeNode | None, new: TreeNode) -> bool:
    """Tell whether the base's object is what was put there, and was not changed since."""
    if old is None or old.status.st_mode != new.status.st_mode:
        return False
    facts = [(one.status.st_size, one.status.st_mtime_ns) for one in (old, new)]
    return new.is_directory or facts[0] == facts[1]


def _written_in(seen: BaseObject, directory: TreeNode) -> BaseObject:
    """Return what is seen of a directory that a commit has written in."""
    return msgspec.structs.replace(seen, ctime_ns=directory.status.st_ctime_ns)


def _forget_gone(record: Record, base: LayeredTree, journal: CommitJournal) -> None:
    """Take from a record what went with a directory that a commit has taken away."""
    gone = tuple(step.path + b"/" for step in journal.steps if takes_directory(step))
    for path in [path for path in record if path.startswith(gone)]:
        if base.find(path) is None:
            del record[path]


def _record_above(record: Record, trees: Trees, paths: Sequence[bytes]) -> None:
    """Record anew the directories that were made anew: a commit made the new ones.

    The operator's changes have rows of their own: such a directory shows nothing of the
    base.
    """
    for path in with_parents(paths).difference(paths) & record.keys():
        node, seen = trees.base.find(path), record[path]
        new = trees.merged.find(path)
        if not seen.inside or node is None or new is None or not new.is_directory:
            continue
        if node.status.st_ino == seen.inode:
            record[path] = seen_of(trees.base, node, is_whole=True)


def _record_left(record: Record, left: Mapping[bytes, bytes]) -> None:
    """Record what a commit has left in directories that the workspace has no more."""
    for path, inside in left.items():
        if path not in record:
            continue
        record[path] = msgspec.structs.replace(record[path], inside=inside)
        # The record of a directory in it is a part of that.
        for other in [other for other in record if is_beneath(other, path)]:
            if record[other].inside:
                del record[other]


def _record_around(
    record: Record, base: LayeredTree, around: Mapping[bytes, BaseObject]
) -> None:
    """Record when a commit has written in directories, of which a child has the layer."""
    for path, seen in around.items():
        old = base.find(path)
        known = record.setdefault(path, seen)
        if old is not None and (known.kind, known.inode) == (seen.kind, seen.inode):
            record[path] = _written_in(known, old)
