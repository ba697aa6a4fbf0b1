"""A workspace while a child sees it: what its host holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.sandbox.held_mount import HeldMount
    from supervisor.workspace.branches import Rollback


@dataclass(frozen=True, slots=True)
class MountedWorkspace:
    """A host's descriptors of a workspace while a child runs in it.

    Attributes:
        mount: None where the child makes it.
        lock: of the workspace's lock; -1 of modes that have none.
        own: the directory of the layer, where the child makes the mount.
        walked_s: how long the base was walked for names to hide; None if it was not.
        went_back: to which snapshot it went before, as its last child had asked.
    """

    mount: HeldMount | None = None
    lock: int = -1
    own: str = ""
    walked_s: float | None = None
    went_back: Rollback | None = None

    @property
    def fd(self) -> int:
        """Return the descriptor of the mount; -1 for none."""
        return -1 if self.mount is None else self.mount.fd

    @property
    def namespace(self) -> int:
        """Return the descriptor of the mount's namespace; -1 for none."""
        return -1 if self.mount is None else self.mount.namespace

    def close(self) -> None:
        """Give back both."""
        if self.mount is not None:
            self.mount.close()
        if self.lock >= 0:
            os.close(self.lock)
