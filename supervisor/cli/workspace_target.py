"""Whose workspaces a command is about: a daemon's, or those of a state directory.

A daemon that is named is asked, and no other place. One that is only found in its usual
place is asked first; what it does not have is looked for in the state directory.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supervisor.control.client import (
    ENVIRONMENT,
    ControlError,
    call,
    control_path,
    is_deaf,
    stream,
)
from supervisor.say import CommandError
from supervisor.workspace.asked import find_state_dir
from supervisor.workspace.verbs import (
    DiffArguments,
    VerbError,
    do_verb,
    write_patch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    T = TypeVar("T")

PIECE_BYTES = 256 * 1024
_MISSING = "cannot find workspace "


class Target:
    """Whose workspaces a command is about.

    Args:
        state_dir: of ``--state-dir``.
        control: of ``--control``.
    """

    def __init__(self, state_dir: str | None, control: str | None) -> None:
        self._state_dir = find_state_dir(state_dir)
        self._is_named = bool(control or os.environ.get(ENVIRONMENT))
        self._is_named &= state_dir is None
        self._socket = None if state_dir is not None else _socket(control)

    def ask(self, verb: str, words: dict[str, Any], *, is_quiet: bool = False) -> Any:
        """Do a verb of ``workspace.verbs``; return its result, tell its notes.

        Raises:
            CommandError: it cannot be done.
        """

        def there(path: str) -> Any:
            said = call(path, "workspace", {"verb": verb, **words})
            return said["result"], said["notes"]

        def here() -> Any:
            done = do_verb(self._state_dir, verb, words)
            return done.result, done.notes

        result, notes = self._either(there, here)
        _tell([] if is_quiet else notes)
        return result

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``list``, those of a daemon first.

        Raises:
            CommandError: a daemon that is named does not answer.
        """
        found: list[dict[str, Any]] = []
        if self._socket is not None:
            try:
                found = call(self._socket, "workspace", {"verb": "list"})["result"]
            except ControlError as why:
                if self._is_named:
                    raise CommandError(str(why)) from None
        if self._is_named:
            return found
        names = {row["name"] for row in found}
        own = do_verb(self._state_dir, "list", {}).result
        return found + [row for row in own if row["name"] not in names]

    def patch(self, words: dict[str, Any]) -> Iterator[bytes]:
        """Yield a workspace's changes as a patch, in pieces.

        Raises:
            CommandError: it cannot be made.
        """

        def there(path: str) -> Iterator[Any]:
            items = stream(path, "workspace-patch", words)
            first = next(items)  # or it is refused
            _tell(first["notes"])
            return (base64.b64decode(item["data"]) for item in items)

        def here() -> Iterator[bytes]:
            is_there = os.path.isdir(self._state_dir)  # noqa: PTH112 - a str
            where = self._state_dir if is_there else None
            with tempfile.TemporaryFile(dir=where) as file:
                arguments = DiffArguments(**words)
                _tell(write_patch(self._state_dir, arguments, file.fileno()))
                file.seek(0)
                while data := file.read(PIECE_BYTES):
                    yield data

        try:
            yield from self._either(there, here)
        except (ControlError, VerbError) as why:
            raise CommandError(str(why)) from None

    def _either(self, there: Callable[[str], T], here: Callable[[], T]) -> T:
        try:
            if self._socket is not None:
                try:
                    return there(self._socket)
                except ControlError as why:
                    if self._is_named or not _is_elsewhere(str(why)):
                        raise
            return here()
        except (ControlError, VerbError) as why:
            raise CommandError(str(why)) from None


def _socket(control: str | None) -> str | None:
    """Return the socket of a daemon to ask; None if there is none."""
    path = control_path(control)
    if path is None or control or os.environ.get(ENVIRONMENT):
        return path
    try:
        is_own = Path(path).stat().st_uid == os.geteuid()
    except OSError:
        return None
    return path if is_own and not is_deaf(path) else None


def _is_elsewhere(why: str) -> bool:
    """Tell whether a daemon has no such workspace, or no way to it."""
    is_refused = "refused: " in why
    return not is_refused or _MISSING in why or "does not know" in why


def _tell(notes: list[str]) -> None:
    for note in notes:
        print(f"sandhost workspace: {note}", file=sys.stderr)
