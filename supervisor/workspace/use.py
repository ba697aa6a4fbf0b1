"""A workspace as a child is to see it: which, and what the child may do there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from supervisor.workspace.settings import USUAL, WorkspaceSettings

Mode = Literal["review", "direct", "read-only"]
Drop = Literal["never", "unchanged", "always"]
MODES: tuple[Mode, ...] = ("review", "direct", "read-only")


@dataclass(frozen=True, slots=True)
class WorkspaceUse:
    """A workspace that a child is to see.

    Attributes:
        name: of the workspace; of modes that keep nothing, of the directory.
        base: the path of the operator's directory, without links.
        mode: ``review``, ``direct`` or ``read-only``.
        state_dir: where workspaces live.
        settings: of the operator.
        is_configured: the configuration names it, so it stays where nothing was changed.
        drop: whether its child's end removes it: only where nothing was changed, or
            always.
    """

    name: str
    base: str
    mode: Mode
    state_dir: str
    settings: WorkspaceSettings = USUAL
    is_configured: bool = False
    drop: Drop = "never"

    @property
    def is_shared(self) -> bool:
        """Tell whether more than one child may have it at a time."""
        return self.settings.shared and self.mode == "review"

    def is_same(self, other: WorkspaceUse) -> bool:
        """Tell whether two uses are of one workspace."""
        theirs = other.name, other.state_dir, other.mode
        return (self.name, self.state_dir, self.mode) == theirs

    @property
    def is_writable(self) -> bool:
        """Tell whether the child may write in it."""
        return self.mode != "read-only"
