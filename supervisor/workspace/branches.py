"""Snapshots and forks of a workspace: what becomes of its upper and its sealed layers.

Rules:
 1. The state names the layers first, in one write, and as which layer the upper goes away.
    Then the upper goes, by one rename, and a new one is made. The next command that opens
    the workspace does what a crash or a power cut has left of that.
 2. A layer that no state names is dropped, so an upper that is to be lost goes the same way.
 3. A sealed layer has no redirects: with one, or while a child runs, one new layer is
    written that shows what all the layers did.
 4. The files of a sealed layer may be another layer's as well, so nothing writes to them.

Spec WS12a, WS15.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from supervisor.workspace.changes import Change, Row, compare, compare_views
from supervisor.workspace.hiding import share_origins
from supervisor.workspace.layer_store import new_layer_id
from supervisor.workspace.layer_writer import LostOriginError, write_layer
from supervisor.workspace.layers import LayeredTree
from supervisor.workspace.record import (
    Record,
    Seen,
    load_record,
    look_at_base,
    save_record,
)
from supervisor.workspace.store import (
    Snapshot,
    State,
    Top,
    WorkspaceError,
    make_from_state,
    make_upper,
    path_of,
    read_top,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.workspace.workspace import Workspace

MAX_LAYERS = 64
_LAYERS_AFTER_MERGE = 32
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEXT_RECORD = "record.next"
_UNKNOWN = Seen(stat.S_IFDIR, inside=b"unknown")
"""Seen of a directory in which something is in conflict: it equals none."""


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """What a snapshot did.

    Attributes:
        label: of the snapshot.
        copied_bytes: how much was copied, by data or by reference.
        stopped_ns: how long the child's processes were stopped.
    """

    label: str
    copied_bytes: int = 0
    stopped_ns: int = 0


@dataclass(slots=True)
class _Sealed:
    """Sealed layers that show what a workspace does.

    Attributes:
        layers: newest first.
        outgoing: as which layer the upper is to go away; "" if it stays.
        copied_bytes: how much was copied.
        stopped_ns: how long the child's processes were stopped.
        record: what was seen of the base, if that is told otherwise than before; else None.
    """

    layers: tuple[str, ...]
    outgoing: str = ""
    copied_bytes: int = 0
    stopped_ns: int = 0
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class WentBack:
    """What going back to a snapshot did.

    Attributes:
        label: of the snapshot.
        lost: how many paths differ from what was there before.
    """

    label: str
    lost: int


def take_snapshot(
    workspace: Workspace, label: str | None, *, of_checkpoint: bool = False
) -> Snapshotted:
    """Seal what was changed so far under a label; as ``Workspace.snapshot``."""
    workspace.finish_commit()
    state = workspace.state
    chosen = _next_label(state.snapshots) if label is None else label
    if not _LABEL.fullmatch(chosen):
        text = f"cannot use the label {chosen!r}: it is not {_LABEL.pattern}"
        raise WorkspaceError(f"{text}; choose another")
    if state.snapshot(chosen) is not None:
        text = f"cannot use the label {chosen!r}: there is a snapshot of it"
        raise WorkspaceError(f"{text}; choose another")
    with workspace.store.hold() as store:
        sealed = _seal(workspace, store)
        now_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        made = Snapshot(chosen, sealed.layers, now_ns, of_checkpoint)
        gone = _outlived((*state.snapshots, made), state)
        kept = (one for one in (*state.snapshots, made) if one not in gone)
        state.snapshots = tuple(kept)
        _keep_record(workspace, chosen, sealed.record)
        _retreat(workspace, sealed)
    for snapshot in gone:
        workspace.directory.write(_record_name(snapshot.label), None)
    if gone:
        workspace.sweep_store()
    return Snapshotted(chosen, sealed.copied_bytes, sealed.stopped_ns)


def _outlived(snapshots: Sequence[Snapshot], state: State) -> list[Snapshot]:
    """Return the snapshots that are too many: those of checkpoints count by themselves."""
    gone: list[Snapshot] = []
    for kind in (False, True):
        some = [one for one in snapshots if one.of_checkpoint is kind]
        gone += some[: -max(1, state.settings.keep)]
    return [one for one in gone if one.label != state.goes_back_to]


def drop_snapshot(workspace: Workspace, label: str) -> bool:
    """Forget a snapshot; tell whether it was there."""
    state = workspace.state
    found = state.snapshot(label)
    if found is None:
        return False
    with workspace.store.hold():
        state.snapshots = tuple(one for one in state.snapshots if one is not found)
        if state.goes_back_to == label:
            state.goes_back_to = ""
        workspace.directory.write_state(state)
        workspace.directory.write(_record_name(label), None)
    workspace.store.sweep()
    return True


def finish_restore(workspace: Workspace) -> WentBack | None:
    """Go back to the snapshot that the child of the last run has asked for, if it has."""
    label = workspace.state.goes_back_to
    if not label:
        return None
    return WentBack(label, go_back(workspace, label))


def go_back(workspace: Workspace, label: str) -> int:
    """Go back to a snapshot; as ``Workspace.restore``."""
    workspace.directory.check_idle()
    workspace.finish_commit()
    lost = len(changes_since(workspace, label))
    snapshot = find_snapshot(workspace, label)
    with workspace.store.hold():
        workspace.state.is_running = False
        workspace.state.goes_back_to = ""
        data = workspace.directory.read(_record_name(label))
        record = None if data is None else load_record(data)
        _retreat(workspace, _Sealed(snapshot.layers, new_layer_id(), record=record))
    workspace.sweep_store()
    return lost


def changes_since(workspace: Workspace, label: str) -> list[Row]:
    """Return what differs now from a snapshot.

    Raises:
        WorkspaceError: there is no such snapshot.
    """
    snapshot = find_snapshot(workspace, label)
    with workspace.trees() as trees, workspace.store.opened(snapshot.layers) as old:
        tops = (*old, trees.base_fd)
        return compare_views(LayeredTree(tops, workspace.state.marks), trees.merged)


def fork(workspace: Workspace, count: int) -> list[str]:
    """Make workspaces that begin as one is now; as ``Workspace.fork``."""
    workspace.finish_commit()
    names: list[str] = []
    with workspace.store.hold() as store:
        sealed = _seal(workspace, store)
        if sealed.outgoing:
            _retreat(workspace, sealed)
        state = msgspec.structs.replace(
            workspace.state,
            layers=sealed.layers,
            created_ns=time.clock_gettime_ns(time.CLOCK_REALTIME),
            is_running=False,
            may_redirect=False,
            outgoing="",
            goes_back_to="",
        )
        below = _top_below(workspace, store, sealed.layers)
        links = _records_for_fork(workspace, sealed)
        number = 0
        while len(names) < count:
            number += 1
            ending = f"-{number}"
            name = workspace.name[: 64 - len(ending)] + ending
            path = path_of(workspace.state_dir, name)
            if os.path.lexists(path):
                continue
            own = workspace.directory.fd
            make_from_state(path, state, below, links, own, is_synced=False)
            names.append(name)
    return names


def unite(workspace: Workspace) -> int:
    """Make one sealed layer of all, which is the workspace's own; its upper is empty.

    Returns:
        How many bytes were copied.
    """
    with workspace.store.hold() as store:
        sealed = _write_united(workspace, store)
        sealed.outgoing = new_layer_id()
        _retreat(workspace, sealed)
    workspace.sweep_store()
    return sealed.copied_bytes


def finish_retreat(workspace: Workspace) -> None:
    """Let the upper go as the state says, if it has not gone; it is on the disk then."""
    state = workspace.state
    with workspace.store.hold() as store:
        _let_go(workspace)
        os.fsync(store)
        state.outgoing = ""
        workspace.directory.write_state(state)


def _let_go(workspace: Workspace) -> None:
    """Rename the upper to the layer that the state says, and make a new one."""
    state = workspace.state
    own = workspace.directory.fd
    with workspace.store.hold() as store:
        if not _exists(state.outgoing, store):
            os.rename("upper", state.outgoing, src_dir_fd=own, dst_dir_fd=store)
        if not _exists("upper", own):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir("upper.new", dir_fd=own)
            below = _top_below(workspace, store, state.layers)
            make_upper(own, "upper.new", below)
            os.rename("upper.new", "upper", src_dir_fd=own, dst_dir_fd=own)
        if _exists(_NEXT_RECORD, own):
            os.rename(_NEXT_RECORD, "record", src_dir_fd=own, dst_dir_fd=own)
        elif state.outgoing not in state.layers:
            _prune_record(workspace)


def _retreat(workspace: Workspace, sealed: _Sealed) -> None:
    """Make the sealed layers the workspace's; its upper goes, if it is to."""
    state = workspace.state
    if not sealed.outgoing:
        workspace.directory.write_state(state)
        return
    data = None if sealed.record is None else save_record(sealed.record)
    workspace.directory.write(_NEXT_RECORD, data)
    state.layers = sealed.layers
    state.outgoing = sealed.outgoing
    state.may_redirect = False
    workspace.directory.write_state(state)
    if sealed.outgoing in sealed.layers:
        _let_go(workspace)  # the next command sees that it is on the disk
    else:
        finish_retreat(workspace)


