"""A base seen through a copy-on-write layer; its changes, commits and branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.workspace.workspace import Workspace

__all__ = ["Workspace"]


def __getattr__(name: str) -> object:
    """Load the class when it is asked for: a host without workspaces pays nothing."""
    if name == "Workspace":
        from supervisor.workspace.workspace import Workspace  # noqa: PLC0415

        return Workspace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
