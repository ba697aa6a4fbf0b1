"""The logs of children that no configuration names: the newest are kept.

1. A mark in the log's directory tells the next daemon that it is one of these: a name
   alone could be that of a child whose section was taken out, and whose log stays.
2. The oldest goes first: by the last start of a child with that name, then by number.
"""

from __future__ import annotations

import contextlib
import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.threads import in_thread
from supervisor.kept_children.logs import WRITERS
from supervisor.sandbox.scratch import remove_tree

if TYPE_CHECKING:
    from collections.abc import Container

MOST_LOGS = 100
"""Logs of such children that are kept after their end."""

_PREFIX = "spawn-"
"""Prefix of the names of children that were spawned without a name."""

_MARK = ".spawned"
"""Beside the files of the log, and hidden as its ``.marks`` are."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class AdhocLogs:
    """The logs of one daemon's children that are not configured.

    Args:
        directory: the parent of each child's log directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._ended = dict.fromkeys(_names_left(self._directory))  # the oldest first
        self._numbers = count(1 + max(map(_number, self._ended), default=0))

    def new_name(self) -> str:
        """Return a name for a child that was spawned without one."""
        return f"{_PREFIX}{next(self._numbers)}"

    def begin(self, name: str) -> None:
        """Mark the log of a child that is about to start."""
        top = self._directory / name
        # A disk that is full stops no child: its log is forgotten by the next daemon.
        with contextlib.suppress(OSError):
            top.mkdir(0o700, exist_ok=True)
            fd = os.open(top / _MARK, _FLAGS, 0o600)
            try:
                os.utime(fd)
            finally:
                os.close(fd)

    def configure(self, name: str) -> None:
        """Remove a log from these: the configuration names its child from now on."""
        self._ended.pop(name, None)
        with contextlib.suppress(OSError):
            (self._directory / name / _MARK).unlink()

    async def end(self, name: str, in_use: Container[str]) -> None:
        """Add the log of a child that has ended; remove the oldest of too many.

        Args:
            name: of the child.
            in_use: names of children that are there; their logs stay.
        """
        self._ended.pop(name, None)
        self._ended[name] = None
        while len(self._ended) > MOST_LOGS:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            if oldest in in_use:  # it is added again when that child has ended
                continue
            try:
                await in_thread(remove_tree, self._directory / oldest, share=WRITERS)
            except BlockingIOError:  # no thread: the next end removes the old logs
                self._ended = {oldest: None, **self._ended}
                return


def _names_left(directory: Path) -> list[str]:
    """Return the names whose logs earlier daemons have left, the oldest first."""
    found = []
    with contextlib.suppress(OSError):
        for top in directory.iterdir():
            last_start_ns = _last_start_ns(top)
            if last_start_ns is not None:
                found.append((last_start_ns, _number(top.name), top.name))
    return [name for *_, name in sorted(found)]


def _last_start_ns(top: Path) -> int | None:
    """Return when a child of this log was started last; None if it was configured."""
    with contextlib.suppress(OSError):
        return (top / _MARK).lstat().st_mtime_ns
    with contextlib.suppress(OSError):  # of a daemon that made no marks
        return top.lstat().st_mtime_ns if _number(top.name) else None
    return None


def _number(name: str) -> int:
    digits = name.removeprefix(_PREFIX)
    return int(digits) if digits.isascii() and digits.isdigit() else 0
