"""Settings of a workspace: its bounds, hidden files, and guarded files."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

GUARDED = (
    "**/.git/hooks/**",
    "**/.git/config*",
    "**/.git/info/attributes",
    "**/.git/modules/**",
    ".envrc",
    ".vscode/*.json",
    ".devcontainer/**",
    ".husky/**",
    ".idea/**",
    ".github/workflows/**",
    ".gitlab-ci.yml",
    ".mcp.json",
    ".claude/**",
    ".codex/**",
)
"""Guarded patterns, unless the configuration says otherwise."""

RESERVE = 0.05
"""Part of a file system that a layer and the files kept beside it leave free."""


class DiskRoom(NamedTuple):
    """The free room of a file system.

    Attributes:
        free_bytes: for an ordinary user.
        kept_bytes: room that has to stay free; 0 where the file system tells no bound.
    """

    free_bytes: int
    kept_bytes: int


def disk_room(fd: int) -> DiskRoom:
    """Return what the file system of an open file has left, and has to keep."""
    disk = os.fstatvfs(fd)
    kept = int(disk.f_blocks * disk.f_frsize * RESERVE)
    return DiskRoom(disk.f_bavail * disk.f_frsize, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSettings:
    """The settings of one workspace, as ``[workspace.NAME]`` and the command line say.

    Attributes:
        hide: patterns of what the child does not see.
        guard: patterns of what a commit takes only if it is named.
        max_bytes: the most that its layer may hold; None for no bound.
        max_files: how many files its layer may hold; None for no bound.
        keep: how many snapshots are kept.
        durable: content that the child syncs is on the disk when its call returns.
        shared: more than one child may have it at a time.
    """

    hide: tuple[str, ...] = ()
    guard: tuple[str, ...] = GUARDED
    max_bytes: int | None = None
    max_files: int | None = None
    keep: int = 10
    durable: bool = True
    shared: bool = False

    def bound_to_layer(self) -> str:
        """Return a setting that keeps nothing from a base that is written to; "" if none."""
        if self.guard != GUARDED:
            return "guard"
        return "" if (self.max_bytes, self.max_files) == (None, None) else "limits"

    def with_patterns(
        self, hide: Sequence[str], guard: Sequence[str]
    ) -> WorkspaceSettings:
        """Return these settings with more patterns."""
        return replace(
            self,
            hide=tuple(dict.fromkeys((*self.hide, *hide))),
            guard=tuple(dict.fromkeys((*self.guard, *guard))),
        )


USUAL = WorkspaceSettings()
"""The settings of a workspace of which nothing was said."""
