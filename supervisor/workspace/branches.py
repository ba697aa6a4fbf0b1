"""Snapshots and forks: an upper layer becomes a sealed one, or goes away.

Rules:
 1. The state names the layers first, in one write, and as which layer the upper goes
    away. Then the upper goes, by one rename, and a new one is made. The next command
    that opens the workspace does what a crash or a power cut has left of that.
 2. A layer that no state names is dropped, so an upper that is to be lost goes the same
    way.

Precondition of each: no commit is cut. ``Workspace`` ends one before.

Spec WS12a, WS15.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from supervisor.workspace.changes import Row, compare, compare_views
from supervisor.workspace.directory import (
    Snapshot,
    State,
    WorkspaceError,
    make_from_state,
    make_upper,
    path_of,
)
from supervisor.workspace.hidden_files import share_origins
from supervisor.workspace.layer_store import new_layer_id
from supervisor.workspace.layers import LayeredTree
from supervisor.workspace.linux import has_entry
from supervisor.workspace.seal import SealedLayers, seal, write_united

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.workspace.held_workspace import HeldWorkspace

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """The outcome of a snapshot.

    Attributes:
        label: of the snapshot.
        copied_bytes: how much was copied, by data or by reference.
        stopped_ns: how long the child's processes were stopped.
    """

    label: str
    copied_bytes: int = 0
    stopped_ns: int = 0


@dataclass(frozen=True, slots=True)
class Rollback:
    """The outcome of going back to a snapshot.

    Attributes:
        label: of the snapshot.
        lost: how many paths differ from what was there before.
    """

    label: str
    lost: int


def take_snapshot(
    held: HeldWorkspace, label: str | None, *, of_checkpoint: bool = False
) -> SnapshotResult:
    """Seal what was changed so far under a label; as ``Workspace.snapshot``."""
    state = held.state
    chosen = _next_label(state.snapshots) if label is None else label
    if not _LABEL.fullmatch(chosen):
        text = f"cannot use the label {chosen!r}: it is not {_LABEL.pattern}"
        raise WorkspaceError(f"{text}; choose another")
    if state.snapshot(chosen) is not None:
        text = f"cannot use the label {chosen!r}: there is a snapshot of it"
        raise WorkspaceError(f"{text}; choose another")
    with held.store.hold() as store:
        sealed = seal(held, store)
        now_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        made = Snapshot(chosen, sealed.layers, now_ns, of_checkpoint)
        gone = _find_outlived((*state.snapshots, made), state)
        kept = (one for one in (*state.snapshots, made) if one not in gone)
        state.snapshots = tuple(kept)
        held.records.keep_for(chosen, sealed.record)
        _take_layers(held, sealed)
    for snapshot in gone:
        held.records.drop_for(snapshot.label)
    if gone:
        held.sweep_store()
    return SnapshotResult(chosen, sealed.copied_bytes, sealed.stopped_ns)


def _find_outlived(snapshots: Sequence[Snapshot], state: State) -> list[Snapshot]:
    """Return the snapshots that are too many; those of checkpoints count apart."""
    gone: list[Snapshot] = []
    for kind in (False, True):
        some = [one for one in snapshots if one.of_checkpoint is kind]
        gone += some[: -max(1, state.settings.keep)]
    return [one for one in gone if one.label != state.goes_back_to]


def drop_snapshot(held: HeldWorkspace, label: str) -> bool:
    """Forget a snapshot; tell whether it was there."""
    state = held.state
    found = state.snapshot(label)
    if found is None:
        return False
    with held.store.hold():
        state.snapshots = tuple(one for one in state.snapshots if one is not found)
        if state.goes_back_to == label:
            state.goes_back_to = ""
        held.directory.write_state(state)
        held.records.drop_for(label)
    held.store.sweep()
    return True


def restore_later(held: HeldWorkspace, label: str) -> None:
    """Have the next run begin with a snapshot; as ``Workspace.restore_later``."""
    _find_snapshot(held, label)
    held.state.goes_back_to = label
    held.directory.write_state(held.state)


def restore(held: HeldWorkspace, label: str) -> int:
    """Go back to a snapshot; as ``Workspace.restore``."""
    lost = len(changes_since(held, label))
    snapshot = _find_snapshot(held, label)
    with held.store.hold():
        held.state.is_running = False
        held.state.goes_back_to = ""
        record = held.records.load_for(label)
        _take_layers(held, SealedLayers(snapshot.layers, new_layer_id(), record=record))
    held.sweep_store()
    return lost


def changes_since(held: HeldWorkspace, label: str) -> list[Row]:
    """Return what differs now from a snapshot.

    Raises:
        WorkspaceError: there is no such snapshot.
    """
    snapshot = _find_snapshot(held, label)
    with held.trees() as trees, held.store.open_layers(snapshot.layers) as old:
        tops = (*old, trees.base_fd)
        return compare_views(LayeredTree(tops, held.state.marks), trees.merged)


def fork(held: HeldWorkspace, count: int) -> list[str]:
    """Make workspaces that begin as one is now; as ``Workspace.fork``."""
    names: list[str] = []
    with held.store.hold() as store:
        sealed = seal(held, store)
        if sealed.outgoing:
            _take_layers(held, sealed)
        state = msgspec.structs.replace(
            held.state,
            layers=sealed.layers,
            created_ns=time.clock_gettime_ns(time.CLOCK_REALTIME),
            is_running=False,
            may_redirect=False,
            outgoing="",
            goes_back_to="",
        )
        below = held.top_below(store, sealed.layers)
        links = _records_for_fork(held, sealed)
        number = 0
        while len(names) < count:
            number += 1
            ending = f"-{number}"
            name = held.name[: 64 - len(ending)] + ending
            path = path_of(held.state_dir, name)
            if os.path.lexists(path):
                continue
            own = held.directory.fd
            make_from_state(path, state, below, links, own, is_synced=False)
            names.append(name)
    return names


def unite(held: HeldWorkspace) -> None:
    """Make one sealed layer of all, which is the workspace's own; its upper is empty."""
    with held.store.hold() as store:
        sealed = write_united(held, store)
        sealed.outgoing = new_layer_id()
        _take_layers(held, sealed)
    held.sweep_store()


