"""The calls on checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import fdxml
from vfs.content.errors import (
    FILE_OPERATION,
    INVALID_PARAMETER,
    NOT_FOUND,
    FdError,
)
from vfs.content.on_reading import timestamp
from vfs.content.threads import in_thread

if TYPE_CHECKING:
    from vfs.content.checkpoint_rows import Summary
    from vfs.content.checkpoints import Checkpoints
    from vfs.content.process import Process

MOST_LABEL_CHARS = 200


async def checkpoint_process(process: Process, *, label: str = "") -> bytes:
    """Keep the process as it is."""
    if len(label) > MOST_LABEL_CHARS or not label.isprintable():
        text = f"Invalid label: write at most {MOST_LABEL_CHARS} printable characters"
        raise FdError(INVALID_PARAMETER, text)
    checkpoints = _kept(process)
    owner = process.shared.owner
    made = await in_thread(
        checkpoints.save, process, owner, label, share=process.threads
    )
    process.checkpoints.add(made.id)
    return _xml(made)


async def restore_process(process: Process, *, checkpoint_id: str) -> bytes:
    """Make the process what it was."""
    checkpoints = _kept(process)
    _check_seen(process, checkpoint_id)
    owner = process.shared.owner
    was = await in_thread(
        checkpoints.restore, process, owner, checkpoint_id, share=process.threads
    )
    return fdxml.empty(
        "restore",
        (("checkpoint_id", was.id), ("fds", was.fds), ("messages", was.messages)),
    )


async def delete_checkpoint(process: Process, *, checkpoint_id: str) -> bytes:
    """Forget a checkpoint, and free what only it held."""
    checkpoints = _kept(process)
    _check_seen(process, checkpoint_id)
    owner = process.shared.owner
    await in_thread(checkpoints.delete, owner, checkpoint_id, share=process.threads)
    process.checkpoints.remove(checkpoint_id)
    return fdxml.empty("checkpoint_deleted", (("id", checkpoint_id),))


async def list_checkpoints(process: Process) -> bytes:
    """Tell what checkpoints there are."""
    checkpoints = _kept(process)
    found = await in_thread(
        checkpoints.all_of, process.shared.owner, share=process.threads
    )
    found = [one for one in found if process.checkpoints.sees(one.id)]
    return fdxml.listing("checkpoints", (("count", len(found)),), map(_xml, found))


def _check_seen(process: Process, checkpoint: str) -> None:
    if not process.checkpoints.sees(checkpoint):
        raise FdError(NOT_FOUND, f"Checkpoint {checkpoint} not found")


def _kept(process: Process) -> Checkpoints:
    checkpoints = process.shared.checkpoints
    if checkpoints is None:
        raise FdError(FILE_OPERATION, "Cannot use checkpoints: none are kept here")
    return checkpoints


def _xml(made: Summary) -> bytes:
    return fdxml.empty(
        "checkpoint",
        (
            ("id", made.id),
            ("created", timestamp(made.created)),
            ("label", made.label),
            ("fds", made.fds),
            ("bytes", made.size),
            ("messages", made.messages),
        ),
    )
