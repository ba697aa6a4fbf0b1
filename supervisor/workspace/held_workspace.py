"""A workspace held for one command: its directory, state, layers and records.

Commits (``commit``) and branches (``branches``) stand on it, and ``workspace`` joins them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.workspace.changes import Row, compare
from supervisor.workspace.directory import (
    BaseGoneError,
    Top,
    WorkspaceDirectory,
    WorkspaceError,
    path_of,
    read_states,
    read_top,
)
from supervisor.workspace.freeze import FreezeError, guarded_stop
from supervisor.workspace.hidden_files import load_origins, visible_rows
from supervisor.workspace.judge import Judge
from supervisor.workspace.layer_store import LayerStore, new_layer_id
from supervisor.workspace.layers import LayeredTree
from supervisor.workspace.linux import read_birth_time_ns
from supervisor.workspace.origins import Origins
from supervisor.workspace.record import CHANGED, RecordFiles
from supervisor.workspace.selection import Patterns
from supervisor.workspace.texts import drop_texts, keep_texts, rows_to_keep
from supervisor.workspace.upper import detach

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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


class HeldWorkspace:
    """One workspace, which no other command works on until ``close``.

    Args:
        patience_s: how long to wait for another command's end.

    Attributes:
        state_dir: where workspaces live.
        directory: of this one.
        state: its description; a change is written by the code that makes it.
        store: of the sealed layers.
        records: of what the base had.
        has_room: whether the last look could be recorded.
        has_redirects: whether the last look met a directory that points to another one.

    Raises:
        WorkspaceError: there is none, or another command works on it.
    """

    def __init__(self, state_dir: str, name: str, patience_s: float) -> None:
        path = path_of(state_dir, name)
        self.state_dir = state_dir
        self.directory = WorkspaceDirectory(path, name, patience_s)
        self.store = LayerStore(state_dir)
        self.records = RecordFiles(self.directory)
        self.has_room = True
        self.has_redirects = True
        try:
            self.state = self.directory.read_state()
        except BaseException:
            self.directory.close()
            raise

    def close(self) -> None:
        """Let other commands work on it."""
        self.directory.close()

    @property
    def name(self) -> str:
        """Return its name."""
        return self.directory.name

    @property
    def hide(self) -> Patterns:
        """Return the patterns of what is hidden from a child, or was at some time."""
        return Patterns(self.state.hidden)

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
        first = self.directory.processes()
        with guarded_stop(device, first, self.directory.fd):
            yield

    def open_base(self) -> int:
        """Open the base's top.

        Raises:
            BaseGoneError: it is not there, or another directory is.
        """
        shown = os.fsdecode(self.state.base)
        try:
            fd = os.open(self.state.base, DIRECTORY)
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
            for_commit: those that a commit takes: of a workspace with sealed layers the
                newest of them, which is its own then, and has its upper's content.

        Raises:
            WorkspaceError: one of them is not there.
        """
        with (
            closing_fd(self.open_base()) as base,
            closing_fd(os.open("upper", DIRECTORY, dir_fd=self.directory.fd)) as upper,
            self.store.open_layers(self.state.layers) as sealed,
        ):
            is_sealed = for_commit and bool(sealed)
            tops = (*sealed, base) if is_sealed else (upper, *sealed, base)
            merged = LayeredTree(tops, self.state.marks)
            alone = LayeredTree((base,))
            yield Trees(alone, merged, base, tops[0], is_sealed)

    def top_below(self, store: int, layers: Sequence[str]) -> Top:
        """Return the top of what an upper lies on."""
        if layers:
            below = os.open(layers[0], DIRECTORY, dir_fd=store)
        else:
            below = self.open_base()
        with closing_fd(below):
            return read_top(below)

    def changes(self, trees: Trees) -> list[Row]:
        """Return what was changed, and record what the base has there."""
        rows = self.look(trees)
        self.record_if_room(trees, rows)
        self.has_redirects = trees.merged.has_redirects
        return rows

    def look(self, trees: Trees) -> list[Row]:
        """Return what was changed.

        If no child runs, what the layer says of base objects that were moved is taken
        from it, once that is recorded.
        """
        rows = self.rows(trees)
        if trees.is_sealed:
            return rows
        pointers, others = self._origins(trees).strays(rows)
        if not (pointers or others) or self.directory.user():
            return rows
        # An object in the place of one counts as removed from then on, and the child
        # moved it.
        torn = (*pointers, *filter(None, pointers.values()))
        self.records.save(self.records.load() | dict.fromkeys(torn, CHANGED))
        self.record_seen(trees, rows)
        detach(trees.upper_fd, self.state.marks, [*pointers, *others])
        return self.rows(trees)

    def rows(self, trees: Trees, *, with_renames: bool = True) -> list[Row]:
        """Return what was changed, without what is hidden."""
        rows = compare(trees.base, trees.merged, with_renames=with_renames)
        return visible_rows(rows, self.hide, trees.base, trees.merged.base_layer)

    def judge(self, trees: Trees) -> Judge:
        """Return a judge of what the base has changed as well."""
        return Judge(
            trees.base,
            trees.merged,
            self.records.load(),
            self.state.started_ns,
            self._origins(trees),
            is_running=bool(self.directory.user()),
        )

    def _origins(self, trees: Trees) -> Origins:
        stand_ins = load_origins(self.directory) if self.state.hidden else {}
        started_ns = self.state.started_ns
        return Origins(trees.base, trees.merged, started_ns, stand_ins)

    def record_if_room(self, trees: Trees, rows: Sequence[Row]) -> None:
        """Record it if the disk has room: without a record times decide (spec WS11).

        So a workspace that has filled its disk can be looked at, and a part of it dropped.
        """
        try:
            self.record_seen(trees, rows)
        except OSError as why:
            if why.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            self.has_room = False

    def record_seen(self, trees: Trees, rows: Sequence[Row]) -> None:
        """Record what the base has where it was changed, and keep the texts of it."""
        record = self.judge(trees).update(rows)
        kept = rows_to_keep(rows, record)
        if kept:
            with self.open_texts() as texts:
                keep_texts(texts, trees.base, kept, record)
        self.records.save(record)

    @contextlib.contextmanager
    def open_texts(self) -> Iterator[int]:
        """Give a descriptor of the directory of the kept texts, made if there is none."""
        with self.store.hold() as store:
            name = self.state.texts or new_layer_id()
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=store)
            if not self.state.texts:
                self.state.texts = name
                self.directory.write_state(self.state)
            with closing_fd(os.open(name, DIRECTORY, dir_fd=store)) as texts:
                yield texts

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
        with self.open_texts() as texts:
            drop_texts(texts, self.records.texts_named(self.state.labels()))