def _seal(workspace: Workspace, store: int) -> _Sealed:
    """Return sealed layers that show what the workspace does now.

    Raises:
        WorkspaceError: a renamed directory cannot be copied.
    """
    state = workspace.state
    if workspace.directory.user():
        return _seal_running(workspace, store)
    if state.may_redirect or state.is_running:
        workspace.changes()  # which looks, and records what the base has
        if workspace.has_redirects:
            sealed = _write_united(workspace, store)
            sealed.outgoing = new_layer_id()
            return sealed
    if _is_upper_empty(workspace, store):
        return _Sealed(state.layers)
    layer = new_layer_id()
    return _Sealed((layer, *_bounded(workspace, store)), layer)


def _seal_running(workspace: Workspace, store: int) -> _Sealed:
    """Copy the upper of a workspace that a child has; it goes on being written to."""
    with workspace.stopped():
        began_ns = time.monotonic_ns()
        sealed = _write_united(workspace, store, copied=(0,))
        sealed.stopped_ns = time.monotonic_ns() - began_ns
    return sealed


def _write_united(
    workspace: Workspace, store: int, copied: tuple[int, ...] = ()
) -> _Sealed:
    """Write one layer that shows what all of them do."""
    rows = workspace.changes()
    with workspace.trees() as trees:
        judge = workspace.judge(trees)
        moved = [row for row in rows if row.change is Change.RENAMED]
        conflicts = (
            {row.path for row in rows if judge.conflict(row)} if moved else set()
        )
        for row in moved:
            if row.path in conflicts:
                raise _cannot_copy(workspace, row.path, "it was in the base")
        layer = new_layer_id()
        fd = _make_layer(store, layer)
        try:
            copied_bytes = write_layer(trees.merged, fd, copied, workspace.hide)
        except LostOriginError as why:
            raise _cannot_copy(workspace, why.path, "it was there") from None
        finally:
            os.close(fd)
        sealed = _Sealed((layer,), copied_bytes=copied_bytes)
        if moved:
            sealed.record = _record_of_copies(workspace, layer, moved, conflicts)
    return sealed


