"""The calls on checkpoints."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from protocol import fdxml
from supervisor.llmfd.calls.reading import timestamp
from supervisor.llmfd.checkpoints import new_checkpoint_id
from supervisor.llmfd.errors import (
    FILE_OPERATION,
    INVALID_PARAMETER,
    NOT_FOUND,
    FdError,
)
from supervisor.llmfd.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from supervisor.llmfd.checkpoint_rows import Summary
    from supervisor.llmfd.checkpoints import Checkpoints
    from supervisor.llmfd.process import Process
    from supervisor.llmfd.workspaces import WorkspaceSnapshot

MOST_LABEL_CHARS = 200


async def checkpoint_process(
    process: Process, *, label: str = "", files: bool = True
) -> bytes:
    """Save the process with the files of its child's workspaces."""
    if len(label) > MOST_LABEL_CHARS or not label.isprintable():
        text = f"Invalid label: write at most {MOST_LABEL_CHARS} printable characters"
        raise FdError(INVALID_PARAMETER, text)
    checkpoints = _require_checkpoints(process)
    owner = process.shared.owner
    checkpoint = new_checkpoint_id()
    # The files first: the process cannot change during its own call.
    async with _snapshots(process, checkpoint, is_asked=files) as snapshots:
        save = partial(checkpoints.save, process, owner, label, checkpoint, snapshots)
        made = await in_thread(save, share=process.threads)
    process.checkpoints.add(made.id)
    return _xml(made)


@asynccontextmanager
async def _snapshots(
    process: Process, checkpoint: str, *, is_asked: bool
) -> AsyncIterator[tuple[WorkspaceSnapshot, ...]]:
    """Make the snapshots of a checkpoint; remove them if it fails."""
    workspaces = process.shared.workspaces
    if workspaces is None or not is_asked:
        yield ()
        return
    found = await workspaces.take(process.caller, checkpoint.replace(":", "-"))
    try:
        yield found
    except BaseException:
        with trio.CancelScope(shield=True):  # bounded like each command on a workspace
            await workspaces.drop(found)
        raise


async def restore_process(
    process: Process, *, checkpoint_id: str, files: bool = False
) -> bytes:
    """Restore the process; its files are restored later, if asked for."""
    checkpoints = _require_checkpoints(process)
    _check_seen(process, checkpoint_id)
    owner = process.shared.owner
    was = await in_thread(
        checkpoints.look_at, owner, checkpoint_id, share=process.threads
    )
    workspaces = process.shared.workspaces
    there: tuple[WorkspaceSnapshot, ...] = ()
    if workspaces is not None and was.snapshots:
        there = await workspaces.find(was.snapshots)
    if files:
        _check_files(process, was, there)
    await in_thread(
        checkpoints.restore, process, owner, checkpoint_id, share=process.threads
    )
    if files and workspaces is not None:
        await workspaces.restore_later(there)
    rows = []
    for one in was.snapshots:
        state = "as they are" if one in there else "gone"
        rows.append(_snapshot_xml(one, "when the child has ended" if files else state))
    attributes = (
        ("checkpoint_id", was.id),
        ("fds", was.fds),
        ("messages", was.messages),
    )
    return fdxml.listing("restore", attributes, rows)


def _check_files(
    process: Process, was: Summary, there: Sequence[WorkspaceSnapshot]
) -> None:
    """Refuse to restore files that are missing, or that the caller may not change.

    Raises:
        FdError: for one of these reasons.
    """
    if not was.snapshots:
        text = f"Checkpoint {was.id} names no snapshot of a workspace"
        raise FdError(NOT_FOUND, text)
    for workspace, label in was.snapshots:
        if (workspace, label) not in there:
            text = f"Snapshot {label} of workspace {workspace} not found"
            raise FdError(NOT_FOUND, text, "Without files the rest can be restored")
    workspaces = process.shared.workspaces
    if workspaces is None or not workspaces.is_whole(process.caller):
        text = "Cannot restore the files: Permission denied"
        raise FdError(FILE_OPERATION, text, "The client has given up rights")


async def delete_checkpoint(process: Process, *, checkpoint_id: str) -> bytes:
    """Delete a checkpoint, and free the contents that only it held."""
    checkpoints = _require_checkpoints(process)
    _check_seen(process, checkpoint_id)
    owner = process.shared.owner
    snapshots = await in_thread(
        checkpoints.delete, owner, checkpoint_id, share=process.threads
    )
    process.checkpoints.remove(checkpoint_id)
    if process.shared.workspaces is not None and snapshots:
        await process.shared.workspaces.drop(snapshots)
    return fdxml.empty("checkpoint_deleted", (("id", checkpoint_id),))


async def list_checkpoints(process: Process) -> bytes:
    """List the checkpoints."""
    checkpoints = _require_checkpoints(process)
    found = await in_thread(
        checkpoints.all_of, process.shared.owner, share=process.threads
    )
    found = [one for one in found if process.checkpoints.sees(one.id)]
    return fdxml.listing("checkpoints", (("count", len(found)),), map(_xml, found))


def _check_seen(process: Process, checkpoint: str) -> None:
    if not process.checkpoints.sees(checkpoint):
        raise FdError(NOT_FOUND, f"Checkpoint {checkpoint} not found")


def _require_checkpoints(process: Process) -> Checkpoints:
    checkpoints = process.shared.checkpoints
    if checkpoints is None:
        raise FdError(FILE_OPERATION, "Cannot use checkpoints: none are kept here")
    return checkpoints


def _xml(made: Summary) -> bytes:
    attributes = (
        ("id", made.id),
        ("created", timestamp(made.created)),
        ("label", made.label),
        ("fds", made.fds),
        ("bytes", made.size),
        ("messages", made.messages),
    )
    return fdxml.listing("checkpoint", attributes, map(_snapshot_xml, made.snapshots))


def _snapshot_xml(one: WorkspaceSnapshot, files: str = "") -> bytes:
    attributes: tuple[tuple[str, str], ...] = (
        ("workspace", one.workspace),
        ("label", one.label),
    )
    if files:
        attributes = (*attributes, ("files", files))
    return fdxml.empty("snapshot", attributes)
