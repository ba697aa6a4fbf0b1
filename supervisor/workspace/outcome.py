"""What becomes of a workspace when the run of its child has ended."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from supervisor.workspace.selection import Selection
from supervisor.workspace.store import WorkspaceError
from supervisor.workspace.workspace import CommitResult, Workspace

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.workspace.use import WorkspaceUse

    Tell = Callable[[str], None]


def end_run(use: WorkspaceUse, status: int, commit: str, tell: Tell) -> None:
    """Record what was changed, and commit it if that is asked for.

    A workspace without changes is removed, unless it has snapshots or the configuration
    names it.

    Args:
        use: the workspace.
        status: the exit status of the run.
        commit: ``ask``, ``never`` or ``on-success``.
        tell: says one line.
    """
    if use.mode != "review":
        return
    try:
        with Workspace(use.state_dir, use.name) as workspace:
            # Another child may have it: then this one was refused, or another one started
            # since it ended. The end of that run is recorded when it comes.
            is_others = bool(workspace.directory.user())
            rows = workspace.changes() if is_others else workspace.end_run()
            changed = len(rows)
            if not changed:
                _drop(workspace, use)
            elif commit == "on-success" and status == 0:
                result = workspace.commit(Selection())
                tell(_of_commit(use.name, changed, result))
                if not result.left:
                    _drop(workspace, use)
            else:
                hint = f"'sandhost workspace diff {use.name}'"
                tell(f"workspace {use.name}: {changed} changed; {hint}")
                if commit == "ask":
                    _ask(workspace, use, tell)
    except WorkspaceError as why:
        tell(str(why))
    except OSError as why:
        name = "" if why.filename is None else f" {os.fsdecode(why.filename)!r}"
        text = f"workspace {use.name}: cannot look at{name}: {why.strerror}"
        tell(f"{text}; see 'sandhost workspace diff {use.name}'")


def _drop(workspace: Workspace, use: WorkspaceUse) -> None:
    """Remove a workspace in which nothing is left and that nothing else keeps."""
    if not use.is_configured and not workspace.state.snapshots:
        workspace.discard()


def _of_commit(name: str, changed: int, result: CommitResult) -> str:
    if not result.is_refused:
        return f"workspace {name}: {len(result.applied)} of {changed} committed"
    found = [(one.path, one.reason) for one in result.conflicts]
    found += [(path, "it is guarded") for path in result.guarded]
    path, reason = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    text = f"workspace {name}: nothing committed: {os.fsdecode(path)!r}: {reason}{more}"
    return f"{text}; 'sandhost workspace commit {name}'"


def _ask(workspace: Workspace, use: WorkspaceUse, tell: Tell) -> None:
    """Ask on the terminal what becomes of the changes; without an answer they stay."""
    while True:
        sys.stderr.write("commit, diff, discard, or keep? [c/d/x/K] ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip().lower()[:1]
        if answer == "d":
            for data in workspace.patch():
                sys.stderr.buffer.write(data)
            continue
        if answer == "c":
            changed = len(workspace.changes())
            result = workspace.commit(Selection())
            tell(_of_commit(workspace.name, changed, result))
            if not result.left:
                _drop(workspace, use)
        elif answer == "x":
            workspace.discard()
            tell(f"workspace {workspace.name}: discarded")
        return
