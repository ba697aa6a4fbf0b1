"""Workspaces as a command line names them: ``DIR[:MODE]``, and where they are kept."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from supervisor.daemon_places import usual_state_dir
from supervisor.here import absolute
from supervisor.options import OptionError
from supervisor.workspace.run import prepare_use
from supervisor.workspace.store import WorkspaceError
from supervisor.workspace.use import MODES, WorkspaceUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.workspace.use import Mode


def find_state_dir(asked: str | None) -> str:
    """Return where workspaces live: as asked, $SANDHOST_STATE, or the usual place."""
    return absolute(asked or os.environ.get("SANDHOST_STATE") or usual_state_dir())


def read_uses(
    texts: Sequence[str], state_dir: str | None, name: str | None
) -> tuple[WorkspaceUse, ...]:
    """Return the workspaces that a command line names, made where they are new.

    Args:
        texts: ``DIR`` or ``DIR:MODE`` each.
        state_dir: of ``--state-dir``.
        name: of ``--workspace-name``.

    Raises:
        OptionError: one cannot be used.
    """
    where = find_state_dir(state_dir)
    if name is not None and len(texts) > 1:
        text = "it names one workspace, and there are more; run them one by one"
        raise OptionError(f"--workspace-name: {text}")
    uses: list[WorkspaceUse] = []
    for text in texts:
        path, mode = _read(text)
        try:
            use = prepare_use(absolute(path), mode, where, name)
        except WorkspaceError as why:
            raise OptionError(f"--workspace: {why}") from None
        except OSError as why:
            reason = f"cannot keep workspaces in {where!r}: {why.strerror}"
            raise OptionError(f"--state-dir: {reason}; name another") from None
        for other in uses:
            if f"{use.base}/".startswith(f"{other.base}/") or (
                f"{other.base}/".startswith(f"{use.base}/")
            ):
                reason = f"{use.base!r} and {other.base!r} lie in each other"
                raise OptionError(f"--workspace: {reason}; name the outer one")
        uses.append(use)
    return tuple(uses)


def _read(text: str) -> tuple[str, Mode]:
    path, colon, word = text.rpartition(":")
    for mode in MODES:
        if colon and word == mode:
            return path, mode
    if colon and "/" not in word and not os.path.exists(text):
        raise OptionError(f"--workspace: {word!r} is none of {', '.join(MODES)}")
    return text, "review"
