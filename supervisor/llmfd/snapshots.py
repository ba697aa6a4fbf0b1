"""The files of a process: snapshots of its child's workspaces, as checkpoints name them.

The host has the workspaces; here is what a checkpoint needs of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        """Tell whether a caller has the whole rights of the child in them."""

    async def take(self, caller: object, label: str) -> tuple[WorkspaceSnapshot, ...]:
        """Make a snapshot of each; none if the caller does not have the whole rights."""

    async def drop(self, snapshots: Sequence[WorkspaceSnapshot]) -> None:
        """Remove those that are there."""

    async def find(
        self, snapshots: Sequence[WorkspaceSnapshot]
    ) -> tuple[WorkspaceSnapshot, ...]:
        """Return those that are there."""

    async def restore_later(self, snapshots: Sequence[WorkspaceSnapshot]) -> None:
        """Have the workspaces go back to these when the child has ended."""


def is_snapshot(value: object) -> bool:
    """Tell whether a value of JSON is a snapshot: its workspace and its label."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(word, str) and _NAME.fullmatch(word) for word in value)
    )
