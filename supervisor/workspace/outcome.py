"""The outcome of a workspace when the run of its child has ended."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from hostlib.messages import shown_path
from supervisor.workspace.selection import Selection
from supervisor.workspace.store import PATIENCE_S, WorkspaceError
from supervisor.workspace.terminal_patch import show_patch
from supervisor.workspace.verbs import event_of_commit
from supervisor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.workspace.commit import CommitResult
    from supervisor.workspace.use import WorkspaceUse

    Tell = Callable[[str], None]

_HOST_FAILED = 125
"""The exit status of a run whose child was not started."""


def end_run(
    use: WorkspaceUse,
    status: int,
    commit: str,
    tell: Tell,
    write_event: Callable[..., None],
) -> None:
    """Record what was changed, and commit it if that is asked for.

    A workspace without changes is removed, unless it has snapshots or the configuration
    names it.

    Args:
        use: the workspace.
        status: the exit status of the run.
        commit: ``ask``, ``never`` or ``on-success``.
        tell: says one line.
        write_event: writes an event of the journal: its name, its fields.
    """
    if use.mode != "review":
        return
    try:
        with Workspace(use.state_dir, use.name, PATIENCE_S) as workspace:
            # Another child may have it: then this one was refused, or another one started
            # since it ended. The end of that run is recorded when it comes.
            is_others = bool(workspace.directory.user())
            if is_others and status == _HOST_FAILED:
                return
            if not is_others:
                _finish_restore(workspace, use, tell, write_event)
            changed = len(workspace.changes() if is_others else workspace.end_run())
            if not changed:
                _drop(workspace, use)
            elif commit == "on-success" and status == 0:
                _commit(workspace, use, changed, tell, write_event)
            else:
                hint = f"'sandhost workspace diff {use.name}'"
                tell(f"workspace {use.name}: {changed} changed; {hint}")
                if commit == "ask":
                    _ask(workspace, use, tell, write_event)
    except (WorkspaceError, OSError) as why:
        tell(_fault(use, why))


def _fault(use: WorkspaceUse, why: WorkspaceError | OSError) -> str:
    if not isinstance(why, OSError):
        return str(why)
    name = shown_path(why) or "it"
    text = f"workspace {use.name}: cannot look at {name}: {why.strerror}"
    return f"{text}; see 'sandhost workspace diff {use.name}'"


def _finish_restore(
    workspace: Workspace,
    use: WorkspaceUse,
    tell: Tell,
    write_event: Callable[..., None],
) -> None:
    """Go back to the snapshot that the child has asked for, if it has."""
    if done := workspace.finish_restore():
        counts = {"label": done.label, "lost": done.lost}
        write_event("workspace.restored", workspace=use.name, **counts)
        text = f"went back to snapshot {done.label}, as its program asked"
        tell(f"workspace {use.name}: {text}: {done.lost} changes dropped")


def drop_unused(use: WorkspaceUse) -> None:
    """Remove a workspace of a run that was refused, if nothing is in it."""
    if use.mode != "review":
        return
    with (
        contextlib.suppress(WorkspaceError, OSError),
        Workspace(use.state_dir, use.name, PATIENCE_S) as workspace,
    ):
        if not workspace.changes():
            _drop(workspace, use)


def _drop(workspace: Workspace, use: WorkspaceUse) -> None:
    """Remove a workspace in which nothing is left and that nothing else keeps."""
    made = (one for one in workspace.state.snapshots if not one.of_checkpoint)
    is_kept = use.is_configured or bool(workspace.directory.user())
    if not is_kept and next(made, None) is None:
        workspace.discard()


def _commit(
    workspace: Workspace,
    use: WorkspaceUse,
    changed: int,
    tell: Tell,
    write_event: Callable[..., None],
) -> None:
    """Commit what was changed; drop the workspace if nothing is left in it."""
    result = workspace.commit(Selection())
    event, counts = event_of_commit(result)
    write_event(event, workspace=use.name, **counts)
    tell(_commit_outcome(use.name, changed, result))
    if not result.left:
        _drop(workspace, use)


def _commit_outcome(name: str, changed: int, result: CommitResult) -> str:
    if not result.is_refused:
        return f"workspace {name}: {len(result.applied)} of {changed} committed"
    found = [(one.path, one.reason) for one in result.conflicts]
    found += [(path, "it is guarded") for path in result.guarded]
    path, reason = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    text = f"workspace {name}: nothing committed: {os.fsdecode(path)!r}: {reason}{more}"
    return f"{text}; 'sandhost workspace commit {name}'"


def _ask(
    workspace: Workspace,
    use: WorkspaceUse,
    tell: Tell,
    write_event: Callable[..., None],
) -> None:
    """Ask on the terminal what becomes of the changes; without an answer they stay."""
    while True:
        sys.stderr.write("commit, diff, discard, or keep? [c/d/x/K] ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip().lower()[:1]
        if answer == "d":
            coloured = "NO_COLOR" not in os.environ
            for data in show_patch(workspace.patch(), coloured=coloured):
                sys.stderr.buffer.write(data)
            continue
        if answer == "c":
            _commit(workspace, use, len(workspace.changes()), tell, write_event)
        elif answer == "x":
            changed = len(workspace.changes())
            workspace.discard()
            name = workspace.name
            write_event("workspace.discarded", workspace=name, changed=changed)
            tell(f"workspace {workspace.name}: discarded")
        return
