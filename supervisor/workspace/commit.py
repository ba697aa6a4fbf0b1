"""The commits of a held workspace: one that is asked for, and one that was cut.

``commit_plan`` decides what it takes, ``committer`` brings that to the base by the steps of
a journal, ``commit_settlement`` has the layer and the record follow.

Spec WS11 to WS13.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from supervisor.workspace.commit_journal import BaseChangedError, CommitJournal
from supervisor.workspace.commit_plan import CommitPlan, Conflict, Planner
from supervisor.workspace.commit_settlement import prune_later, settle
from supervisor.workspace.committer import Chosen, Committer
from supervisor.workspace.layers import GoneError
from supervisor.workspace.upper import drop_changes, mark_opaque

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.workspace.changes import Row
    from supervisor.workspace.held_workspace import HeldWorkspace, Trees
    from supervisor.workspace.selection import Selection


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The outcome of a commit, done or planned.

    Attributes:
        applied: the paths that are in the base now.
        conflicts: what the base has changed as well; if there is one and it was not to
            be skipped, nothing is applied.
        guarded: what was chosen and not allowed; if there is one, nothing is applied.
        left: what stays in the workspace.
        merged: of what is applied the files that got the changes of both sides.
        hidden: what of the guarded is hidden in the base, and is never taken.
    """

    applied: tuple[bytes, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    guarded: tuple[bytes, ...] = ()
    left: tuple[bytes, ...] = ()
    merged: tuple[bytes, ...] = ()
    hidden: frozenset[bytes] = frozenset()

    @property
    def is_refused(self) -> bool:
        """Tell whether nothing was applied because of a conflict or a guard."""
        return not self.applied and bool(self.conflicts or self.guarded)


class Commits:
    """Commits one workspace, and ends a commit that a crash has cut.

    Args:
        held: the workspace.
    """

    def __init__(self, held: HeldWorkspace) -> None:
        self._held = held
        # Objects that an undone commit could not bring back: path -> path where it is.
        self._aside: dict[bytes, bytes] = {}

    def commit(self, selection: Selection, *, is_dry: bool) -> CommitResult:
        """Bring what is chosen to the base, or nothing of it.

        Precondition: no commit is cut, and unless this is dry, what is sealed is one layer
        of the workspace's own.

        Args:
            selection: what is chosen.
            is_dry: only say what would be done.

        Raises:
            NoMatchError: a pattern names nothing.
            InUseError: it would change the layer, which a child has.
            NoGitError: a text is to be merged, and there is no git.
            OSError: something cannot be read or written; the base is as it was.
        """
        with self._held.trees(for_commit=not is_dry) as trees:
            rows: list[Row] = []
            try:
                rows = self._held.look(trees)
                return self._commit_rows(trees, rows, selection, is_dry=is_dry)
            except GoneError as why:  # the operator works in the base
                conflict = Conflict(why.path, why.reason)
                left = tuple(row.path for row in rows)
                return CommitResult(conflicts=(conflict,), left=left)

    def _commit_rows(
        self, trees: Trees, rows: Sequence[Row], selection: Selection, *, is_dry: bool
    ) -> CommitResult:
        """Commit what is chosen of all that was changed.

        Raises:
            GoneError: the base has something no more that was to be judged; nothing is
                done.
        """
        planner = Planner(self._held, trees, selection)
        plan = planner.plan(rows)
        applied = {row.path for row in plan.chosen}
        conflicts = plan.conflicts
        if not is_dry:
            self._held.record_if_room(trees, rows)
            if plan.chosen:
                try:
                    self._apply(trees, rows, plan, planner)
                except (BaseChangedError, GoneError) as why:
                    conflicts = [*conflicts, Conflict(why.path, why.reason)]
                    conflicts += self._conflicts_aside()
                    applied = set()
            elif not plan.is_refused:  # this takes no room, but makes some
                drop_changes(trees.upper_fd, plan.dropped)
        left = [row.path for row in rows if row.path not in applied]
        return CommitResult(
            tuple(sorted(applied)),
            tuple(conflicts),
            tuple(plan.guarded),
            tuple(left),
            tuple(sorted(applied & plan.merges.keys())),
            frozenset(plan.hidden),
        )

    def _apply(
        self, trees: Trees, rows: Sequence[Row], plan: CommitPlan, planner: Planner
    ) -> None:
        """Bring what is planned to the base.

        Raises:
            BaseChangedError: the base was changed meanwhile; it is as it was.
            GoneError: the base has something no more that was to be judged.
        """
        in_use = bool(self._held.directory.user())
        what = Chosen(plan.chosen, plan.merges, _places(plan.dropped), in_use)
        update = self._held.judge(trees).update_by_commit(plan.chosen, rows)
        again = partial(planner.judge_again, plan)
        self._committer(trees).commit(trees.merged, what, update, again)

    def _conflicts_aside(self) -> list[Conflict]:
        """Return as conflicts what a commit that was undone could not bring back."""
        text = "its place was taken meanwhile, and what was there is now"
        return [
            Conflict(path, f"{text} {os.fsdecode(aside)!r}")
            for path, aside in self._aside.items()
        ]

    def finish(self) -> bool | None:
        """End a commit that a crash interrupted, and what one left for a child's end.

        Returns:
            Whether its changes are in the base now; None if there was none.

        Raises:
            OSError: it cannot be ended now.
        """
        is_applied = self._end_cut()
        # Only now: what the base has of a commit that is undone yet may go again.
        prune_later(self._held)
        return is_applied

    def _end_cut(self) -> bool | None:
        """End a commit that a crash interrupted; return as ``finish``."""
        data = self._held.directory.read("commit")
        if data is None:
            return None
        journal = msgspec.msgpack.decode(data, type=CommitJournal)
        with self._held.trees(for_commit=True) as trees:
            try:
                return self._committer(trees).end_cut(journal)
            except BaseChangedError:
                return False

    def text_of_undone(self) -> str:
        """Return what ``finish`` has made of the base when it undid a commit."""
        texts = [
            f"{os.fsdecode(one.path)!r}: {one.reason}"
            for one in self._conflicts_aside()
        ]
        return "; ".join(texts) or "the base is as it was"

    def _committer(self, trees: Trees) -> Committer:
        """Return what applies a commit, with the journal in the workspace's directory."""

        def save(journal: CommitJournal | None) -> None:
            if journal and journal.is_in_use and journal.state == "applying":
                # Before the first step: the child marks nothing that it removes in these.
                new = journal.put_paths()
                mark_opaque(trees.upper_fd, self._held.state.marks, new)
            data = None if journal is None else msgspec.msgpack.encode(journal)
            self._held.directory.write("commit", data)

        own = self._held.directory.fd
        return Committer(trees.base_fd, own, save, partial(self._settle, trees))

    def _settle(self, trees: Trees, journal: CommitJournal) -> None:
        """Settle a commit that was applied or undone; remember what is aside."""
        if journal.state == "undone":
            self._aside = journal.aside
        settle(self._held, trees, journal)


def _places(rows: Sequence[Row]) -> list[bytes]:
    """Return where the layer has something of rows, before and after a rename."""
    found = [row.path for row in rows]
    return found + [row.origin for row in rows if row.origin is not None]
