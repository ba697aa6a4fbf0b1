"""A workspace: a base seen through a layer that a child writes to (spec WS1 to WS20)."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Self

import msgspec

from supervisor.workspace import branches
from supervisor.workspace.changes import Row, compare, compare_views
from supervisor.workspace.commit_journal import (
    BaseChangedError,
    CommitJournal,
    SetAttributes,
    SetTimes,
    Take,
    identity_of,
    takes_directory,
)
from supervisor.workspace.committer import Chosen, Committer
from supervisor.workspace.freeze import FreezeError, guarded_stop
from supervisor.workspace.hiding import (
    find_hidden,
    has_layer,
    hidden_paths,
    load_origins,
    visible_rows,
    walks,
    write_layer,
)
from supervisor.workspace.layer_store import LayerStore, new_layer_id
from supervisor.workspace.layers import (
    GoneError,
    LayeredTree,
    Node,
    join,
    split,
    with_parents,
)
from supervisor.workspace.linux import read_birth_time_ns, sync_file_system
from supervisor.workspace.merge import CannotMergeError, Merger
from supervisor.workspace.patch import write_patch
from supervisor.workspace.record import (
    CHANGED,
    NOTHING,
    Judge,
    Record,
    Seen,
    digest_attributes,
    load_record,
    look_at_base,
    save_record,
    seen_of,
)
from supervisor.workspace.selection import (
    Guard,
    Patterns,
    Selection,
    changed_paths,
    choose_rows,
    guarded_paths,
)
from supervisor.workspace.store import (
    BaseGoneError,
    InUseError,
    WorkspaceDirectory,
    WorkspaceError,
    path_of,
    read_states,
)
from supervisor.workspace.texts import drop_texts, keep_texts, read_text, rows_to_keep
from supervisor.workspace.upper import (
    detach,
    drop_changes,
    mark_opaque,
    put_whiteouts,
    remove_committed,
    remove_merged,
    unmark_opaque,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from supervisor.workspace.branches import Snapshotted, WentBack
    from supervisor.workspace.commit_staging import MergedFile
    from supervisor.workspace.export import Form

_LATER = "committed-in-use"
"""Paths that are to leave the layer when no child has it, in the workspace's directory.

They were committed while a child had it; or that was undone, and a whiteout hides nothing.
"""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NoMatchError(WorkspaceError):
    """Patterns name nothing that was changed."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A path that a commit cannot take, and why."""

    path: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit did, or would do.

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


@dataclass(slots=True)
class Trees:
    """The layers of a workspace, held.

    Attributes:
        base: the base alone.
        merged: all of them.
        base_fd: of the base's top.
        upper_fd: of the top of the first layer.
        is_sealed: that is no upper, but a sealed layer.
    """

    base: LayeredTree
    merged: LayeredTree
    base_fd: int
    upper_fd: int
    is_sealed: bool = False


