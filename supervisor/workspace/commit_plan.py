"""The plan of a commit: what it takes of the changes, and why not the rest.

Nothing is changed here. The base is looked at twice: when the plan is made, and again when
each step knows what it expects there.

Spec WS6, WS11, WS13.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.workspace.commit_journal import BaseChangedError
from supervisor.workspace.directory import InUseError, WorkspaceError
from supervisor.workspace.hidden_files import hidden_paths
from supervisor.workspace.layers import is_beneath, parents, split
from supervisor.workspace.merge import CannotMergeError, Merger
from supervisor.workspace.selection import (
    CommitSelection,
    Guard,
    NoMatchError,
    Patterns,
    changed_paths,
    check_matches,
    choose_rows,
    guarded_paths,
)
from supervisor.workspace.texts import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from supervisor.workspace.changes import Row
    from supervisor.workspace.commit_staging import MergedFile
    from supervisor.workspace.held_workspace import HeldWorkspace, Trees
    from supervisor.workspace.judge import Judge


@dataclass(frozen=True, slots=True)
class Conflict:
    """A path that a commit cannot take, and why."""

    path: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The plan of a commit.

    Attributes:
        chosen: the rows that it takes; none of them if it is refused.
        merges: by path of a chosen row, what takes the place of the workspace's file.
        dropped: the rows of which the base's side wins.
        conflicts: paths that the base has changed as well.
        guarded: paths that were chosen and not allowed.
        hidden: those of the guarded that are hidden in the base.
        is_refused: a guard refuses it, or a conflict that was not to be skipped.
    """

    chosen: list[Row]
    merges: dict[bytes, MergedFile]
    dropped: list[Row]
    conflicts: list[Conflict]
    guarded: list[bytes]
    hidden: list[bytes]
    is_refused: bool


class Planner:
    """Decides what a commit takes."""

    def __init__(
        self, held: HeldWorkspace, trees: Trees, selection: CommitSelection
    ) -> None:
        self._held = held
        self._trees = trees
        self._selection = selection

    def plan(self, rows: Sequence[Row]) -> CommitPlan:
        """Return what is to be done.

        Raises:
            NoMatchError: a pattern names nothing.
            InUseError: it would change the layer, which a child has.
            NoGitError: a text is to be merged, and there is no git.
            GoneError: the base has something no more that was to be judged.
        """
        selection, base = self._selection, self._trees.base
        patterns = (selection.only, selection.but, selection.theirs, selection.mine)
        check_matches(patterns, rows, base)
        self._check_allowed(rows)
        judge = self._held.judge(self._trees)
        chosen = choose_rows(rows, selection, base)
        chosen, dropped = _sides(chosen, selection)
        guarded, hidden = self._find_guarded(chosen)
        conflicts = _conflicts(judge, chosen, selection)
        merges: dict[bytes, MergedFile] = {}
        if selection.merges:
            merger = Merger(base, self._trees.merged, rows)
            merges, conflicts = self._merge(merger, judge, chosen, conflicts)
        self._check_layer_stays(chosen, dropped, merges)
        _check_shows(self._trees, dropped)
        is_refused = bool(guarded or (conflicts and not selection.skips_conflicts))
        left_out = {found.path for found in conflicts}
        chosen = [] if is_refused else _without(chosen, left_out)
        applied = {row.path for row in chosen}
        merges = {path: one for path, one in merges.items() if path in applied}
        return CommitPlan(
            chosen, merges, dropped, conflicts, guarded, hidden, is_refused
        )

    def judge_again(self, plan: CommitPlan) -> None:
        """Judge what a commit takes by the base of now, which may have changed since.

        Raises:
            BaseChangedError: something is in conflict.
        """
        trees, selection = self._trees, self._selection
        for path, merged in plan.merges.items():
            if not merged.is_of(trees.base.find(path)):
                raise BaseChangedError(path, "it was changed in the base")
        taken = {row.path for row in plan.chosen}
        rows = choose_rows(self._held.rows(trees), selection, trees.base)
        judge = self._held.judge(trees)
        rows = [
            row
            for row in rows
            if row.path in taken
            and not (row.path in plan.merges and judge.seen_text(row) is not None)
        ]
        conflicts = _conflicts(judge, rows, selection)
        if conflicts:
            raise BaseChangedError(conflicts[0].path, conflicts[0].reason)

    def _merge(
        self,
        merger: Merger,
        judge: Judge,
        rows: Sequence[Row],
        conflicts: Sequence[Conflict],
    ) -> tuple[dict[bytes, MergedFile], list[Conflict]]:
        """Merge conflicts; return the merged files, and the conflicts that stay."""
        by_path = {row.path: row for row in rows}
        merges: dict[bytes, MergedFile] = {}
        left = []
        for conflict in conflicts:
            row = by_path[conflict.path]
            if not row.is_edit:
                left.append(conflict)
                continue
            try:
                merges[row.path] = merger.merge(row, *self._find_begun(judge, row))
            except CannotMergeError as why:
                left.append(Conflict(row.path, f"{conflict.reason}; {why}"))
        return merges, left

    def _find_begun(self, judge: Judge, row: Row) -> tuple[bytes, int]:
        """Return the text that both sides of a row began from, and its mode."""
        seen = judge.seen_text(row)
        if seen is not None:
            with self._held.open_texts() as texts:
                begun = read_text(texts, seen.text)
            if begun is not None:
                return begun, seen.mode
        raise CannotMergeError("no text that both began from is kept")

    def _find_guarded(self, rows: Sequence[Row]) -> tuple[list[bytes], list[bytes]]:
        """Return the paths that a commit leaves out, and those that no --allow admits."""
        hide, base = self._held.hide, self._trees.base
        never = [path for row in rows for path in hidden_paths(row, hide, base)]
        guarded = self._guarded_paths(rows)
        found = [path for path in guarded if not self._selection.allow.match(path)]
        return sorted({*found, *never}), never

    def _guarded_paths(self, rows: Sequence[Row]) -> list[bytes]:
        state = self._held.state
        guard = Guard((*state.settings.guard, *state.hidden))
        both, top = (self._trees.base, self._trees.merged), state.base
        return [path for row in rows for path in guarded_paths(row, guard, both, top)]

    def _check_allowed(self, rows: Sequence[Row]) -> None:
        """Refuse a pattern of --allow that names nothing that has changed."""
        if not rows:
            return  # nothing to commit is no fault
        allow = self._selection.allow
        paths = list(changed_paths(rows, self._trees.base)) if allow else []
        unmatched = allow.unmatched(paths)
        if unmatched:  # paths in a renamed directory have no rows of their own
            guarded = [(path, False) for path in self._guarded_paths(rows)]
            unmatched = Patterns(unmatched).unmatched(guarded)
        if unmatched:
            raise NoMatchError("allow", unmatched[0])

    def _check_layer_stays(
        self, chosen: Sequence[Row], dropped: Sequence[Row], merged: Iterable[bytes]
    ) -> None:
        """Refuse what changes the layer, if a child has it."""
        works = [("drop", row.path) for row in dropped]
        works += [("merge", path) for path in merged]
        works += [("move", row.path) for row in chosen if row.origin is not None]
        if works and self._held.directory.user():
            what, path = works[0]
            text = f"cannot {what} {os.fsdecode(path)!r}: a child has the workspace"
            raise InUseError(f"{text}; wait for its end, or leave it with --except")


