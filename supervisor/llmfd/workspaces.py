"""Snapshots of a child's workspaces that belong to its checkpoints (spec WS16).

Rules:
 1. A checkpoint's snapshots are the child's, not the operator's: as many of them are
    kept again as of the operator's, so neither kind drives the other out.
 2. Only a client with the whole rights of its child has snapshots made or files
    restored: one that has given up rights (a nested child) must not change what others
    work on.
 3. Workspaces that children share have none: to copy one stops all of them.
 4. The layer of a child that runs is mounted, and nothing can take its place beneath
    it: a workspace goes back when the child has ended.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, TypeVarTuple

import trio

from supervisor.llmfd.errors import FILE_OPERATION, FdError
from supervisor.llmfd.threads import in_thread
from supervisor.workspace.directory import PATIENCE_S, WorkspaceError
from supervisor.workspace.settings import disk_room
from supervisor.workspace.workspace import Workspace
from vfs.growth import MovedError, content_beneath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hostlib.journal import Journal
    from supervisor.workspace.use import WorkspaceUse
    from vfs.clients import Client


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class WorkspaceSnapshot(NamedTuple):
    """One snapshot.

    Attributes:
        workspace: the name of the workspace.
        label: of the snapshot in it.
    """

    workspace: str
    label: str


class Workspaces(Protocol):
    """The workspaces of one child; all raise ``FdError``."""

    def is_whole(self, caller: object) -> bool:
        """Return whether a caller has all rights of the child in them."""

    async def take(self, caller: object, label: str) -> tuple[WorkspaceSnapshot, ...]:
        """Return a new snapshot of each; none if the caller lacks rights of the child."""

    async def drop(self, snapshots: Sequence[WorkspaceSnapshot]) -> None:
        """Remove the snapshots that exist."""

    async def find(
        self, snapshots: Sequence[WorkspaceSnapshot]
    ) -> tuple[WorkspaceSnapshot, ...]:
        """Return the snapshots that exist."""

    async def restore_later(self, snapshots: Sequence[WorkspaceSnapshot]) -> None:
        """Have the workspaces restored to these when the child has ended."""


def is_snapshot(value: object) -> bool:
    """Return whether a value of JSON is a snapshot: its workspace and its label."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(word, str) and _NAME.fullmatch(word) for word in value)
    )


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_UPPER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LayeredWorkspaces:
    """The workspaces of one child that have layers (``snapshots.Workspaces``).

    Args:
        child_id: that of the child.
        client: of its first connection, which has all its rights.
        uses: all its workspaces.
        journal: gets an event for each snapshot.
    """

    def __init__(
        self,
        child_id: str,
        client: Client,
        uses: Iterable[WorkspaceUse],
        journal: Journal,
    ) -> None:
        self._child_id = child_id
        self._client = client
        self._journal = journal
        self._uses = {
            use.name: use for use in uses if use.mode == "review" and not use.is_shared
        }

    def is_whole(self, caller: object) -> bool:
        """Return whether a client has all rights of the child."""
        return getattr(caller, "policy", None) is self._client.policy

    async def take(self, caller: object, label: str) -> tuple[WorkspaceSnapshot, ...]:
        """Return a new snapshot of each; none if the caller lacks rights of the child."""
        found: list[WorkspaceSnapshot] = []
        if not self.is_whole(caller):
            return ()
        try:
            for use in self._uses.values():
                done = await self._do("keep", use, _take, use, label)
                found.append(WorkspaceSnapshot(use.name, label))
                self._tell(use, label, *done)
        except BaseException:
            with trio.CancelScope(shield=True):  # bounded like each command there
                await self.drop(found)
            raise
        return tuple(found)

    def _tell(self, use: WorkspaceUse, label: str, copied: int, stopped: int) -> None:
        self._journal.write(
            "workspace.snapshot",
            child_id=self._child_id,
            workspace=use.name,
            label=label,
            copied_bytes=copied,
            stopped_ns=stopped,
        )

    async def drop(self, snapshots: Sequence[WorkspaceSnapshot]) -> None:
        """Remove the snapshots that exist."""
        for one in snapshots:
            use = self._uses.get(one.workspace)
            if use is not None:
                await self._do("drop", use, _drop, use, one.label)

    async def find(
        self, snapshots: Sequence[WorkspaceSnapshot]
    ) -> tuple[WorkspaceSnapshot, ...]:
        """Return the snapshots that exist."""
        found = []
        for one in snapshots:
            use = self._uses.get(one.workspace)
            if use is not None and await self._do("find", use, _has, use, one.label):
                found.append(one)
        return tuple(found)

    async def restore_later(self, snapshots: Sequence[WorkspaceSnapshot]) -> None:
        """Have the workspaces restored to these when the child has ended."""
        for one in snapshots:
            use = self._uses[one.workspace]
            await self._do("restore", use, _restore_later, use, one.label)

    async def _do(
        self, verb: str, use: WorkspaceUse, call: Callable[[*Ts], T], *args: *Ts
    ) -> T:
        """Do something with a workspace in a thread; a failure is a tool's error."""
        why = ""
        try:
            return await in_thread(call, *args, share=self._client.ledger.threads)
        except WorkspaceError as error:
            why = str(error)
        except OSError as error:
            why = error.strerror or str(error)
        text = f"Cannot {verb} the files of workspace {use.name}"
        raise FdError(FILE_OPERATION, text, why)


def _take(use: WorkspaceUse, label: str) -> tuple[int, int]:
    """Make a snapshot; return the copied bytes and the time that the child stopped."""
    with Workspace(use.state_dir, use.name, PATIENCE_S) as workspace:
        _check_room(workspace)
        done = workspace.snapshot(label, of_checkpoint=True)
    return done.copied_bytes, done.stopped_ns


def _check_room(workspace: Workspace) -> None:
    """Refuse a copy of the layer that would leave the disk less than its reserve.

    Raises:
        WorkspaceError: there is too little room.
    """
    upper = os.open("upper", _UPPER, dir_fd=workspace.directory.fd)
    try:
        free, kept = disk_room(upper)
        taken = _size_of(upper)
    finally:
        os.close(upper)
    if free - taken < kept:
        text = f"cannot copy the layer of {workspace.name!r}: its disk is nearly full"
        raise WorkspaceError(f"{text}; remove something, or leave files out")


def _size_of(upper: int) -> int:
    """Return the size of a layer; 0 if it was changed meanwhile."""
    try:
        return content_beneath(upper).size_bytes
    except MovedError:  # the copy reports missing room itself
        return 0


def _drop(use: WorkspaceUse, label: str) -> None:
    with Workspace(use.state_dir, use.name, PATIENCE_S) as workspace:
        workspace.drop_snapshot(label)


def _has(use: WorkspaceUse, label: str) -> bool:
    with Workspace(use.state_dir, use.name, PATIENCE_S) as workspace:
        return workspace.state.snapshot(label) is not None


def _restore_later(use: WorkspaceUse, label: str) -> None:
    with Workspace(use.state_dir, use.name, PATIENCE_S) as workspace:
        workspace.restore_later(label)
