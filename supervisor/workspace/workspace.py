"""A workspace: a base seen through a layer that a child writes to.

Commands use it through ``Workspace``, which joins ``commit`` and ``branches`` over one
``held_workspace``: it ends a commit that was cut before a branch is made.

Spec WS1 to WS20.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import IO, TYPE_CHECKING, Self

from supervisor.workspace import branches
from supervisor.workspace.changes import Row, compare_views
from supervisor.workspace.commit import (
    CommitGivenUpError,
    CommitResult,
    Commits,
    UnfinishedCommitError,
)
from supervisor.workspace.commit_settlement import prune_later
from supervisor.workspace.directory import BaseGoneError, InUseError, WorkspaceError
from supervisor.workspace.held_workspace import HeldWorkspace
from supervisor.workspace.hidden_files import (
    find_hidden,
    has_layer,
    hide_paths,
    matches_any_depth,
)
from supervisor.workspace.linux import sync_file_system
from supervisor.workspace.patch import write_patch
from supervisor.workspace.selection import (
    CommitSelection,
    Patterns,
    check_matches,
    choose_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.workspace.branches import Rollback, SnapshotResult
    from supervisor.workspace.export import Form
    from supervisor.workspace.held_workspace import Trees
    from supervisor.workspace.layers import LayeredTree


class Workspace:
    """One workspace, held for one command; to be used in a ``with``.

    Args:
        state_dir: where workspaces live.
        name: of this one.
        patience_s: how long to wait for another command's end.

    Attributes:
        directory: its state on the disk.
        state: its description.
        store: of the sealed layers.

    Raises:
        WorkspaceError: there is none, or another command works on it.
    """

    def __init__(self, state_dir: str, name: str, patience_s: float = 0.0) -> None:
        self._held = HeldWorkspace(state_dir, name, patience_s)
        self._commits = Commits(self._held)
        self.directory = self._held.directory
        self.state = self._held.state
        self.store = self._held.store
        try:
            if self.state.outgoing:
                branches.replace_upper(self._held)
        except BaseException:
            self._held.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def name(self) -> str:
        """Return its name."""
        return self._held.name

    @property
    def has_room(self) -> bool:
        """Tell whether the last look could be recorded."""
        return self._held.has_room

    def changes(self, patterns: Patterns | None = None) -> list[Row]:
        """Return what was changed, and record what the base has there.

        Args:
            patterns: of the paths to look at; None for all.

        Raises:
            NoMatchError: a pattern names nothing.
            OSError: something cannot be read.
        """
        with self.trees() as trees:
            rows = self._held.changes(trees)
            if not patterns:
                return rows
            check_matches((patterns,), rows, trees.base)
            return choose_rows(rows, CommitSelection(only=patterns), trees.base)

    def patch(
        self, patterns: Patterns | None = None, *, binary: bool = False
    ) -> Iterator[bytes]:
        """Yield the changes as a patch, in pieces.

        Raises:
            NoMatchError: a pattern names nothing.
            NoGitError: text was modified, and there is no git.
            OSError: something cannot be read.
        """
        with self.trees() as trees:
            rows = self._held.rows(trees, with_renames=False)
            if patterns:
                check_matches((patterns,), rows, trees.base)
                rows = choose_rows(rows, CommitSelection(only=patterns), trees.base)
            yield from write_patch(trees.base, trees.merged, rows, binary=binary)

    def commit(
        self,
        selection: CommitSelection,
        *,
        is_dry: bool = False,
        is_frozen: bool = False,
    ) -> CommitResult:
        """Bring changes to the base: what is chosen, or nothing of it.

        Args:
            selection: of the paths.
            is_dry: only say what would be done.
            is_frozen: a child may have the workspace, and is stopped. Its layer is not
                changed then, but later, when no child has it.

        Raises:
            InUseError: a child has the workspace.
            NoMatchError: a pattern names nothing.
            NoGitError: a text is to be merged, and there is no git.
            OSError: something cannot be read or written; the base is as it was.
        """
        if not is_frozen:
            self.directory.check_idle()
        self.finish_commit()
        if self.state.layers and not is_dry:
            if self.directory.user():
                text = f"cannot commit {self.name!r}: a child has it, above a snapshot"
                how = f"commit a fork ('sandhost workspace fork {self.name}')"
                raise InUseError(f"{text}; wait for its end, or {how}")
            tried = self._commits.commit(selection, is_dry=True)
            if not tried.applied and not selection.mine:
                return tried
            branches.unite(self._held)
        result = self._commits.commit(selection, is_dry=is_dry)
        if not is_dry:
            with contextlib.suppress(OSError):  # it is tried again by the next command
                # Work that was left for later: this commit may have settled the rest of
                # it.
                prune_later(self._held)
                self._held.sweep_store()
        return result

    def finish_commit(self) -> bool | None:
        """End a commit that a crash interrupted, and what one left for a child's end.

        Returns:
            Whether its changes are in the base now; None if there was none.

        Raises:
            CommitGivenUpError: it could be neither done nor undone; it is over.
            OSError: it cannot be ended now.
        """
        return self._commits.finish()

    def finish_and_word(self) -> str:
        """End a commit as ``finish_commit``; word one that is not in the base, else "".

        Raises:
            OSError: it cannot be ended now.
        """
        try:
            is_undone = self.finish_commit() is False
        except CommitGivenUpError as why:
            return str(why)
        text = f"a commit that was interrupted was {self.text_of_undone()}"
        return text if is_undone else ""

    def text_of_undone(self) -> str:
        """Return how ``finish_commit`` has ended a commit that is not in the base."""
        return self._commits.text_of_undone()

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """Stop the processes of the child that has it; as ``HeldWorkspace.stopped``."""
        return self._held.stopped()

    def idle_state(self) -> str:
        """Return ``idle``, or ``left behind`` if the host of the last run died."""
        return "left behind" if self.state.is_running else "idle"

    def is_cut_off(self) -> bool:
        """Tell whether its last run was cut off before its layer was synced.

        That is of a run with durable = false. The next start clears what tells it, and
        says so.
        """
        return not self.directory.user() and self.directory.find_volatile_mark()

    def discard(self) -> str:
        """Remove the workspace and all that was changed in it.

        Returns:
            A text of a cut commit that is not in the base; else "".

        Raises:
            InUseError: a child has it.
            UnfinishedCommitError: files of the base that such a commit has replaced
                would be removed.
        """
        self.directory.check_idle()
        left = ""
        try:
            left = self.finish_and_word()
        except BaseGoneError:
            pass
        except UnfinishedCommitError as why:
            left = why.text_given_up
            if not left:
                raise
        self.directory.remove()
        self.store.sweep()
        return left

    def snapshot(
        self, label: str | None = None, *, of_checkpoint: bool = False
    ) -> SnapshotResult:
        """Seal what was changed so far under a label; a new upper begins.

        Args:
            label: of the snapshot; None for the next number.
            of_checkpoint: its child has asked for it; of these as many are kept again.

        Raises:
            WorkspaceError: the label is taken or is none, or it cannot be sealed.
        """
        self.finish_commit()
        return branches.take_snapshot(self._held, label, of_checkpoint=of_checkpoint)

    def drop_snapshot(self, label: str) -> bool:
        """Forget a snapshot; tell whether it was there."""
        return branches.drop_snapshot(self._held, label)

    def restore_later(self, label: str) -> None:
        """Go back to a snapshot before the next run, for a child that runs now.

        Raises:
            WorkspaceError: there is no such snapshot.
        """
        branches.restore_later(self._held, label)

    def finish_restore(self) -> Rollback | None:
        """Go back to what ``restore_later`` was asked for; None if that is nothing.

        Raises:
            InUseError: a child has the workspace.
        """
        label = self.state.goes_back_to
        return branches.Rollback(label, self.restore(label)) if label else None

    def changes_since(self, label: str) -> list[Row]:
        """Return what differs now from a snapshot.

        Raises:
            WorkspaceError: there is no such snapshot.
        """
        return branches.changes_since(self._held, label)

    def restore(self, label: str) -> int:
        """Go back to a snapshot.

        Returns:
            How many paths differ from what was there before.

        Raises:
            WorkspaceError: there is no such snapshot.
            InUseError: a child has the workspace.
        """
        self.directory.check_idle()
        self.finish_commit()
        return branches.restore(self._held, label)

    def fork(self, count: int = 1) -> list[str]:
        """Make workspaces that begin as this one is now; return their names.

        Raises:
            WorkspaceError: this one cannot be sealed.
        """
        self.finish_commit()
        return branches.fork(self._held, count)

    def export(self, path: str, *, replaces: bool = False) -> None:
        """Write the changes to a file: ``.patch`` for git, ``.tar`` as an OCI layer.

        Args:
            path: of the file, which is there whole or not at all.
            replaces: a file that is there is replaced.

        Raises:
            WorkspaceError: the name ends otherwise, the file is there, or a path cannot
                be said in that form.
            NoGitError: text was modified, and there is no git.
        """
        from supervisor.workspace.export import form_of, write_whole  # noqa: PLC0415

        form = form_of(path)
        with write_whole(path, replaces=replaces) as file:
            self.write_export(form, file)

    def write_export(self, form: Form, file: IO[bytes]) -> None:
        """Write the changes to an open file, in a form of ``export``.

        Raises:
            WorkspaceError: a path cannot be said in that form.
            NoGitError: text was modified, and there is no git.
        """
        from supervisor.workspace.export import writer_of  # noqa: PLC0415 - tarfile

        with self.trees() as trees:
            rows = self._held.rows(trees, with_renames=False)
            writer_of(form)(trees.base, trees.merged, rows, file)

    def compare_with(self, other: Workspace) -> list[Row]:
        """Return what another workspace of the same base has differently.

        Raises:
            WorkspaceError: it has another base.
        """
        with self._open_with(other) as (mine, theirs):
            return compare_views(mine, theirs)

    def patch_to(self, other: Workspace, *, binary: bool = False) -> Iterator[bytes]:
        """Yield a patch from this workspace to another one of the same base."""
        with self._open_with(other) as (mine, theirs):
            rows = compare_views(mine, theirs)
            yield from write_patch(mine, theirs, rows, binary=binary)

    @contextlib.contextmanager
    def _open_with(self, other: Workspace) -> Iterator[tuple[LayeredTree, LayeredTree]]:
        bases = {(one.state.device, one.state.inode) for one in (self, other)}
        if len(bases) > 1:
            text = f"cannot compare {self.name!r} with {other.name!r}"
            raise WorkspaceError(f"{text}: they have two bases; name two of one base")
        with self.trees() as mine, other.trees() as theirs:
            yield mine.merged, theirs.merged

    def begin_run(self) -> float | None:
        """Record what was changed before, and when this run began; hide what is hidden.

        Returns:
            How many seconds it took to walk the base; None if that was not needed.

        Raises:
            WorkspaceError: something cannot be hidden.
        """
        self.finish_commit()
        # Before the look: a change of the base meanwhile counts as one during the run.
        started_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        with self.trees() as trees:
            self._held.record_seen(trees, self._held.look(trees))
            walked_s = self._hide_names(trees.base_fd)
        self.state.started_ns = started_ns
        self.state.is_running = True
        self.state.may_redirect = True
        self.directory.write_state(self.state)
        return walked_s

    def set_running(self, is_running: bool) -> None:
        """Say whether a host has it, or one that died had it."""
        if self.state.is_running != is_running:
            self.state.is_running = is_running
            self.directory.write_state(self.state)

    def _hide_names(self, base: int) -> float | None:
        hide = self.state.settings.hide
        if not hide and not has_layer(self.directory):
            return None
        self.state.hidden = tuple(dict.fromkeys((*self.state.hidden, *hide)))
        began_s = time.monotonic()
        try:
            hide_paths(self.directory, base, find_hidden(base, hide))
        except OSError as why:
            text = f"cannot hide names of {os.fsdecode(self.state.base)!r}"
            how = "leave --hide out, or run as the owner of all directories above them"
            raise WorkspaceError(f"{text}: {why.strerror}; {how}") from None
        return time.monotonic() - began_s if matches_any_depth(hide) else None

    def end_run(self) -> list[Row]:
        """Record what was changed when a run has ended; return it.

        If the mount synced nothing, the layer is synced now.
        """
        rows = self.changes()
        if self.directory.find_volatile_mark():
            sync_file_system(self.directory.fd)
            self.directory.clear_volatile_mark()
        self.state.is_running = False
        self.state.may_redirect = self._held.has_redirects
        self.directory.write_state(self.state)
        return rows

    def open_base(self) -> int:
        """Open the base's top; as ``HeldWorkspace.open_base``."""
        return self._held.open_base()

    def trees(self) -> contextlib.AbstractContextManager[Trees]:
        """Hold the layers; as ``HeldWorkspace.trees``."""
        return self._held.trees()