class Workspace:
    """One workspace, held for one command; to be used in a ``with``.

    Args:
        state_dir: where workspaces live.
        name: of this one.
        patience_s: how long to wait for another command's end.

    Raises:
        WorkspaceError: there is none, or another command works on it.
    """

    def __init__(self, state_dir: str, name: str, patience_s: float = 0.0) -> None:
        path = path_of(state_dir, name)
        self.directory = WorkspaceDirectory(path, name, patience_s)
        self.state_dir = state_dir
        self.store = LayerStore(state_dir)
        self.has_room = True
        """Whether the last look could be recorded."""
        self.aside: dict[bytes, bytes] = {}
        """What a commit that was undone could not bring back: path -> path where it is."""
        self.has_redirects = True
        """Whether the last look met a directory that points to another one."""
        try:
            self.state = self.directory.read_state()
            if self.state.outgoing:
                branches.finish_retreat(self)
        except BaseException:
            self.directory.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.directory.close()

    @property
    def name(self) -> str:
        """Return its name."""
        return self.directory.name

    def changes(self, patterns: Patterns | None = None) -> list[Row]:
        """Return what was changed, and record what the base has there.

        Args:
            patterns: what to look at; None for everything.

        Raises:
            NoMatchError: a pattern names nothing.
            OSError: something cannot be read.
        """
        with self.trees() as trees:
            rows = self._look(trees)
            self._record_if_room(trees, rows)
            self.has_redirects = trees.merged.has_redirects
            if not patterns:
                return rows
            _check_matches((patterns,), rows, trees.base)
            return choose_rows(rows, Selection(only=patterns), trees.base)

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
            rows = self.rows(trees, with_renames=False)
            if patterns:
                _check_matches((patterns,), rows, trees.base)
                rows = choose_rows(rows, Selection(only=patterns), trees.base)
            yield from write_patch(trees.base, trees.merged, rows, binary=binary)

    def commit(
        self, selection: Selection, *, is_dry: bool = False, is_frozen: bool = False
    ) -> CommitResult:
        """Bring changes to the base: what is chosen, or nothing of it.

        Args:
            selection: what is chosen.
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
            tried = self._commit(selection, is_dry=True)
            if not tried.applied and not selection.mine:
                return tried
            branches.unite(self)
        result = self._commit(selection, is_dry=is_dry)
        if not is_dry:
            with contextlib.suppress(OSError):  # it is tried again by the next command
                self._prune_later()  # of which this commit may have settled the rest
                self.sweep_store()
        return result

    def _commit(self, selection: Selection, *, is_dry: bool) -> CommitResult:
        with self.trees(for_commit=not is_dry) as trees:
            rows: list[Row] = []
            try:
                rows = self._look(trees)
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
        patterns = (selection.only, selection.but, selection.theirs, selection.mine)
        _check_matches(patterns, rows, trees.base)
        self._check_allowed(trees, rows, selection.allow)
        judge = self.judge(trees)
        chosen = choose_rows(rows, selection, trees.base)
        chosen, dropped = _sides(chosen, selection)
        guarded, hidden = self._guarded(trees, chosen, selection)
        conflicts = _conflicts(judge, chosen, selection)
        merges: dict[bytes, MergedFile] = {}
        if selection.merges:
            merger = Merger(trees.base, trees.merged, rows)
            merges, conflicts = self._merge(merger, judge, chosen, conflicts)
        self._check_layer_stays(chosen, dropped, merges)
        _check_shows(trees, dropped)
        is_refused = guarded or (conflicts and not selection.skips_conflicts)
        left_out = {found.path for found in conflicts}
        chosen = [] if is_refused else _without(chosen, left_out)
        applied = {row.path for row in chosen}
        merges = {path: one for path, one in merges.items() if path in applied}
        if not is_dry:
            self._record_if_room(trees, rows)
            if chosen:
                in_use = bool(self.directory.user())
                what = Chosen(chosen, merges, _places(dropped), in_use)
                again = partial(self._judge_again, trees, chosen, selection, merges)
                try:
                    update = self.judge(trees).update_by_commit(chosen, rows)
                    self._committer(trees).commit(trees.merged, what, update, again)
                except (BaseChangedError, GoneError) as why:
                    conflicts = [*conflicts, Conflict(why.path, why.reason)]
                    conflicts += self._aside()
                    applied = set()
                    merges = {}
            elif not is_refused:  # this takes no room, but makes some
                drop_changes(trees.upper_fd, dropped)
        left = [row.path for row in rows if row.path not in applied]
        return CommitResult(
            tuple(sorted(applied)),
            tuple(conflicts),
            tuple(guarded),
            tuple(left),
            tuple(sorted(merges)),
            frozenset(hidden),
        )

    def _aside(self) -> list[Conflict]:
        """Return as conflicts what a commit that was undone could not bring back."""
        text = "its place was taken meanwhile, and what was there is now"
        return [
            Conflict(path, f"{text} {os.fsdecode(aside)!r}")
            for path, aside in self.aside.items()
        ]

    def _merge(
        self,
        merger: Merger,
        judge: Judge,
        rows: Sequence[Row],
        conflicts: Sequence[Conflict],
    ) -> tuple[dict[bytes, MergedFile], list[Conflict]]:
        """Merge what is in conflict; return what was merged, and what was not.

        Raises:
            NoGitError: there is no git.
        """
        by_path = {row.path: row for row in rows}
        merges: dict[bytes, MergedFile] = {}
        left = []
        for conflict in conflicts:
            row = by_path[conflict.path]
            if not row.is_edit:
                left.append(conflict)
                continue
            try:
                merges[row.path] = merger.merge(row, *self._begun(judge, row))
            except CannotMergeError as why:
                left.append(Conflict(row.path, f"{conflict.reason}; {why}"))
        return merges, left

    def _begun(self, judge: Judge, row: Row) -> tuple[bytes, int]:
        """Return the text that both sides of a row began from, and its mode.

        Raises:
            CannotMergeError: it is not kept.
        """
        seen = judge.seen_text(row)
        if seen is not None:
            with self._opened_texts() as texts:
                begun = read_text(texts, seen.text)
            if begun is not None:
                return begun, seen.mode
        raise CannotMergeError("no text that both began from is kept")

    def _judge_again(
        self,
        trees: Trees,
        chosen: Sequence[Row],
        selection: Selection,
        merges: Mapping[bytes, MergedFile],
    ) -> None:
        """Judge what a commit takes by the base of now, which may have changed since.

        Raises:
            BaseChangedError: something is in conflict.
        """
        for path, merged in merges.items():
            if not merged.is_of(trees.base.find(path)):
                raise BaseChangedError(path, "it was changed in the base")
        taken = {row.path for row in chosen}
        rows = choose_rows(self.rows(trees), selection, trees.base)
        judge = self.judge(trees)
        rows = [
            row
            for row in rows
            if row.path in taken
            and not (row.path in merges and judge.seen_text(row) is not None)
        ]
        conflicts = _conflicts(judge, rows, selection)
        if conflicts:
            raise BaseChangedError(conflicts[0].path, conflicts[0].reason)

    def _check_layer_stays(
        self, chosen: Sequence[Row], dropped: Sequence[Row], merged: Iterable[bytes]
    ) -> None:
        """Refuse what changes the layer, if a child has it.

        Raises:
            InUseError: there is such a thing.
        """
        works = [("drop", row.path) for row in dropped]
        works += [("merge", path) for path in merged]
        works += [("move", row.path) for row in chosen if row.origin is not None]
        if works and self.directory.user():
            what, path = works[0]
            text = f"cannot {what} {os.fsdecode(path)!r}: a child has the workspace"
            raise InUseError(f"{text}; wait for its end, or leave it with --except")

    def finish_commit(self) -> bool | None:
        """End a commit that a crash interrupted, and what one left for a child's end.

        Returns:
            Whether its changes are in the base now; None if there was none.

        Raises:
            OSError: it cannot be ended now.
        """
        is_applied = self._end_cut_commit()
        # Only now: what the base has of a commit that is undone yet may go again.
        self._prune_later()
        return is_applied

    def _end_cut_commit(self) -> bool | None:
        """End a commit that a crash interrupted; return as ``finish_commit``."""
        data = self.directory.read("commit")
        if data is None:
            return None
        journal = msgspec.msgpack.decode(data, type=CommitJournal)
        with self.trees(for_commit=True) as trees:
            try:
                return self._committer(trees).end_cut(journal)
            except BaseChangedError:
                return False

    def text_of_undone(self) -> str:
        """Return what ``finish_commit`` has made of the base when it undid a commit."""
        texts = [f"{os.fsdecode(one.path)!r}: {one.reason}" for one in self._aside()]
        return "; ".join(texts) or "the base is as it was"

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the processes of the child that has it, until the block ends.

        Without a child there is nothing to stop.

        Raises:
            FreezeError: they cannot be stopped.
        """
        if not self.directory.user():
            yield
            return
        device = self.directory.mount_device()
        if device is None:
            raise FreezeError("cannot stop the child: it is being started; try again")
        with guarded_stop(device, self.directory.processes()):
            yield

    def idle_state(self) -> str:
        """Return ``idle``, or ``left behind`` if the host of the last run died."""
        return "left behind" if self.state.is_running else "idle"

    def is_cut_off(self) -> bool:
        """Tell whether its last run (durable = false) was cut off before its layer was synced.

        The next start clears what tells it, and says so.
        """
        return not self.directory.user() and self.directory.find_volatile_mark()

    def discard(self) -> None:
        """Remove the workspace and all that was changed in it.

        Raises:
            InUseError: a child has it.
        """
        self.directory.check_idle()
        with contextlib.suppress(BaseGoneError):
            self.finish_commit()
        self.directory.remove()
        self.store.sweep()

    def snapshot(
        self, label: str | None = None, *, of_checkpoint: bool = False
    ) -> Snapshotted:
        """Seal what was changed so far under a label; a new upper begins.

        Args:
            label: of the snapshot; None for the next number.
            of_checkpoint: its child has asked for it; of these as many are kept again.

        Raises:
            WorkspaceError: the label is taken or is none, or it cannot be sealed.
        """
        return branches.take_snapshot(self, label, of_checkpoint=of_checkpoint)

    def drop_snapshot(self, label: str) -> bool:
        """Forget a snapshot; tell whether it was there."""
        return branches.drop_snapshot(self, label)

    def restore_later(self, label: str) -> None:
        """Go back to a snapshot before the next run, for a child that runs now.

        Raises:
            WorkspaceError: there is no such snapshot.
        """
        branches.find_snapshot(self, label)
        self.state.goes_back_to = label
        self.directory.write_state(self.state)

    def finish_restore(self) -> WentBack | None:
        """Go back to what ``restore_later`` was asked for; None if that is nothing.

        Raises:
            InUseError: a child has the workspace.
        """
        return branches.finish_restore(self)

    def changes_since(self, label: str) -> list[Row]:
        """Return what differs now from a snapshot.

        Raises:
            WorkspaceError: there is no such snapshot.
        """
        return branches.changes_since(self, label)

    def restore(self, label: str) -> int:
        """Go back to a snapshot.

        Returns:
            How many paths differ from what was there before.

        Raises:
            WorkspaceError: there is no such snapshot.
            InUseError: a child has the workspace.
        """
        return branches.go_back(self, label)

    def fork(self, count: int = 1) -> list[str]:
        """Make workspaces that begin as this one is now; return their names.

        Raises:
            WorkspaceError: this one cannot be sealed.
        """
        return branches.fork(self, count)

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
        from supervisor.workspace.export import form_of, written_whole  # noqa: PLC0415

        form = form_of(path)
        with written_whole(path, replaces=replaces) as file:
            self.write_export(form, file)

    def write_export(self, form: Form, file: IO[bytes]) -> None:
        """Write the changes to an open file, in a form of ``export``.

        Raises:
            WorkspaceError: a path cannot be said in that form.
            NoGitError: text was modified, and there is no git.
        """
        from supervisor.workspace.export import writer_of  # noqa: PLC0415 - tarfile

        with self.trees() as trees:
            rows = self.rows(trees, with_renames=False)
            writer_of(form)(trees.base, trees.merged, rows, file)

    def compare_with(self, other: Workspace) -> list[Row]:
        """Return what another workspace of the same base has differently.

        Raises:
            WorkspaceError: it has another base.
        """
        with self._beside(other) as (mine, theirs):
            return compare_views(mine, theirs)

    def patch_to(self, other: Workspace, *, binary: bool = False) -> Iterator[bytes]:
        """Yield a patch from this workspace to another one of the same base."""
        with self._beside(other) as (mine, theirs):
            rows = compare_views(mine, theirs)
            yield from write_patch(mine, theirs, rows, binary=binary)

    @contextlib.contextmanager
    def _beside(self, other: Workspace) -> Iterator[tuple[LayeredTree, LayeredTree]]:
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
        # Before the look: what changes in the base meanwhile counts as changed in the run.
        started_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        with self.trees() as trees:
            self._record_seen(trees, self._look(trees))
            walked_s = self._hide_names(trees.base_fd)
        self.state.started_ns = started_ns
        self.state.is_running = True
        self.state.may_redirect = True
        self.directory.write_state(self.state)
        return walked_s

    def _hide_names(self, base: int) -> float | None:
        hide = self.state.settings.hide
        if not hide and not has_layer(self.directory):
            return None
        self.state.hidden = tuple(dict.fromkeys((*self.state.hidden, *hide)))
        began_s = time.monotonic()
        try:
            write_layer(self.directory, base, find_hidden(base, hide))
        except OSError as why:
            text = f"cannot hide names of {os.fsdecode(self.state.base)!r}"
            how = "leave --hide out, or run as the owner of all directories above them"
            raise WorkspaceError(f"{text}: {why.strerror}; {how}") from None
        return time.monotonic() - began_s if walks(hide) else None

    def end_run(self) -> list[Row]:
        """Record what was changed when a run has ended; return it.

        If the mount synced nothing, the layer is synced now.
        """
        rows = self.changes()
        if self.directory.find_volatile_mark():
            sync_file_system(self.directory.fd)
            self.directory.clear_volatile_mark()
        self.state.is_running = False
        self.state.may_redirect = self.has_redirects
        self.directory.write_state(self.state)
        return rows

    def open_base(self) -> int:
        """Open the base's top.

        Raises:
            BaseGoneError: it is not there, or another directory is.
        """
        shown = os.fsdecode(self.state.base)
        try:
            fd = os.open(self.state.base, _DIRECTORY)
        except OSError as why:
            text = f"cannot open the base {shown!r}: {why.strerror}"
            raise BaseGoneError(
                f"{text}; put it back, or discard the workspace"
            ) from None
        if not self._is_base(fd):
            os.close(fd)
            text = f"cannot use the base {shown!r}: another directory is there now"
            raise BaseGoneError(
                f"{text}; put the old one back, or discard the workspace"
            )
        return fd

    def _is_base(self, fd: int) -> bool:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (self.state.device, self.state.inode):
            return False
        return self.state.born_ns in {None, read_birth_time_ns(fd)}

    @contextlib.contextmanager
    def trees(self, *, for_commit: bool = False) -> Iterator[Trees]:
        """Hold the layers.

        Args:
            for_commit: what a commit takes from: of a workspace with sealed layers the
                newest of them, which is its own then, and has its upper's content.

        Raises:
            WorkspaceError: one of them is not there.
        """
        base = self.open_base()
        try:
            upper = os.open("upper", _DIRECTORY, dir_fd=self.directory.fd)
            try:
                with self.store.opened(self.state.layers) as sealed:
                    is_sealed = for_commit and bool(sealed)
                    tops = (*sealed, base) if is_sealed else (upper, *sealed, base)
                    merged = LayeredTree(tops, self.state.marks)
                    alone = LayeredTree((base,))
                    yield Trees(alone, merged, base, tops[0], is_sealed)
            finally:
                os.close(upper)
        finally:
            os.close(base)

    def _look(self, trees: Trees) -> list[Row]:
        """Return what was changed.

        If no child runs, what the layer says of base objects that were moved is taken
        from it, once that is recorded.
        """
        rows = self.rows(trees)
        if trees.is_sealed:
            return rows
        judge = self.judge(trees)
        pointers, others = judge.strays(rows)
        if not (pointers or others) or self.directory.user():
            return rows
        # What is where one was counts as removed from then on, and the child moved it.
        torn = (*pointers, *filter(None, pointers.values()))
        self.save_record(self.record() | dict.fromkeys(torn, CHANGED))
        self._record_seen(trees, rows)
        detach(trees.upper_fd, self.state.marks, [*pointers, *others])
        return self.rows(trees)

    def record(self) -> Record:
        """Return what the base had when the workspace first saw it."""
        data = self.directory.read("record")
        return {} if data is None else load_record(data)

    def judge(self, trees: Trees) -> Judge:
        """Return a judge of what the base has changed as well."""
        started_ns = self.state.started_ns
        origins = load_origins(self.directory) if self.state.hidden else {}
        return Judge(
            trees.base,
            trees.merged,
            self.record(),
            started_ns,
            origins,
            is_running=bool(self.directory.user()),
        )

    def rows(self, trees: Trees, *, with_renames: bool = True) -> list[Row]:
        """Return what was changed, without what is hidden."""
        rows = compare(trees.base, trees.merged, with_renames=with_renames)
        return visible_rows(rows, self.hide, trees.base, trees.merged.base_layer)

    def save_record(self, record: Record) -> None:
        """Keep what the base had."""
        self.directory.write("record", save_record(record))

    def _record_if_room(self, trees: Trees, rows: Sequence[Row]) -> None:
        """Record it if the disk has room: without a record times decide (spec WS11).

        So a workspace that has filled its disk can be looked at, and a part of it dropped.
        """
        try:
            self._record_seen(trees, rows)
        except OSError as why:
            if why.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            self.has_room = False

    def _record_seen(self, trees: Trees, rows: Sequence[Row]) -> None:
        """Record what the base has where it was changed, and keep the texts of it."""
        record = self.judge(trees).update(rows)
        kept = rows_to_keep(rows, record)
        if kept:
            with self._opened_texts() as texts:
                keep_texts(texts, trees.base, kept, record)
        self.save_record(record)

    @contextlib.contextmanager
    def _opened_texts(self) -> Iterator[int]:
        """Give a descriptor of the directory of the kept texts, made if there is none."""
        with self.store.hold() as store:
            name = self.state.texts or new_layer_id()
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=store)
            if not self.state.texts:
                self.state.texts = name
                self.directory.write_state(self.state)
            texts = os.open(name, _DIRECTORY, dir_fd=store)
            try:
                yield texts
            finally:
                os.close(texts)

    def sweep_store(self) -> None:
        """Remove the layers that no workspace names, and the texts that no record does."""
        self.store.sweep()
        own = self.state.texts
        try:
            shared = [state.texts for state in read_states(self.state_dir)]
        except WorkspaceError:  # the state of one is damaged, which may be a fork
            return
        if not own or shared.count(own) > 1:
            return  # a fork's records may name some
        with self._opened_texts() as texts:
            drop_texts(texts, branches.texts_named(self))

    def _committer(self, trees: Trees) -> Committer:
        def save(journal: CommitJournal | None) -> None:
            if journal and journal.is_in_use and journal.state == "applying":
                # Before the first step: the child marks nothing that it removes in these.
                new = journal.put_paths()
                mark_opaque(trees.upper_fd, self.state.marks, new)
            data = None if journal is None else msgspec.msgpack.encode(journal)
            self.directory.write("commit", data)

        settle = partial(self._settle, trees)
        return Committer(trees.base_fd, self.directory.fd, save, settle)

    def _settle(self, trees: Trees, journal: CommitJournal) -> None:
        """Take what was applied from the layer, and record it as seen."""
        if journal.state == "undone":
            self.aside = journal.aside
            if journal.is_in_use:
                self._restore_marks(trees, journal)
                self._leave_for_later(_hiding_nothing(trees, journal))
            self._settle_undone(trees, journal)
            return
        paths = list(dict.fromkeys(step.path for step in journal.steps))
        if self.directory.user():  # a mounted layer is not to be changed from outside
            self._leave_for_later(paths)
        else:
            tops = (trees.upper_fd, trees.base_fd)
            remove_merged(trees.upper_fd, journal.merged)
            moved = [
                step.goes_to
                for step in journal.steps
                if isinstance(step, Take) and step.goes_to is not None
            ]
            remove_committed(*tops, self.state.marks, paths, journal.dropped, moved)
        record = self.record()
        self._record_applied(record, trees, journal, paths)
        _forget_gone(record, trees.base, journal)
        _record_above(record, trees, paths)
        _record_left(record, journal.update.left)
        _record_around(record, trees.base, journal.update.around)
        linked = journal.update.linked
        for row in compare(trees.base, trees.merged) if linked else ():
            if row.path in linked:
                record[row.path] = look_at_base(trees.base, row)
        self.save_record(record)

    def _record_applied(
        self,
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

    def _left_for_later(self) -> list[bytes]:
        """Return the paths that were committed while a child had the layer."""
        data = self.directory.read(_LATER)
        return [] if data is None else msgspec.msgpack.decode(data, type=list[bytes])

    def _leave_for_later(self, paths: Sequence[bytes]) -> None:
        """Have paths leave the layer when no child has it."""
        if paths:
            later = dict.fromkeys((*self._left_for_later(), *paths))
            self.directory.write(_LATER, msgspec.msgpack.encode(list(later)))

    def _prune_later(self) -> None:
        """Take from the layer what it needs no more, of commits while a child had it."""
        later = self._left_for_later()
        if not later or self.directory.user():
            return
        if self.state.layers:
            # What was left is sealed in these, and what hides it over them has to stay.
            self.directory.write(_LATER, None)
            return
        with self.trees() as trees:
            # What has changed again is needed, and so are the marks of the directories
            # above it: something may have been removed there since.
            rows = compare(trees.base, trees.merged)
            changed = with_parents(row.path for row in rows)
            paths = [path for path in later if path not in changed]
            remove_committed(trees.upper_fd, trees.base_fd, self.state.marks, paths)
        left = [path for path in later if path in changed]
        self.directory.write(_LATER, msgspec.msgpack.encode(left) if left else None)

    def _settle_undone(self, trees: Trees, journal: CommitJournal) -> None:
        """Record the times of what was moved and brought back: the moves changed them."""
        record = self.record()
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
        self.save_record(record)

    def _restore_marks(self, trees: Trees, journal: CommitJournal) -> None:
        """Let a layer show again what it does over the base without the commit.

        What the child removed stays so: where it made something anew, or made and removed
        it, while the base had nothing there, it has marked nothing.
        """
        put = journal.put_paths()
        missing = [path for path in put if trees.base.find(path) is None]
        unmark_opaque(trees.upper_fd, self.state.marks, missing)
        taken = {step.path for step in journal.steps if isinstance(step, Take)}
        places = _places_of(trees.merged, taken)
        mark_opaque(trees.upper_fd, self.state.marks, places)
        shown = [path for path in places if _shows_any(trees.merged, path, taken)]
        put_whiteouts(trees.upper_fd, shown)

    def _guarded(
        self, trees: Trees, rows: Sequence[Row], selection: Selection
    ) -> tuple[list[bytes], list[bytes]]:
        """Return what a commit does not take, and what of that no --allow changes."""
        hide = self.hide
        never = [path for row in rows for path in hidden_paths(row, hide, trees.base)]
        guarded = self._guarded_paths(trees, rows)
        found = [path for path in guarded if not selection.allow.match(path)]
        return sorted({*found, *never}), never

    def _guarded_paths(self, trees: Trees, rows: Sequence[Row]) -> list[bytes]:
        guard = Guard((*self.state.settings.guard, *self.state.hidden))
        both, top = (trees.base, trees.merged), self.state.base
        return [path for row in rows for path in guarded_paths(row, guard, both, top)]

    def _check_allowed(
        self, trees: Trees, rows: Sequence[Row], allow: Patterns
    ) -> None:
        """Refuse a pattern of --allow that names nothing that has changed.

        Raises:
            NoMatchError: there is one.
        """
        if not rows:
            return  # nothing to commit is no fault
        paths = list(changed_paths(rows, trees.base)) if allow else []
        unmatched = allow.unmatched(paths)
        if unmatched:  # what lies in a renamed directory has no row of its own
            guarded = [(path, False) for path in self._guarded_paths(trees, rows)]
            unmatched = Patterns(unmatched).unmatched(guarded)
        if unmatched:
            raise _no_match("allow", unmatched[0])

    @property
    def hide(self) -> Patterns:
        """Return the patterns of what is hidden from a child, or was at some time."""
        return Patterns(self.state.hidden)


def _written_in(seen: Seen, directory: Node) -> Seen:
    """Return what is seen of a directory that a commit has written in."""
    return msgspec.structs.replace(seen, ctime_ns=directory.status.st_ctime_ns)


def _has_facts_of(old: Node | None, new: Node) -> bool:
    """Tell whether the base's object is what was put there, and was not changed since."""
    if old is None or old.status.st_mode != new.status.st_mode:
        return False
    facts = [(one.status.st_size, one.status.st_mtime_ns) for one in (old, new)]
    return new.is_directory or facts[0] == facts[1]


def _forget_gone(record: Record, base: LayeredTree, journal: CommitJournal) -> None:
    """Take from a record what went with a directory that a commit has taken away."""
    gone = tuple(step.path + b"/" for step in journal.steps if takes_directory(step))
    for path in [path for path in record if path.startswith(gone)]:
        if base.find(path) is None:
            del record[path]


def _record_left(record: Record, left: Mapping[bytes, bytes]) -> None:
    """Record what a commit has left in directories that the workspace has no more."""
    for path, inside in left.items():
        if path not in record:
            continue
        record[path] = msgspec.structs.replace(record[path], inside=inside)
        # What was seen of a directory in it is a part of that.
        for other in [other for other in record if other.startswith(path + b"/")]:
            if record[other].inside:
                del record[other]


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
        last = node.parts[-1]
        if last.layer == merged.base_layer:
            found += (join(node.path, name) for name in names.get(last.path, ()))
        with merged.read(node) as reader:
            inner = map(reader.look_up, reader.names_above_base())
            pending += (one for one in inner if one is not None and one.is_directory)
    return found


def _shows_any(merged: LayeredTree, path: bytes, of_base: Collection[bytes]) -> bool:
    """Tell whether a path shows one of some objects of the base, and nothing of a layer."""
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


def _record_around(
    record: Record, base: LayeredTree, around: Mapping[bytes, Seen]
) -> None:
    """Record when a commit has written in directories, of which a child has the layer."""
    for path, seen in around.items():
        old = base.find(path)
        known = record.setdefault(path, seen)
        if old is not None and (known.kind, known.inode) == (seen.kind, seen.inode):
            record[path] = _written_in(known, old)


def _record_above(record: Record, trees: Trees, paths: Sequence[bytes]) -> None:
    """Record anew the directories that were made anew: what is new there is a commit's.

    What is the operator's has rows of its own: such a directory shows nothing of the base.
    """
    for path in with_parents(paths).difference(paths) & record.keys():
        node, seen = trees.base.find(path), record[path]
        new = trees.merged.find(path)
        if not seen.inside or node is None or new is None or not new.is_directory:
            continue
        if node.status.st_ino == seen.inode:
            record[path] = seen_of(trees.base, node, is_whole=True)


def _check_shows(trees: Trees, dropped: Sequence[Row]) -> None:
    """Refuse to drop what would hide the base's side instead of showing it.

    Raises:
        WorkspaceError: there is such a thing, in a directory that was made anew or removed.
    """
    for row in dropped:
        if row.old is None or row.origin is not None:
            continue
        directory = trees.merged.find(split(row.path)[0])
        if directory is None or directory.parts[-1].layer != trees.merged.base_layer:
            text = f"cannot drop {os.fsdecode(row.path)!r}: its directory was made anew"
            raise WorkspaceError(f"{text} or removed; leave it with --except")


def _check_matches(
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
            raise _no_match("choose", unmatched[0])


def _no_match(verb: str, pattern: str) -> NoMatchError:
    text = f"cannot {verb} {pattern!r}: no changed path is named so"
    return NoMatchError(f"{text}; see 'sandhost workspace diff --name-only'")


def _conflicts(
    judge: Judge, rows: Sequence[Row], selection: Selection
) -> list[Conflict]:
    found = []
    for row in rows:
        reason = judge.conflict(row)
        if reason and not _is_named(selection.theirs, row):
            found.append(Conflict(row.path, reason))
    return found


def _places(rows: Sequence[Row]) -> list[bytes]:
    """Return where the layer has something of rows: a renamed directory also where it was."""
    found = [row.path for row in rows]
    return found + [row.origin for row in rows if row.origin is not None]


def _is_named(patterns: Patterns, row: Row) -> bool:
    """Tell whether a row's path is named, also as a directory, there or in the base."""
    sides = (row.new, row.old)
    is_directory = any(side is not None and side.is_directory for side in sides)
    return patterns.match(row.path, is_directory=is_directory)


def _sides(rows: Sequence[Row], selection: Selection) -> tuple[list[Row], list[Row]]:
    """Return the rows to apply, and those of which the base's side wins."""
    mine = [row for row in rows if _is_named(selection.mine, row)]
    return [row for row in rows if row not in mine], mine


def _without(rows: Sequence[Row], left: set[bytes]) -> list[Row]:
    """Return rows but those that are left, and what cannot be without them."""
    kept: list[Row] = []
    origins = {row.origin for row in rows if row.path in left and row.origin}
    for row in rows:
        path = row.path
        is_left = path in left
        while path and not is_left:
            path, _ = split(path)
            is_left = path in left and path != b""
        gone = row.path if row.origin is None else row.origin
        takes = any(origin.startswith(gone + b"/") for origin in origins)
        if not is_left and not takes:
            kept.append(row)
    return kept