def _cannot_copy(workspace: Workspace, path: bytes, place: str) -> WorkspaceError:
    name = os.fsdecode(path)
    text = (
        f"cannot seal {workspace.name!r}: {name!r} was renamed, and is not what {place}"
    )
    return WorkspaceError(f"{text}; commit or drop it first")


def _bounded(workspace: Workspace, store: int) -> tuple[str, ...]:
    """Return the sealed layers, the older ones merged if there are too many."""
    layers = workspace.state.layers
    if len(layers) < MAX_LAYERS:
        return layers
    newer, older = layers[:_LAYERS_AFTER_MERGE], layers[_LAYERS_AFTER_MERGE:]
    base = workspace.open_base()
    try:
        with workspace.store.opened(older) as tops:
            layer = new_layer_id()
            fd = _make_layer(store, layer)
            try:
                write_layer(LayeredTree((*tops, base), workspace.state.marks), fd)
            finally:
                os.close(fd)
    finally:
        os.close(base)
    return (*newer, layer)


def _make_layer(store: int, layer: str) -> int:
    os.mkdir(layer, 0o700, dir_fd=store)
    return os.open(layer, _DIRECTORY, dir_fd=store)


def _is_upper_empty(workspace: Workspace, store: int) -> bool:
    """Tell whether the upper shows nothing of its own."""
    fd = os.open("upper", _DIRECTORY, dir_fd=workspace.directory.fd)
    try:
        with os.scandir(fd) as entries:
            if next(entries, None) is not None:
                return False
        return read_top(fd) == _top_below(workspace, store, workspace.state.layers)
    finally:
        os.close(fd)


