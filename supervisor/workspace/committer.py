"""Chosen changes applied to the base, all of them or none.

Rules:
 1. Everything new is written beside the base first, in a staging directory on the same
    mount, and synced. Then the base changes by renames alone.
 2. The steps stand in a journal before the first of them is done. After a crash they are
    done again from the first: a step that was done is known by the inode that it moved.
 3. Replaced and removed objects stay in the staging directory until all is synced.
 4. Between two syncs a disk may keep any of the steps. A step in a directory that was
    moved counts on the move, and comes after a sync.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.commit_journal import (
    STAGING_PREFIX,
    BaseChangedError,
    CommitJournal,
    Put,
)
from supervisor.workspace.commit_staging import MergedFile, Staging
from supervisor.workspace.commit_steps import Steps
from supervisor.workspace.layers import LayeredTree
from supervisor.workspace.linux import read_mount_id, sync_file_system
from supervisor.workspace.store import WorkspaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from supervisor.workspace.changes import Row
    from supervisor.workspace.record import RecordUpdate

_MARK_BYTES = 8


class Chosen(NamedTuple):
    """The aim of a commit.

    Attributes:
        rows: of ``choose_rows``, judged to be in no conflict.
        merges: by path, what takes the place of the workspace's file.
        dropped: paths of which the base's side was chosen.
        is_in_use: a child has the layer, and is stopped.
    """

    rows: Sequence[Row]
    merges: Mapping[bytes, MergedFile]
    dropped: list[bytes]
    is_in_use: bool = False


class UnfinishedCommitError(WorkspaceError):
    """A commit that has begun cannot be ended now; the next command tries it again."""

    def __init__(self, why: OSError, journal: CommitJournal) -> None:
        where = {
            "staging": "the base is as it was",
            "undone": "the base is as it was",
            "applied": "its changes are in the base",
        }.get(journal.state, "a part of it is in the base")
        text = f"cannot end the commit: {why.strerror}; {where}"
        super().__init__(f"{text}: mend that, then 'sandhost workspace list' ends it")


class Committer:
    """Applies one commit, or ends one that a crash interrupted.

    Args:
        base: a descriptor of the base's top.
        own: of the workspace's own directory.
        save: writes the journal and syncs it; None removes it.
        settle: called when all is applied or undone, before the journal goes; after a
            crash it is called again.
    """

    def __init__(
        self,
        base: int,
        own: int,
        save: Callable[[CommitJournal | None], None],
        settle: Callable[[CommitJournal], None],
    ) -> None:
        self._base = base
        self._own = own
        self._save = save
        self._settle = settle
        self._tree = LayeredTree((base,))

    def commit(
        self,
        merged: LayeredTree,
        chosen: Chosen,
        update: RecordUpdate,
        judge: Callable[[], None],
    ) -> None:
        """Apply rows to the base.

        Args:
            merged: the workspace's layers.
            chosen: what is to be done.
            update: of ``Judge.update_by_commit``.
            judge: called when each step knows what it expects in the base; raises
                ``BaseChangedError`` if that is in conflict by then.

        Raises:
            BaseChangedError: the base was changed meanwhile; it is as it was.
            OSError: a thing cannot be read or written; the base is as it was.
            UnfinishedCommitError: it has begun, and cannot be ended now.
        """
        name = STAGING_PREFIX + secrets.token_hex(8).encode()
        journal = CommitJournal(
            "staging",
            name,
            self.find_holder(),
            merged=list(chosen.merges),
            update=update,
            dropped=chosen.dropped,
            is_in_use=chosen.is_in_use,
        )
        self._save(journal)
        os.mkdir(name, 0o700, dir_fd=self._holder_fd(journal))
        try:
            with closing_fd(self._open_staging(journal)) as staging:
                stage = Staging(staging, merged, self._tree, chosen.merges)
                journal.steps = stage.prepare(chosen.rows)
                judge()
                sync_file_system(staging)
            journal.state = "applying"
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
            raise UnfinishedCommitError(why, journal) from why
        if reason is not None:
            raise reason
        return journal.state == "applied"

    def _end(self, journal: CommitJournal) -> BaseChangedError | OSError | None:
        """End a commit; return why it was undone, if that was decided now."""
        reason = None
        if journal.state in {"applying", "undoing"}:
            with closing_fd(self._open_staging(journal)) as staging:
                if journal.state == "applying":
                    reason = self.apply(journal, staging)
                self._undo(journal, staging)
        self._remove(journal)
        return reason

    def apply(
        self, journal: CommitJournal, staging: int
    ) -> BaseChangedError | OSError | None:
        """Do every step; else return why one cannot be done, and have it undone."""
        steps = Steps(self._base, staging, journal.directories)
        moved: list[bytes] = []
        try:
            for number, step in enumerate(journal.steps):
                if any(step.path.startswith(path + b"/") for path in moved):
                    # After a power cut what is done in it is looked for at its new path.
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
        mark = journal.staging.removeprefix(STAGING_PREFIX)[:_MARK_BYTES]
        steps = Steps(self._base, staging, journal.directories, mark)
        for number, step in reversed([*enumerate(journal.steps)]):
            steps.undo(number, step)
        journal.aside = steps.find_aside(journal.steps)
        sync_file_system(self._base)
        journal.state = "undone"
        self._save(journal)

    def find_holder(self) -> Literal["base", "own"]:
        """Return where staging can be: a rename works within one mount only."""
        mounts = {read_mount_id(fd) for fd in (self._base, self._own)}
        return "own" if len(mounts) == 1 and None not in mounts else "base"

    def _holder_fd(self, journal: CommitJournal) -> int:
        return self._base if journal.holder == "base" else self._own

    def _open_staging(self, journal: CommitJournal) -> int:
        fd = os.open(journal.staging, DIRECTORY, dir_fd=self._holder_fd(journal))
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            # It was swapped: in another's directory names could be, while it is filled.
            os.close(fd)
            raise NotADirectoryError(
                errno.ENOTDIR, "another directory is there now", journal.staging
            )
        return fd

    def _remove(self, journal: CommitJournal) -> None:
        """Remove the staging directory, settle, then remove the journal."""
        self.remove_staging(journal)
        if journal.state in {"applied", "undone"}:
            # Only now: what is removed there may have other links in the base.
            self._settle(journal)
        self._save(None)

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
