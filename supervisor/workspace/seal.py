"""Sealed layers that show what a workspace does: for snapshots, forks and commits.

Rules:
 1. A sealed layer has no redirects: with one, or while a child runs, one new layer is
    written that shows what all the layers did.
 2. The files of a sealed layer may be another layer's as well, so nothing writes to them.

Spec WS12a, WS15.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.workspace.changes import Change, Row, compare
from supervisor.workspace.directory import WorkspaceError, read_top
from supervisor.workspace.layer_store import new_layer_id
from supervisor.workspace.layer_writer import LostOriginError, write_layer
from supervisor.workspace.layers import LayeredTree, is_beneath
from supervisor.workspace.record import Record, Seen, look_at_base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.workspace.held_workspace import HeldWorkspace

MAX_LAYERS = 64
LAYERS_AFTER_MERGE = 32
_UNKNOWN = Seen(stat.S_IFDIR, inside=b"unknown")
"""Seen of a directory in which something is in conflict: it equals none."""


@dataclass(slots=True)
class SealedLayers:
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


def seal(held: HeldWorkspace, store: int) -> SealedLayers:
    """Return sealed layers that show what the workspace does now.

    Raises:
        WorkspaceError: a renamed directory cannot be copied.
    """
    state = held.state
    if held.directory.user():
        return _seal_running(held, store)
    if state.may_redirect or state.is_running:
        with held.trees() as trees:
            held.changes(trees)  # which looks, and records what the base has
        if held.has_redirects:
            sealed = write_united(held, store)
            sealed.outgoing = new_layer_id()
            return sealed
    if _is_upper_empty(held, store):
        return SealedLayers(state.layers)
    layer = new_layer_id()
    return SealedLayers((layer, *_bounded(held, store)), layer)


def _seal_running(held: HeldWorkspace, store: int) -> SealedLayers:
    """Copy the upper of a workspace that a child has; it goes on being written to."""
    with held.stopped():
        began_ns = time.monotonic_ns()
        sealed = write_united(held, store, copied=(0,))
        sealed.stopped_ns = time.monotonic_ns() - began_ns
    return sealed


def write_united(
    held: HeldWorkspace, store: int, copied: tuple[int, ...] = ()
) -> SealedLayers:
    """Write one layer that shows what all of them do."""
    with held.trees() as trees:
        rows = held.changes(trees)
        judge = held.judge(trees)
        moved = [row for row in rows if row.change is Change.RENAMED]
        conflicts = (
            {row.path for row in rows if judge.conflict(row)} if moved else set()
        )
        for row in moved:
            if row.path in conflicts:
                raise _cannot_copy(held, row.path, "it was in the base")
        layer = new_layer_id()
        with closing_fd(_make_layer(store, layer)) as fd:
            try:
                copied_bytes = write_layer(trees.merged, fd, copied, held.hide)
            except LostOriginError as why:
                raise _cannot_copy(held, why.path, "it was there") from None
        sealed = SealedLayers((layer,), copied_bytes=copied_bytes)
        if moved:
            sealed.record = _record_of_copies(held, layer, moved, conflicts)
    return sealed


def _cannot_copy(held: HeldWorkspace, path: bytes, place: str) -> WorkspaceError:
    name = os.fsdecode(path)
    text = f"cannot seal {held.name!r}: {name!r} was renamed, and is not what {place}"
    return WorkspaceError(f"{text}; commit or drop it first")


def _bounded(held: HeldWorkspace, store: int) -> tuple[str, ...]:
    """Return the sealed layers, the older ones merged if there are too many."""
    layers = held.state.layers
    if len(layers) < MAX_LAYERS:
        return layers
    newer, older = layers[:LAYERS_AFTER_MERGE], layers[LAYERS_AFTER_MERGE:]
    layer = new_layer_id()
    with (
        closing_fd(held.open_base()) as base,
        held.store.open_layers(older) as tops,
        closing_fd(_make_layer(store, layer)) as fd,
    ):
        write_layer(LayeredTree((*tops, base), held.state.marks), fd)
    return (*newer, layer)


def _make_layer(store: int, layer: str) -> int:
    os.mkdir(layer, 0o700, dir_fd=store)
    return os.open(layer, DIRECTORY, dir_fd=store)


def _is_upper_empty(held: HeldWorkspace, store: int) -> bool:
    """Tell whether the upper shows nothing of its own."""
    with closing_fd(os.open("upper", DIRECTORY, dir_fd=held.directory.fd)) as fd:
        with os.scandir(fd) as entries:
            if next(entries, None) is not None:
                return False
        return read_top(fd) == held.top_below(store, held.state.layers)


def _record_of_copies(
    held: HeldWorkspace, layer: str, moved: Sequence[Row], conflicts: set[bytes]
) -> Record:
    """Return what was seen of the base where renamed directories are copies now.

    Args:
        held: its record is not changed.
        layer: that shows what the workspace does.
        moved: the rows of the renamed directories.
        conflicts: the paths in conflict.
    """
    record = held.records.load()
    places = [place for row in moved for place in (row.path, row.origin or b"")]
    torn = [
        row.origin or b""
        for row in moved
        if any(_is_within(path, row.path) for path in conflicts)
    ]
    with (
        closing_fd(held.open_base()) as base,
        held.store.open_layers((layer,)) as tops,
    ):
        alone = LayeredTree((base,))
        merged = LayeredTree((*tops, base), held.state.marks)
        for row in compare(alone, merged):
            if any(_is_within(row.path, place) for place in places):
                record[row.path] = look_at_base(alone, row)
            if any(_is_within(origin, row.path) for origin in torn):
                record[row.path] = _UNKNOWN
    return record


def _is_within(path: bytes, directory: bytes) -> bool:
    return path == directory or is_beneath(path, directory)