def replace_upper(held: HeldWorkspace) -> None:
    """Let the upper go as the state says, if it has not gone; it is on the disk then."""
    state = held.state
    with held.store.hold() as store:
        _rename_upper(held)
        os.fsync(store)
        state.outgoing = ""
        held.directory.write_state(state)


def _rename_upper(held: HeldWorkspace) -> None:
    """Rename the upper to the layer that the state says, and make a new one."""
    state = held.state
    own = held.directory.fd
    with held.store.hold() as store:
        if not has_entry(store, state.outgoing):
            os.rename("upper", state.outgoing, src_dir_fd=own, dst_dir_fd=store)
        if not has_entry(own, "upper"):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir("upper.new", dir_fd=own)
            below = held.top_below(store, state.layers)
            make_upper(own, "upper.new", below)
            os.rename("upper.new", "upper", src_dir_fd=own, dst_dir_fd=own)
        if not held.records.take_next() and state.outgoing not in state.layers:
            _prune_record(held)


def _take_layers(held: HeldWorkspace, sealed: SealedLayers) -> None:
    """Make the sealed layers the workspace's; its upper goes, if it is to."""
    state = held.state
    if not sealed.outgoing:
        held.directory.write_state(state)
        return
    held.records.save_next(sealed.record)
    state.layers = sealed.layers
    state.outgoing = sealed.outgoing
    state.may_redirect = False
    held.directory.write_state(state)
    if sealed.outgoing in sealed.layers:
        _rename_upper(held)  # the next command sees that it is on the disk
    else:
        replace_upper(held)


def _prune_record(held: HeldWorkspace) -> None:
    """Drop what was seen of paths that the workspace does not change any more."""
    with held.trees() as trees:
        paths = {row.path for row in compare(trees.base, trees.merged)}
    record = held.records.load()
    held.records.save({p: seen for p, seen in record.items() if p in paths})


def _records_for_fork(held: HeldWorkspace, sealed: SealedLayers) -> dict[str, str]:
    """Return the files that a fork shares: name in the fork -> name here."""
    record = None if sealed.outgoing else sealed.record
    links = held.records.links_for_fork(held.state.labels(), record)
    origins = share_origins(held.directory) if held.state.hidden else ""
    if origins:
        links[origins] = origins
    return links


def _find_snapshot(held: HeldWorkspace, label: str) -> Snapshot:
    """Return a snapshot; a label that is unknown raises ``WorkspaceError``."""
    found = held.state.snapshot(label)
    if found is None:
        labels = ", ".join(held.state.labels()) or "none"
        text = f"cannot find snapshot {label!r} of {held.name!r}: it has {labels}"
        raise WorkspaceError(f"{text}; name one of its own")
    return found


def _next_label(snapshots: Sequence[Snapshot]) -> str:
    numbers = [int(one.label) for one in snapshots if one.label.isdecimal()]
    return str(max(numbers, default=0) + 1)
