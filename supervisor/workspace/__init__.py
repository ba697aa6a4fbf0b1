"""A base seen through a copy-on-write layer; its changes, commits and branches.

``verbs`` has what can be asked, ``workspace`` does it, ``held_workspace`` lies below both.
 - On the disk: ``directory`` (a workspace), ``layer_store`` (sealed layers), ``record``.
 - Changes: ``layers``, ``changes``, ``selection``, ``patch``, ``export``.
 - Conflicts with the base: ``judge``, by ``record`` and ``origins``.
 - To the base: ``commit``, its ``commit_*``, ``merge``; ``upper`` has what stays behind.
 - Branches: ``branches``, ``seal``.
 - A child's run: ``use``, ``run``, ``view``, ``hidden_files``, ``bounds``, ``audit``, ``outcome``;
   ``freeze`` stops it for a look, by ``freeze_guard``.

Public: ``archive``, ``audit``, ``bounds``, ``branches``, ``directory``, ``export``,
``layer_import``, ``linux``, ``outcome``, ``run``, ``section``, ``selection``,
``settings``, ``sweep``, ``terminal_patch``, ``use``, ``verbs``, ``view``,
``workspace``.
"""

from __future__ import annotations

# `typing` would double the start of `freeze_guard`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from supervisor.workspace.workspace import Workspace

__all__ = ["Workspace"]


def __getattr__(name: str) -> object:
    """Load the class when it is asked for: a host without workspaces pays nothing."""
    if name == "Workspace":
        from supervisor.workspace.workspace import Workspace  # noqa: PLC0415

        return Workspace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
