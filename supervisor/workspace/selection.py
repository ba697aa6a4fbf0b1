"""Which changes a commit takes, and which it takes only if they are named.

Guarded paths are run or trusted later by the operator's own tools; so are objects that
can do harm by what they are: set-user-ID files, devices, links that lead out, and what
has attributes that the kernel would take for marks of overlayfs (spec WS6, WS13).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pathspec import GitIgnoreSpec

from supervisor.workspace.changes import Change, Row
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.layers import is_beneath, objects_beneath, parents, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from supervisor.workspace.layers import LayeredTree, TreeNode


class Patterns:
    """Patterns in gitignore's form, relative to the top of a workspace.

    Raises:
        ValueError: one is none.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(patterns)
        self._whole = _compile(self._patterns)
        self._single = tuple((text, _compile([text])) for text in self._patterns)

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def match(self, path: bytes, *, is_directory: bool = False) -> bool:
        """Tell whether a path is named, itself or by a directory above it."""
        return self._whole.match_file(_text(path, is_directory=is_directory))

    def unmatched(self, paths: Sequence[tuple[bytes, bool]]) -> list[str]:
        """Return the patterns that name none of some (path, is it a directory)."""
        texts = [_text(path, is_directory=is_dir) for path, is_dir in paths]
        return [
            pattern
            for pattern, spec in self._single
            if not any(spec.match_file(text) for text in texts)
        ]


