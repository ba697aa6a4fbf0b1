"""The commits of a held workspace: all that is chosen goes to the base, or none.

``commit_plan`` decides what a commit takes. ``commit_staging`` writes that beside the base
and says by which steps it gets there; they stand in a ``commit_journal``. ``commit_steps``
does and undoes them, and ``commit_settlement`` has the layer and the record follow.

Spec WS11 to WS13.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.commit_journal import (
    STAGING_PREFIX,
    BaseChangedError,
    CommitJournal,
    Progress,
    Put,
)
from supervisor.workspace.commit_plan import CommitPlan, Conflict, Planner
from supervisor.workspace.commit_settlement import prune_later, settle
from supervisor.workspace.commit_staging import Staging
from supervisor.workspace.commit_steps import Steps
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.layers import GoneError, is_beneath
from supervisor.workspace.linux import read_mount_id, sync_file_system
from supervisor.workspace.upper import drop_changes, mark_opaque

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from supervisor.workspace.changes import Row
    from supervisor.workspace.held_workspace import HeldWorkspace, Trees
    from supervisor.workspace.selection import CommitSelection

_MARK_BYTES = 8
_AS_IT_WAS = "the base is as it was"
_IN_PART = "a part of it is in the base"
_BASE_AFTER: Mapping[Progress, str] = {
    "staging": _AS_IT_WAS,
    "applying": _IN_PART,
    "undoing": _IN_PART,
    "applied": "its changes are in the base",
    "undone": _AS_IT_WAS,
}


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The outcome of a commit, done or planned.

    Attributes:
        applied: the paths that are in the base now.
        conflicts: paths changed in the base as well; if there is one and it was not to
            be skipped, nothing is applied.
        guarded: paths chosen and not allowed; if there is one, nothing is applied.
        left: paths that stay in the workspace.
        merged: of what is applied the files that got the changes of both sides.
        hidden: those of the guarded that are hidden in the base, and are never taken.
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
    """Commits one workspace, and ends a commit that a crash has cut."""

    def __init__(self, held: HeldWorkspace) -> None:
        self._held = held
        # Objects that an undone commit could not bring back: path -> path where it is.
        self._aside: dict[bytes, bytes] = {}

    def commit(self, selection: CommitSelection, *, is_dry: bool) -> CommitResult:
        """Bring what is chosen to the base, or nothing of it.

        Precondition: no commit is interrupted, and unless this is dry, the sealed changes
        are one layer of the workspace's own.

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
        self,
        trees: Trees,
        rows: Sequence[Row],
        selection: CommitSelection,
        *,
        is_dry: bool,
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
                    committer = Committer(self._held, trees, self._aside)
                    committer.commit(rows, plan, planner)
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
            CommitGivenUpError: it could be neither done nor undone; it is over.
            OSError: it cannot be ended now.
        """
        is_applied = self._end_cut()
        # Only now: until then the base may lose again what such a commit brought.
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
                return Committer(self._held, trees, self._aside).end_cut(journal)
            except StagingGoneError as why:
                raise CommitGivenUpError(why) from None
            except BaseChangedError:
                return False

    def text_of_undone(self) -> str:
        """Return how ``finish`` has ended a commit that is not in the base."""
        texts = [
            f"{os.fsdecode(one.path)!r}: {one.reason}"
            for one in self._conflicts_aside()
        ]
        return f"undone: {'; '.join(texts) or _AS_IT_WAS}"


class StagingGoneError(BaseChangedError):
    """The staging directory of a commit is gone: it can be neither done nor undone."""

    def __init__(self, path: bytes) -> None:
        text = "it is gone, with what the commit had replaced"
        super().__init__(path, f"{text}; the base may have a part of the commit")


class CommitGivenUpError(WorkspaceError):
    """A commit that was cut is over: a part of it may be in the base.

    It is raised once: the next command finds no commit.
    """

    def __init__(self, why: StagingGoneError) -> None:
        super().__init__(f"a commit that was interrupted was given up: {why}")


class UnfinishedCommitError(WorkspaceError):
    """A commit that has begun cannot be ended now; the next command tries it again.

    Attributes:
        text_given_up: of what is left if the workspace is discarded; "" if that would
            remove files of the base.
    """

    def __init__(self, why: OSError, journal: CommitJournal, staging: bytes) -> None:
        where = f"{why.strerror}; {_BASE_AFTER[journal.state]}"
        super().__init__(
            f"cannot end the commit: {where}:"
            " mend that, then 'sandhost workspace list' ends it"
        )
        self.text_given_up = f"its commit was given up: {where}"
        if journal.state in {"applying", "undoing"}:
            self.text_given_up += f", and what it replaced in {os.fsdecode(staging)!r}"
            if journal.holder == "own":
                self.text_given_up = ""


class Committer:
    """Applies one commit, or ends one that a crash interrupted.

    Rules:
     1. Everything new is written in a staging directory on the base's mount first, and
        synced. Then the base changes by renames alone.
     2. The journal is on the disk before the first step. After a crash the steps are done
        again from the first: a step that was done is known by the inode that it moved.
     3. Replaced and removed objects stay in the staging directory until all is synced.
     4. Between two syncs a disk may keep any of the steps. A step in a directory that was
        moved, or that sets its mode, counts on the move, and comes after a sync.

    Args:
        aside: is filled when a commit is undone: path of what could not go back to its
            place -> path where it is.
    """

    def __init__(
        self, held: HeldWorkspace, trees: Trees, aside: dict[bytes, bytes]
    ) -> None:
        self._held = held
        self._trees = trees
        self._base = trees.base_fd
        self._own = held.directory.fd
        self._aside = aside

    def commit(self, rows: Sequence[Row], plan: CommitPlan, planner: Planner) -> None:
        """Apply a plan to the base.

        Raises:
            BaseChangedError: the base was changed meanwhile; it is as it was.
            GoneError: it has something no more that was to be judged; it is as it was.
            OSError: a thing cannot be read or written; the base is as it was.
            UnfinishedCommitError: it has begun, and cannot be ended now.
        """
        name = STAGING_PREFIX + secrets.token_hex(8).encode()
        journal = CommitJournal(
            "staging",
            name,
            self.find_holder(),
            merged=list(plan.merges),
            update=self._held.judge(self._trees).update_by_commit(plan.chosen, rows),
            dropped=_places(plan.dropped),
            is_in_use=bool(self._held.directory.user()),
        )
        self._save(journal)
        try:
            os.mkdir(name, 0o700, dir_fd=self._holder_fd(journal))
            with closing_fd(self._open_staging(journal)) as staging:
                stage = Staging(
                    staging, self._trees.merged, self._trees.base, plan.merges
                )
                journal.steps = stage.prepare(plan.chosen)
                planner.judge_again(plan)
                sync_file_system(staging)
            journal.state = "applying"
            if journal.is_in_use:
                # Before the first step: the child marks nothing that it removes in these.
                marks, new = self._held.state.marks, journal.put_paths()
                mark_opaque(self._trees.upper_fd, marks, new)
            self._save(journal)
        except BaseException:
            self._remove(journal)
            raise
        self.finish(journal)

    def end_cut(self, journal: CommitJournal) -> bool:
        """Bring a commit to its end that another process has begun; as ``finish``."""
        if journal.is_in_use and journal.state == "applying":
            journal.state = "undoing"
            self._save(journal)
        return self.finish(journal)

    def finish(self, journal: CommitJournal) -> bool:
        """Bring a commit to its end, from wherever it is.

        Returns:
            Whether its changes are in the base.

        Raises:
            BaseChangedError: the base was changed meanwhile; all is undone.
            OSError: a step cannot be done; all is undone.
            UnfinishedCommitError: it cannot be ended now; the journal stays.
        """
        try:
            reason = self._end(journal)
        except OSError as why:
            raise UnfinishedCommitError(why, journal, self._path_of(journal)) from why
        if reason is not None:
            raise reason
        return journal.state == "applied"

    def _end(self, journal: CommitJournal) -> BaseChangedError | OSError | None:
        """End a commit; return why it was undone, if that was decided now."""
        reason: BaseChangedError | OSError | None = None
        if journal.state in {"applying", "undoing"}:
            try:
                staging = self._open_staging(journal)
            except FileNotFoundError:
                reason = StagingGoneError(self._path_of(journal))
                journal.state = "undone"  # only here: if this is cut, it is found again
            else:
                with closing_fd(staging):
                    if journal.state == "applying":
                        reason = self.apply(journal, staging)
                    self._undo(journal, staging)
        self._remove(journal)
        return reason

    def apply(
        self, journal: CommitJournal, staging: int
    ) -> BaseChangedError | OSError | None:
        """Do every step; else return why one cannot be done, and have it undone."""
        steps = self._steps(journal, staging)
        moved: list[bytes] = []
        try:
            for number, step in enumerate(journal.steps):
                if any(step.path == one or is_beneath(step.path, one) for one in moved):
                    # After a power cut what is done to it is looked for at its new path.
                    sync_file_system(self._base)
                    moved.clear()
                steps.do(number, step)
                if isinstance(step, Put) and step.is_moved:
                    moved.append(step.path)
        except (BaseChangedError, OSError) as why:
            journal.state = "undoing"
            self._save(journal)
            return why
        sync_file_system(self._base)
        journal.state = "applied"
        self._save(journal)
        return None

    def _undo(self, journal: CommitJournal, staging: int) -> None:
        if journal.state != "undoing":
            return
        steps = self._steps(journal, staging)
        for number, step in reversed([*enumerate(journal.steps)]):
            steps.undo(number, step)
        journal.aside = steps.find_aside(journal.steps)
        sync_file_system(self._base)
        journal.state = "undone"
        self._save(journal)

    def _steps(self, journal: CommitJournal, staging: int) -> Steps:
        mark = journal.staging.removeprefix(STAGING_PREFIX)[:_MARK_BYTES]
        return Steps(self._base, staging, journal.directories, mark)

    def find_holder(self) -> Literal["base", "own"]:
        """Return where staging can be: a rename works within one mount only."""
        mounts = {read_mount_id(fd) for fd in (self._base, self._own)}
        return "own" if len(mounts) == 1 and None not in mounts else "base"

    def _holder_fd(self, journal: CommitJournal) -> int:
        return self._base if journal.holder == "base" else self._own

    def _path_of(self, journal: CommitJournal) -> bytes:
        """Return the path of the staging directory, as a person is told it."""
        holder = os.readlink(f"/proc/self/fd/{self._holder_fd(journal)}")
        return os.path.join(os.fsencode(holder), journal.staging)

    def _open_staging(self, journal: CommitJournal) -> int:
        fd = os.open(journal.staging, DIRECTORY, dir_fd=self._holder_fd(journal))
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            # It was swapped: in another's directory names could be, while it is filled.
            os.close(fd)
            where = os.fsdecode(self._path_of(journal))
            raise NotADirectoryError(
                errno.ENOTDIR, f"another directory is at {where!r} now"
            )
        return fd

    def _remove(self, journal: CommitJournal) -> None:
        """Remove the staging directory, settle, then remove the journal."""
        self.remove_staging(journal)
        if journal.state in {"applied", "undone"}:
            # Only now: a file that is removed there may have other links in the base. After a
            # crash it is done again.
            self._aside.clear()
            self._aside.update(journal.aside)
            settle(self._held, self._trees, journal)
        self._save(None)

    def _save(self, journal: CommitJournal | None) -> None:
        """Write the journal and sync it; None removes it."""
        data = None if journal is None else msgspec.msgpack.encode(journal)
        self._held.directory.write("commit", data)

    def remove_staging(self, journal: CommitJournal) -> None:
        """Remove the staging directory of a commit."""
        try:
            os.close(self._open_staging(journal))
        except (FileNotFoundError, NotADirectoryError):
            return  # the present file is not the commit's
        staging = Path(os.fsdecode(journal.staging))
        why = remove_tree(staging, self._holder_fd(journal))
        if why is not None:
            raise why


def _places(rows: Sequence[Row]) -> list[bytes]:
    """Return where the layer has something of rows, before and after a rename."""
    found = [row.path for row in rows]
    return found + [row.origin for row in rows if row.origin is not None]