def _check_shows(trees: Trees, dropped: Sequence[Row]) -> None:
    """Refuse to drop what would hide the base's side instead of showing it."""
    for row in dropped:
        if row.old is None or row.origin is not None:
            continue
        directory = trees.merged.find(split(row.path)[0])
        if directory is None or trees.merged.base_path(directory) is None:
            text = f"cannot drop {os.fsdecode(row.path)!r}: its directory was made anew"
            raise WorkspaceError(f"{text} or removed; leave it with --except")


def _conflicts(
    judge: Judge, rows: Sequence[Row], selection: CommitSelection
) -> list[Conflict]:
    found = []
    for row in rows:
        reason = judge.conflict(row)
        if reason and not _is_named(selection.theirs, row):
            found.append(Conflict(row.path, reason))
    return found


def _sides(
    rows: Sequence[Row], selection: CommitSelection
) -> tuple[list[Row], list[Row]]:
    """Return the rows to apply, and those of which the base's side wins."""
    mine = [row for row in rows if _is_named(selection.mine, row)]
    return [row for row in rows if row not in mine], mine


def _is_named(patterns: Patterns, row: Row) -> bool:
    """Tell whether a row's path is named, also as a directory, there or in the base."""
    sides = (row.new, row.old)
    is_directory = any(side is not None and side.is_directory for side in sides)
    return patterns.match(row.path, is_directory=is_directory)


def _without(rows: Sequence[Row], left: set[bytes]) -> list[Row]:
    """Return the rows without those left out, and without the rows that need them."""
    kept: list[Row] = []
    origins = {row.origin for row in rows if row.path in left and row.origin}
    for row in rows:
        is_left = not left.isdisjoint((row.path, *parents(row.path)))
        gone = row.path if row.origin is None else row.origin
        takes = any(is_beneath(origin, gone) for origin in origins)
        if not is_left and not takes:
            kept.append(row)
    return kept