class Guard:
    """The patterns of what a commit takes only if it is allowed by name.

    A link guards as what it stands for does: in place of ``.github`` it could lead to
    workflows under another name. A directory itself holds nothing that is run.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._objects = Patterns(patterns)
        self._links = Patterns(
            dict.fromkeys(part for text in patterns for part in _leading(text))
        )

    def match(self, path: bytes, node: TreeNode) -> bool:
        """Tell whether an object at a path is guarded."""
        if self._objects.match(path):
            return True
        if node.is_directory:
            return False
        is_git_link = split(path)[1] == b".git"
        is_link = stat.S_ISLNK(node.status.st_mode)
        return is_git_link or (is_link and self._links.match(path))


def _leading(pattern: str) -> Iterable[str]:
    """Yield the patterns of the directories that a pattern goes through."""
    parts = pattern.split("/")
    for end in range(1, len(parts)):
        if parts[end - 1] not in {"", "**"}:
            yield (
                "/".join(parts[:end])
                if "**" in parts[:end]
                else ("/" + "/".join(parts[:end]).lstrip("/"))
            )


def _compile(patterns: Sequence[str]) -> GitIgnoreSpec:
    # The other engines take UTF-8 alone, and names are bytes.
    return GitIgnoreSpec.from_lines(patterns, backend="simple")


def _text(path: bytes, *, is_directory: bool) -> str:
    return os.fsdecode(path) + ("/" if is_directory else "")


@dataclass(frozen=True, slots=True)
class CommitSelection:
    """The choice of a commit: the paths that it is asked to take.

    Attributes:
        only: the paths that it takes; all if there is no pattern.
        but: the paths that it leaves.
        allow: guarded paths that it takes all the same.
        theirs: where the workspace's side wins a conflict.
        mine: where the base's side wins: the workspace's change is dropped.
        skips_conflicts: paths in conflict stay in the workspace.
        merges: text that both sides changed gets the changes of both.
    """

    only: Patterns = field(default_factory=lambda: Patterns(()))
    but: Patterns = field(default_factory=lambda: Patterns(()))
    allow: Patterns = field(default_factory=lambda: Patterns(()))
    theirs: Patterns = field(default_factory=lambda: Patterns(()))
    mine: Patterns = field(default_factory=lambda: Patterns(()))
    skips_conflicts: bool = False
    merges: bool = False

    def takes(self, path: bytes, *, is_directory: bool) -> bool:
        """Tell whether a path is chosen."""
        if self.only and not self.only.match(path, is_directory=is_directory):
            return False
        return not self.but.match(path, is_directory=is_directory)


class NoMatchError(WorkspaceError):
    """Patterns name nothing that was changed."""

    def __init__(self, verb: str, pattern: str) -> None:
        text = f"cannot {verb} {pattern!r}: no changed path is named so"
        super().__init__(f"{text}; see 'sandhost workspace diff --name-only'")


def check_matches(
    patterns: Sequence[Patterns], rows: Sequence[Row], base: LayeredTree
) -> None:
    """Refuse patterns that name nothing.

    Raises:
        NoMatchError: there is one.
    """
    paths = list(changed_paths(rows, base)) if any(patterns) else []
    for some in patterns:
        unmatched = some.unmatched(paths)
        if unmatched:
            raise NoMatchError("choose", unmatched[0])


def choose_rows(
    rows: Sequence[Row], selection: CommitSelection, base: LayeredTree
) -> list[Row]:
    """Return the rows that a selection takes, with what they cannot be without.

    A new directory comes along with what is in it; a renamed directory with what its
    move takes it out of. Of a deleted directory a part may be chosen: the row is replaced
    by rows of that part.
    """
    chosen: dict[bytes, Row] = {}
    moved = origins_of(rows)
    for row in rows:
        for part in _parts_chosen(row, selection, base, moved):
            chosen[part.path] = part
    by_path = {row.path: row for row in rows}
    renames = [row for row in rows if row.origin is not None]
    pending = list(chosen.values())
    while pending:
        row = pending.pop()
        for needed in (
            *_above(row, by_path),
            *_find_taken_along(row, by_path, renames),
        ):
            if needed.path not in chosen:
                chosen[needed.path] = needed
                pending.append(needed)
    return sorted(chosen.values(), key=lambda row: row.path)


def changed_paths(
    rows: Sequence[Row], base: LayeredTree
) -> Iterable[tuple[bytes, bool]]:
    """Yield (path, is it a directory) of all that was changed, each deleted thing too."""
    moved = origins_of(rows)
    for row in rows:
        is_directory = row.node.is_directory
        yield row.path, is_directory
        if row.new is None and is_directory:
            for path, inside in objects_beneath(base, row.node, row.path, moved):
                yield path, inside.is_directory


def _parts_chosen(
    row: Row, selection: CommitSelection, base: LayeredTree, moved: frozenset[bytes]
) -> Iterable[Row]:
    is_directory = row.node.is_directory
    if row.change is not Change.DELETED or not is_directory or row.old is None:
        if selection.takes(row.path, is_directory=is_directory):
            yield row
        return
    if not selection.but and selection.takes(row.path, is_directory=True):
        yield row
        return
    inside = list(objects_beneath(base, row.old, row.path, moved))
    everything = [(row.path, row.old), *inside]
    if all(selection.takes(p, is_directory=n.is_directory) for p, n in everything):
        yield row
        return
    for path, node in inside:
        if not node.is_directory and selection.takes(path, is_directory=False):
            yield Row(path, Change.DELETED, None, node)


def origins_of(rows: Iterable[Row]) -> frozenset[bytes]:
    """Return where the renamed directories of rows are in the base."""
    return frozenset(row.origin for row in rows if row.origin is not None)


def _above(row: Row, by_path: dict[bytes, Row]) -> Iterable[Row]:
    """Yield the rows of new and renamed directories that a path lies in."""
    for path in parents(row.path):
        above = by_path.get(path)
        # A part of a deleted directory does not take the whole along.
        if above is not None and above.change not in {Change.MODE, Change.DELETED}:
            yield above


def _find_taken_along(
    row: Row, by_path: dict[bytes, Row], renames: Sequence[Row]
) -> Iterable[Row]:
    """Yield the rows of directories that have to be moved before a row is applied.

    They were moved out of what the row takes away, or away from where it puts something.
    """
    place = _base_path(row.path, by_path)
    gone = place if row.origin is None else row.origin
    for rename in renames:
        if rename.origin is None or rename is row:
            continue
        takes = row.change not in {Change.ADDED, Change.MODIFIED, Change.MODE}
        is_within = takes and is_beneath(rename.origin, gone)
        if is_within or rename.origin == place:
            yield rename


def _base_path(path: bytes, by_path: dict[bytes, Row]) -> bytes:
    """Return where the base has a path, whose directories may be renamed ones."""
    for directory in parents(path):
        above = by_path.get(directory)
        if above is not None and above.origin is not None:
            return above.origin + path[len(directory) :]
    return path


def guarded_paths(
    row: Row, guard: Guard, trees: tuple[LayeredTree, LayeredTree], top: bytes
) -> list[bytes]:
    """Return the paths that a row changes and a commit takes only if they are allowed.

    Args:
        row: entries of a directory that it renames, replaces or removes are looked at
            too: where it was, and where it is then.
        guard: the workspace's patterns.
        trees: the base alone; the workspace's layers.
        top: the path of the base, for links.
    """
    base, merged = trees
    found = []
    if row.new is not None:
        if guard.match(row.path, row.new) or _is_odd(row, trees, top):
            found.append(row.path)
        if row.origin is not None:
            found += _guarded_beneath(merged, row.new, row.path, guard)
            found += _links_turned_out(merged, row.new, row.path, row.origin, top)
    for gone in _find_taken_away(row):
        if guard.match(gone.path, gone):
            found.append(gone.path)
        if gone.is_directory:
            found += _guarded_beneath(base, gone, gone.path, guard)
    return found


def _find_taken_away(row: Row) -> list[TreeNode]:
    """Return the objects of the base that are not at their paths any more."""
    takes = row.change in {Change.DELETED, Change.TYPE, Change.RENAMED}
    gone = (row.old if takes else None, row.replaced)
    return [node for node in gone if node is not None]


def _guarded_beneath(
    tree: LayeredTree, directory: TreeNode, path: bytes, guard: Guard
) -> list[bytes]:
    """Return what is guarded in a directory, as if that were at a path."""
    inside = objects_beneath(tree, directory, path)
    return [name for name, node in inside if guard.match(name, node)]


def _links_turned_out(
    merged: LayeredTree, directory: TreeNode, path: bytes, origin: bytes, top: bytes
) -> list[bytes]:
    """Return the links in a renamed directory that lead out from their new place only."""
    found = []
    for name, node in objects_beneath(merged, directory, path):
        if stat.S_ISLNK(node.status.st_mode):
            target = merged.read_link(node)
            was = origin + name[len(path) :]
            if leads_out(target, name, top) and not leads_out(target, was, top):
                found.append(name)
    return found


def _is_odd(row: Row, trees: tuple[LayeredTree, LayeredTree], top: bytes) -> bool:
    """Tell whether an object can do harm by what it is."""
    if row.new is None:
        return False
    base, merged = trees
    mode = row.new.status.st_mode
    is_plain = row.new.is_directory or stat.S_ISREG(mode)
    if is_plain and merged.has_escaped_marks(row.new):
        return True
    if row.new.is_directory:
        if not mode & stat.S_ISGID or (
            row.old is not None and row.old.status.st_mode & stat.S_ISGID
        ):
            return bool(mode & stat.S_ISUID)
        return not _gives_group(split(row.path)[0], base, merged)
    if stat.S_ISREG(mode):
        return bool(mode & (stat.S_ISUID | stat.S_ISGID))
    return not stat.S_ISLNK(mode) or leads_out(merged.read_link(row.new), row.path, top)


def _gives_group(path: bytes, base: LayeredTree, merged: LayeredTree) -> bool:
    """Tell whether the base has a directory, or the next above it, with set-group-ID."""
    node = merged.find(path)
    place: bytes | None = None
    while node is not None and (place := merged.base_path(node)) is None:
        node = merged.find(split(node.path)[0]) if node.path else None
    below = None if place is None else base.find(place)
    return below is not None and bool(below.status.st_mode & stat.S_ISGID)


def leads_out(target: bytes, path: bytes, top: bytes) -> bool:
    """Tell whether a link leads out of a directory, by its words.

    Args:
        target: the words of the link.
        path: of the link, relative to the directory.
        top: the directory's own path.
    """
    if target.startswith(b"/"):
        if target != top and not target.startswith(top.rstrip(b"/") + b"/"):
            return True
        parts, depth = target[len(top) :].split(b"/"), 0
    else:
        parts, depth = target.split(b"/"), path.count(b"/")
    for part in parts:
        if part == b"..":
            depth -= 1
        elif part not in {b"", b"."}:
            depth += 1
        if depth < 0:
            return True
    return False
