"""The daemon of a ``workspace`` command, if it has one.

A named daemon (``--control``, ``$SANDHOST_CONTROL``) is the only place that is asked. One of
this user in its usual place is asked first; a workspace that it does not have is looked for
in the state directory.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostlib.messages import UsageFault
from hostlib.paths import CONTROL_VARIABLE
from hostlib.unix_names import is_deaf
from supervisor.control.client import (
    ControlError,
    call,
    control_path,
    stream,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class WorkspaceDaemon:
    """A daemon with workspaces.

    Args:
        path: its control socket.
        is_named: whether the user has named it.
    """

    def __init__(self, path: str, *, is_named: bool) -> None:
        self._path = path
        self.is_named = is_named

    def ask(self, verb: str, words: dict[str, Any]) -> Any:
        """Do a verb in the daemon; return its result, and show its notes.

        Raises:
            NotThereError: it has no such workspace, and was not named.
            ControlError: it fails.
        """
        try:
            said = call(self._path, "workspace", {"verb": verb, **words})
        except ControlError as why:
            raise self._word(why) from None
        show_notes(said["notes"])
        return said["result"]

    def patch(self, words: dict[str, Any]) -> Iterator[bytes]:
        """Yield a workspace's changes as a patch, in pieces; ``ask`` shows its notes.

        Raises:
            ControlError: it fails.
        """
        for item in stream(self._path, "workspace-patch", words):
            if "data" in item:
                yield base64.b64decode(item["data"])

    def export(self, name: str, form: str) -> Iterator[bytes]:
        """Yield a workspace's changes in a form of ``export``, and show its notes.

        Raises:
            NotThereError: it has no such workspace, and was not named.
            ControlError: it fails.
        """
        try:
            words = {"name": name, "form": form}
            for item in stream(self._path, "workspace-export", words):
                show_notes(item.get("notes", []))
                if "data" in item:
                    yield base64.b64decode(item["data"])
        except ControlError as why:
            raise self._word(why) from None

    def _word(self, why: ControlError) -> Exception:
        text = str(why)
        is_elsewhere = "refused: " not in text or "cannot find workspace " in text
        if not self.is_named and (is_elsewhere or "does not know" in text):
            return NotThereError(text)
        return why


class NotThereError(Exception):
    """The daemon does not have it, so the state directory is searched."""


def find_daemon(state_dir: str | None, control: str | None) -> WorkspaceDaemon | None:
    """Return the daemon to ask; None for a state directory alone.

    Args:
        state_dir: of ``--state-dir``.
        control: of ``--control``.

    Raises:
        UsageFault: both are given.
    """
    if state_dir is not None:
        if control is not None:
            why = "--state-dir is for workspaces without a daemon; leave one out"
            raise UsageFault(f"--control: {why}")
        return None
    is_named = bool(control or os.environ.get(CONTROL_VARIABLE))
    path = control_path(control)
    if path is None or is_named:
        return None if path is None else WorkspaceDaemon(path, is_named=True)
    try:
        is_own = Path(path).stat().st_uid == os.geteuid()
    except OSError:
        return None
    return (
        WorkspaceDaemon(path, is_named=False) if is_own and not is_deaf(path) else None
    )


def show_notes(notes: list[str]) -> None:
    """Print the notes beside a result on stderr."""
    for note in notes:
        print(f"sandhost workspace: {note}", file=sys.stderr)
