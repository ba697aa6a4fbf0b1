"""The outcome of a workspace when the run of its child has ended."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from hostlib.messages import shown_path
from supervisor.workspace.directory import PATIENCE_S, WorkspaceError
from supervisor.workspace.selection import CommitSelection
from supervisor.workspace.terminal_patch import show_patch
from supervisor.workspace.verbs import event_of_commit
from supervisor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.workspace.commit import CommitResult
    from supervisor.workspace.use import WorkspaceUse

_HOST_FAILED = 125
"""The exit status of a run whose child was not started."""


def end_run(
    use: WorkspaceUse,
    status: int,
    commit: str,
    tell: Callable[[str], None],
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
            _Outcome(workspace, use, tell, write_event).end_run(status, commit)
    except (WorkspaceError, OSError) as why:
        tell(_fault(use, why))


def _fault(use: WorkspaceUse, why: WorkspaceError | OSError) -> str:
    if not isinstance(why, OSError):
        return str(why)
    name = shown_path(why) or "it"
    text = f"workspace {use.name}: cannot look at {name}: {why.strerror}"
    return f"{text}; see 'sandhost workspace diff {use.name}'"


def drop_unused(use: WorkspaceUse) -> None:
    """Remove a workspace of a run that was refused, if nothing is in it."""
    if use.mode != "review":
        return
    with (
        contextlib.suppress(WorkspaceError, OSError),
        Workspace(use.state_dir, use.name, PATIENCE_S) as workspace,
    ):
        # A cut commit is ended by a command that can tell how.
        is_cut = workspace.directory.read("commit") is not None
        if not (is_cut or workspace.changes()):
            _drop(workspace, use)


def _drop(workspace: Workspace, use: WorkspaceUse) -> None:
    """Remove a workspace in which nothing is left and that nothing else keeps."""
    made = (one for one in workspace.state.snapshots if not one.of_checkpoint)
    is_kept = use.is_configured or bool(workspace.directory.user())
    if not is_kept and next(made, None) is None:
        workspace.discard()


class _Outcome:
    """The outcome of one workspace, told to a person and to the journal."""

    def __init__(
        self,
        workspace: Workspace,
        use: WorkspaceUse,
        tell: Callable[[str], None],
        write_event: Callable[..., None],
    ) -> None:
        self._workspace = workspace
        self._use = use
        self._tell_line = tell
        self._write_event = write_event

    def end_run(self, status: int, commit: str) -> None:
        """Record what was changed; drop it, commit it, or say that it is there."""
        workspace = self._workspace
        # Another child may have it: then this one was refused, or another one started
        # since it ended. The end of that run is recorded when it comes.
        is_others = bool(workspace.directory.user())
        if is_others and status == _HOST_FAILED:
            return
        if text := workspace.finish_and_word():
            self._tell(text)
        if not is_others:
            self._finish_restore()
        changed = len(workspace.changes() if is_others else workspace.end_run())
        if not changed:
            _drop(workspace, self._use)
        elif commit == "on-success" and status == 0:
            self._commit(changed)
        else:
            hint = f"'sandhost workspace diff {workspace.name}'"
            self._tell(f"{changed} changed; {hint}")
            if commit == "ask":
                self._ask()

    def _tell(self, text: str) -> None:
        self._tell_line(f"workspace {self._workspace.name}: {text}")

    def _finish_restore(self) -> None:
        """Go back to the snapshot that the child has asked for, if it has."""
        if done := self._workspace.finish_restore():
            name, counts = (
                self._workspace.name,
                {"label": done.label, "lost": done.lost},
            )
            self._write_event("workspace.restored", workspace=name, **counts)
            text = f"went back to snapshot {done.label}, as its program asked"
            self._tell(f"{text}: {done.lost} changes dropped")

    def _commit(self, changed: int) -> None:
        """Commit what was changed; drop the workspace if nothing is left in it."""
        result = self._workspace.commit(CommitSelection())
        event, counts = event_of_commit(result)
        self._write_event(event, workspace=self._workspace.name, **counts)
        self._tell(_word_commit(self._workspace.name, changed, result))
        if not result.left:
            _drop(self._workspace, self._use)

    def _ask(self) -> None:
        """Ask on the terminal what becomes of the changes; without an answer they stay."""
        workspace = self._workspace
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
                self._commit(len(workspace.changes()))
            elif answer == "x":
                name, changed = workspace.name, len(workspace.changes())
                workspace.discard()
                self._write_event(
                    "workspace.discarded", workspace=name, changed=changed
                )
                self._tell("discarded")
            return


def _word_commit(name: str, changed: int, result: CommitResult) -> str:
    if not result.is_refused:
        return f"{len(result.applied)} of {changed} committed"
    found = [(one.path, one.reason) for one in result.conflicts]
    found += [(path, "it is guarded") for path in result.guarded]
    path, reason = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    text = f"nothing committed: {os.fsdecode(path)!r}: {reason}{more}"
    return f"{text}; 'sandhost workspace commit {name}'"
