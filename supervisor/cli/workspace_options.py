"""Workspaces on a command line: ``DIR[:MODE]``, and where they are kept."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.paths import absolute, usual_state_dir
from hostlib.user_values import OptionError
from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.outcome import drop_unused
from supervisor.workspace.run import find_base, prepare_use
from supervisor.workspace.section import check_pattern, uses_of
from supervisor.workspace.use import MODES, WorkspaceUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from supervisor.config.document import Config
    from supervisor.workspace.section import WorkspaceSection
    from supervisor.workspace.use import Mode


def find_state_dir(asked: str | None) -> str:
    """Return where workspaces live: as asked, $SANDHOST_STATE, or the usual place."""
    return absolute(asked or os.environ.get("SANDHOST_STATE") or usual_state_dir())


def read_uses(
    texts: Sequence[str],
    state_dir: str | None,
    name: str | None,
    config: Config | None = None,
    *,
    hide: Sequence[str] = (),
    guard: Sequence[str] = (),
) -> tuple[WorkspaceUse, ...]:
    """Return the workspaces of a command line and its policy, made where they are new.

    Args:
        texts: ``DIR`` or ``DIR:MODE`` each.
        state_dir: of ``--state-dir``.
        name: of ``--workspace-name``.
        config: names more, for the policy ``run``; or sets what NAME is to be.
        hide: of ``--hide``.
        guard: of ``--guard``.

    Raises:
        OptionError: one cannot be used.
    """
    where = find_state_dir(state_dir)
    sections = {} if config is None else config.workspace
    policy = None if config is None else config.policy.get("run")
    named = [] if policy is None else policy.workspace
    if name is not None and len(texts) > 1:
        text = "it names one workspace, and there are more; run them one by one"
        raise OptionError(f"--workspace-name: {text}")
    asked: list[tuple[str, WorkspaceUse]] = []
    if name is not None and not texts:
        if name not in sections:
            text = f"there is no --workspace, nor [workspace.{name}]; name a directory"
            raise OptionError(f"--workspace-name: {text}")
        named = [name, *(other for other in named if other != name)]
    asked += [("--workspace", _asked(text, where, name, sections)) for text in texts]
    own = {use.name for _, use in asked}
    others = uses_of((one for one in named if one not in own), sections, where)
    asked += [("policy.run.workspace", use) for use in others]
    for option, patterns in (("--hide", hide), ("--guard", guard)):
        for pattern in patterns:
            _check(option, pattern)
    found = [(option, _resolved(option, use)) for option, use in asked]
    for number, (option, use) in enumerate(found):
        _check_apart(option, use, [other for _, other in found[:number]])
    return _prepare_all(found, name, (hide, guard))


def _prepare_all(
    asked: Sequence[tuple[str, WorkspaceUse]],
    name: str | None,
    more: tuple[Sequence[str], Sequence[str]],
) -> tuple[WorkspaceUse, ...]:
    """Return workspaces as they are on the disk; none is made if one cannot be used."""
    uses: list[WorkspaceUse] = []
    try:
        uses.extend(_prepared(option, use, name, more) for option, use in asked)
    except OptionError:
        for use in uses:
            drop_unused(use)
        raise
    return tuple(uses)


def _asked(
    text: str,
    where: str,
    name: str | None,
    sections: Mapping[str, WorkspaceSection],
) -> WorkspaceUse:
    """Return what one ``--workspace`` asks for, with what is configured of its name."""
    path, mode = _read(text)
    if not path:  # an unset variable of a shell, and not the working directory
        raise OptionError(f"--workspace: it names no directory: {text!r}; name one")
    base = absolute(path)
    section = None if name is None else sections.get(name)
    if name is None or section is None:
        return WorkspaceUse(name or "", base, mode or "review", where)
    if not _is_same(base, section.base):
        why = f"[workspace.{name}] has the base {section.base!r}, not {base!r}"
        raise OptionError(f"--workspace: {why}; name that, or leave it out")
    (use,) = uses_of((name,), sections, where)
    return use if mode is None else replace(use, mode=mode)


def _resolved(option: str, use: WorkspaceUse) -> WorkspaceUse:
    """Return what is asked for with the path of its base without links.

    Raises:
        OptionError: it cannot be a base.
    """
    try:
        return replace(use, base=find_base(use.base, use.state_dir))
    except WorkspaceError as why:
        raise OptionError(f"{option}: {why}") from None


def _is_same(path: str, other: str) -> bool:
    try:
        return Path(path).samefile(other)
    except OSError:
        return False


def _check(option: str, pattern: str) -> None:
    try:
        check_pattern(pattern)
    except OptionError as why:
        raise OptionError(f"{option}: {why}") from None


def _prepared(
    option: str,
    use: WorkspaceUse,
    name: str | None,
    more: tuple[Sequence[str], Sequence[str]],
) -> WorkspaceUse:
    """Return a workspace as it is on the disk.

    Raises:
        OptionError: it cannot be used.
    """
    settings = use.settings if use.is_configured else None
    named = use.name if use.is_configured else name
    try:
        found = prepare_use(use.base, use.mode, use.state_dir, named, settings, more)
    except WorkspaceError as why:
        raise OptionError(f"{option}: {why}") from None
    except OSError as why:
        reason = f"cannot keep workspaces in {use.state_dir!r}: {why.strerror}"
        raise OptionError(f"--state-dir: {reason}; name another") from None
    return replace(found, is_configured=use.is_configured)


def _check_apart(
    option: str, use: WorkspaceUse, others: Sequence[WorkspaceUse]
) -> None:
    """Refuse a workspace whose base lies in another's.

    Raises:
        OptionError: it does.
    """
    for other in others:
        if use.base == other.base:
            raise OptionError(f"{option}: {use.base!r} is named twice; leave one out")
        if f"{use.base}/".startswith(f"{other.base}/") or (
            f"{other.base}/".startswith(f"{use.base}/")
        ):
            reason = f"{use.base!r} and {other.base!r} lie in each other"
            raise OptionError(f"{option}: {reason}; name the outer one")


def _read(text: str) -> tuple[str, Mode | None]:
    path, colon, word = text.rpartition(":")
    for mode in MODES:
        if colon and word == mode:
            return path, mode
    if colon and "/" not in word and not os.path.exists(text):  # noqa: PTH110 - false for what cannot be looked at
        raise OptionError(f"--workspace: {word!r} is none of {', '.join(MODES)}")
    return text, None
