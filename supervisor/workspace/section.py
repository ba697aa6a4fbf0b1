"""``[workspace.NAME]``: directories in which children work, and their settings.

The section, its faults, those of the directory, and the policies that use it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from hostlib.paths import absolute
from hostlib.user_values import OptionError, check_value, join_key, parse_size
from supervisor.workspace.settings import USUAL, WorkspaceSettings
from supervisor.workspace.use import MODES, WorkspaceUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MOST_KEPT = 64
"""Most snapshots of one workspace: more layers cannot be stacked (spec WS15)."""


class WorkspaceLimits(msgspec.Struct, forbid_unknown_fields=True):
    """``limits`` of a workspace: bounds of its layer."""

    bytes: int | str | None = None
    files: int | None = None


class WorkspaceSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[workspace.NAME]``; ``guard`` replaces the usual patterns."""

    base: str
    mode: str = "review"
    hide: list[str] = []
    guard: list[str] | None = None
    limits: WorkspaceLimits = msgspec.field(default_factory=WorkspaceLimits)
    keep: int = 10
    durable: bool = True
    shared: bool = False


def check_sections(
    section: Mapping[str, WorkspaceSection],
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that a workspace cannot have."""
    from supervisor.workspace.directory import HALF, NAME  # noqa: PLC0415 - with one

    for name, workspace in section.items():
        if not NAME.fullmatch(name) or HALF in name:
            yield (
                join_key(name),
                f"a name of a workspace is {NAME.pattern}; choose another",
            )
        for key, reason in _faults(workspace):
            yield f"{join_key(name)}.{key}", reason


def _faults(section: WorkspaceSection) -> Iterator[tuple[str, str]]:
    if section.mode not in MODES:
        yield "mode", f"one of {', '.join(MODES)}, not {section.mode!r}"
    for key in ("hide", "guard"):
        for pattern in getattr(section, key) or ():
            yield from check_value(key, check_pattern, pattern, OptionError)
    if section.mode in MODES and section.mode != "review":
        yield from _faults_without_layer(section)
    yield from _limit_faults(section.limits)
    if not 0 <= section.keep <= MOST_KEPT:
        yield "keep", f"at least 0, at most {MOST_KEPT}"
    if section.shared and os.geteuid() != 0:
        why = "it takes a host that is root: a user's child makes its own mount"
        yield "shared", f"{why}; leave it out, and give each child a workspace"


def _faults_without_layer(section: WorkspaceSection) -> Iterator[tuple[str, str]]:
    """Yield the keys that a mode without a layer cannot keep."""
    reasons = {}
    if section.hide:
        reasons["hide"] = "shows the base itself, and hides nothing"
    if not section.durable:
        reasons["durable"] = "has no layer, and what is synced there is synced"
    if section.mode == "direct":
        if section.guard is not None:
            reasons["guard"] = "has no commit that could ask"
        if section.limits != WorkspaceLimits():
            reasons["limits"] = "has no layer to bound"
    for key, why in reasons.items():
        yield (
            key,
            f"mode {section.mode!r} {why}; use review, or leave {key} out",
        )


def _limit_faults(limits: WorkspaceLimits) -> Iterator[tuple[str, str]]:
    if limits.bytes is not None:
        size = str(limits.bytes)
        yield from check_value("limits.bytes", parse_size, size, OptionError)
    if limits.files is not None and limits.files < 1:
        yield "limits.files", "at least 1"


def check_pattern(pattern: str) -> None:
    """Refuse a text that is no pattern.

    Raises:
        OptionError: it is no pattern.
    """
    from supervisor.workspace.selection import Patterns  # noqa: PLC0415 - with one

    try:
        Patterns((pattern,))
    except ValueError as why:
        text = f"cannot use the pattern {pattern!r}: {why}; see gitignore(5)"
        raise OptionError(text) from None


def settings_from(section: WorkspaceSection) -> WorkspaceSettings:
    """Return the settings of a checked section."""
    limits = section.limits
    size = None if limits.bytes is None else parse_size(str(limits.bytes))
    return WorkspaceSettings(
        hide=tuple(section.hide),
        guard=USUAL.guard if section.guard is None else tuple(section.guard),
        max_bytes=size,
        max_files=limits.files,
        keep=section.keep,
        durable=section.durable,
        shared=section.shared,
    )


def uses_of(
    names: Iterable[str], sections: Mapping[str, WorkspaceSection], state_dir: str
) -> tuple[WorkspaceUse, ...]:
    """Return the workspaces of a policy's children, before a look at the disk."""
    uses = []
    for name in names:
        section = sections[name]
        mode = next(mode for mode in MODES if mode == section.mode)
        base, settings = absolute(section.base), settings_from(section)
        use = WorkspaceUse(name, base, mode, state_dir, settings, is_configured=True)
        uses.append(use)
    return tuple(uses)