def _top_below(workspace: Workspace, store: int, layers: Sequence[str]) -> Top:
    """Return the top of what an upper lies on."""
    fd = (
        workspace.open_base()
        if not layers
        else os.open(layers[0], _DIRECTORY, dir_fd=store)
    )
    try:
        return read_top(fd)
    finally:
        os.close(fd)


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _prune_record(workspace: Workspace) -> None:
    """Drop what was seen of paths that the workspace does not change any more."""
    with workspace.trees() as trees:
        paths = {row.path for row in compare(trees.base, trees.merged)}
    record = workspace.record()
    workspace.save_record({p: seen for p, seen in record.items() if p in paths})


def _record_of_copies(
    workspace: Workspace, layer: str, moved: Sequence[Row], conflicts: set[bytes]
) -> Record:
    """Return what was seen of the base where renamed directories are copies now.

    Args:
        workspace: its record is not changed.
        layer: that shows what the workspace does.
        moved: the rows of the renamed directories.
        conflicts: the paths in conflict.
    """
    record = workspace.record()
    places = [place for row in moved for place in (row.path, row.origin or b"")]
    torn = [
        row.origin or b""
        for row in moved
        if any(_is_within(path, row.path) for path in conflicts)
    ]
    base = workspace.open_base()
    try:
        with workspace.store.opened((layer,)) as tops:
            alone = LayeredTree((base,))
            merged = LayeredTree((*tops, base), workspace.state.marks)
            for row in compare(alone, merged):
                if any(_is_within(row.path, place) for place in places):
                    record[row.path] = look_at_base(alone, row)
                if any(_is_within(origin, row.path) for origin in torn):
                    record[row.path] = _UNKNOWN
    finally:
        os.close(base)
    return record


def _record_name(label: str) -> str:
    """Return the file that keeps what was seen when a snapshot was taken."""
    return f"seen-{label}"


def texts_named(workspace: Workspace) -> set[bytes]:
    """Return what names the kept texts, in the record and those of the snapshots."""
    labels = workspace.state.labels()
    found: set[bytes] = set()
    for name in ("record", _NEXT_RECORD, *map(_record_name, labels)):
        data = workspace.directory.read(name)
        if data is not None:
            found.update(seen.text for seen in load_record(data).values())
    return found


def _keep_record(workspace: Workspace, label: str, record: Record | None) -> None:
    name = _record_name(label)
    workspace.directory.write(name, None if record is None else save_record(record))
    if record is None:
        own = workspace.directory.fd
        with contextlib.suppress(FileNotFoundError):
            os.link("record", name, src_dir_fd=own, dst_dir_fd=own)


def _records_for_fork(workspace: Workspace, sealed: _Sealed) -> dict[str, str]:
    """Return the files that a fork shares: name in the fork -> name here."""
    links = {name: name for name in map(_record_name, workspace.state.labels())} | {
        "record": "record"
    }
    origins = share_origins(workspace.directory) if workspace.state.hidden else ""
    if origins:
        links[origins] = origins
    if sealed.record is not None and not sealed.outgoing:
        workspace.directory.write(_NEXT_RECORD, save_record(sealed.record))
        links["record"] = _NEXT_RECORD
    return links


def _is_within(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory + b"/")


def find_snapshot(workspace: Workspace, label: str) -> Snapshot:
    """Return a snapshot.

    Raises:
        WorkspaceError: there is no such one.
    """
    found = workspace.state.snapshot(label)
    if found is None:
        labels = ", ".join(workspace.state.labels()) or "none"
        text = f"cannot find snapshot {label!r} of {workspace.name!r}: it has {labels}"
        raise WorkspaceError(f"{text}; name one of its own")
    return found


def _next_label(snapshots: Sequence[Snapshot]) -> str:
    numbers = [int(one.label) for one in snapshots if one.label.isdecimal()]
    return str(max(numbers, default=0) + 1)
