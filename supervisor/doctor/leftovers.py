"""Leftovers of dead hosts on this machine, for ``doctor --leaks`` without a host.

Rules of this file.

1. A leftover needs a fact that says that its host is gone: a launchpad whose parent is
   not the process of its command line, an unlocked scratch directory, a socket without
   a listener. A name alone proves nothing: any program may choose it.
2. Places that this user may not read are reported as unknown, never as clean.
3. A finding is checked again after ``PAUSE_S``: a host that is ending is no leak.
"""

from __future__ import annotations

import os
import select
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from hostlib.linux import holdings, processes
from hostlib.paths import (
    CONTROL_VARIABLE,
    temporary_directory,
    usual_control_paths,
    usual_state_dir,
)
from hostlib.unix_names import is_deaf
from supervisor.sandbox.ownership import KEEPER
from supervisor.sandbox.scratch import KEPT_PREFIX, PREFIX, is_abandoned

LAUNCHPAD_NAME = "sandhost-pad"
"""The name of a launchpad's process; its command line tells too."""

STAGED_PREFIX = ".sandhost-"
"""The prefix of a file's name while it is being published (spec A3b)."""

PAUSE_S = 0.25
"""Time between the two looks; a launchpad ends 50 processes in 20 ms."""

MAX_ENTRIES = 20_000
"""Most directory entries of one search for staged names."""

SEARCH_S = 1.0
"""Longest such search."""

_BOOT = b"supervisor.spawn.launchpad"
_DOOR = b"FSPROXY_FD="


@dataclass(slots=True)
class LeftoverSearch:
    """A bounded search for staged names.

    Attributes:
        found: (directory, name, device, inode).
        is_complete: whether everything was looked at.
    """

    found: list[tuple[str, str, int, int]] = field(default_factory=list)
    is_complete: bool = True
    _left: int = MAX_ENTRIES
    _end: float = field(default_factory=lambda: time.monotonic() + SEARCH_S)

    def look(self, top: str, *, is_deep: bool = True) -> None:
        """Search a directory and, unless ``is_deep`` is false, all beneath it.

        Follows no link.  Blocks: for a worker thread, or a process without clients.
        """
        ahead = [top]
        while ahead:
            try:
                with os.scandir(ahead.pop()) as entries:
                    for entry in entries:
                        if not self._may_go_on():
                            return
                        self._take(entry)
                        if is_deep and entry.is_dir(follow_symlinks=False):
                            ahead.append(entry.path)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError:
                self.is_complete = False

    def _may_go_on(self) -> bool:
        self._left -= 1
        if self._left < 0 or time.monotonic() > self._end:
            self.is_complete = False
        return self._left >= 0 and time.monotonic() <= self._end

    def _take(self, entry: os.DirEntry[str]) -> None:
        if entry.name.startswith(STAGED_PREFIX) and entry.is_file(
            follow_symlinks=False
        ):
            status = entry.stat(follow_symlinks=False)
            where = os.path.dirname(entry.path)  # noqa: PTH120 - text, as it was given
            self.found.append((where, entry.name, status.st_dev, status.st_ino))


def staged_row(where: str, name: str) -> dict[str, object]:
    """Return a staged name as a JSON object; bytes that are not UTF-8 are replaced."""
    return {"directory": _text(where), "name": _text(name)}


def crashed_workspaces(*state_dirs: str) -> list[dict[str, object]]:
    """Return the remains of workspaces after crashes, as JSON objects; blocks."""
    found: list[dict[str, object]] = []
    for state_dir in state_dirs:
        if os.path.isdir(f"{state_dir}/workspaces"):  # noqa: PTH112 - a str
            from supervisor.workspace.sweep import find_left  # noqa: PLC0415 - with one

            found += (
                {"path": _text(left.path), "what": left.what}
                for left in find_left(state_dir)
            )
    return found


def find_leftovers(tmp: str | None = None) -> dict[str, object]:
    """Return what dead hosts of this user left.

    Args:
        tmp: has the scratch directories; None for the system's directory.

    Returns:
        A JSON object: ``clean``, ``counts``, then the lists: ``launchpads`` without a
        host, ``orphans`` (processes of children) without a launchpad, ``scratch``
        directories and control ``sockets`` without a host, ``staged`` names in those
        directories; crashed ``workspaces``; ``unknown``: places not judged, with
        reasons.
    """
    look = _Look(Path(tmp or temporary_directory()))
    first = look.take()
    if first:
        select.select([], [], [], PAUSE_S)
        again = look.take()
        first = {key: row for key, row in first.items() if key in again}
    lists: dict[str, list[dict[str, object]]] = {
        kind: [row for (what, _), row in first.items() if what == kind]
        for kind in ("launchpads", "orphans", "scratch", "sockets")
    }
    search = LeftoverSearch()
    for row in lists["scratch"]:
        search.look(os.fsencode(str(row["path"])).decode(errors="surrogateescape"))
    lists["staged"] = [staged_row(where, name) for where, name, _, _ in search.found]
    state_dir = os.environ.get("SANDHOST_STATE") or usual_state_dir()
    lists["workspaces"] = crashed_workspaces(state_dir)
    return {
        "clean": not any(lists.values()),
        "counts": {kind: len(rows) for kind, rows in lists.items()},
        **lists,
        "unknown": list(look.unknown),
        "staged_search_complete": search.is_complete,
    }


class _Look:
    """Looks at the same places, one after another, with the same keys."""

    def __init__(self, tmp: Path) -> None:
        self._tmp = tmp
        self._uid = os.geteuid()
        self._owners = {self._uid} | ({KEEPER} if self._uid == 0 else set())
        self.unknown: dict[str, None] = {}

    def take(self) -> dict[tuple[str, object], dict[str, object]]:
        """Return the findings now."""
        self.unknown.clear()
        found: dict[tuple[str, object], dict[str, object]] = {}
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
        for facts in map(holdings.process_facts, pids):
            if facts is None or facts.state == holdings.ZOMBIE:
                continue
            key = (facts.pid, facts.create_time)
            if self._is_launchpad(facts):
                if not self._has_host(facts):
                    beneath = processes.trees_beneath(facts.parent, [facts.pid])
                    row = {**facts.row(), "beneath": max(0, len(beneath) - 1)}
                    found["launchpads", key] = row
            elif self._is_orphan(facts):
                found["orphans", key] = facts.row()
        for path in self._scratch():
            found["scratch", path] = {"path": _text(str(path))}
        for stale in self._sockets():
            found["sockets", stale] = {"path": _text(stale)}
        return found

    def _is_mine(self, pid: int) -> bool:
        """Return whether a process belongs to this user; for root, all do."""
        # Not the owner of /proc/PID: root owns that of a process that cannot be dumped.
        users = _field_of(pid, b"Uid:")
        return bool(users) and (self._uid == 0 or int(users[0]) == self._uid)

    def _is_launchpad(self, facts: holdings.ProcessFacts) -> bool:
        if facts.name != LAUNCHPAD_NAME or not self._is_mine(facts.pid):
            return False
        return _BOOT in (holdings.read_file(f"/proc/{facts.pid}/cmdline") or b"")

    def _has_host(self, launchpad: holdings.ProcessFacts) -> bool:
        """Return whether its parent is still the host that started it."""
        line = holdings.read_file(f"/proc/{launchpad.pid}/cmdline") or b""
        host = line.rstrip(b"\0").rpartition(b"\0")[2]
        # The parent's numbers in all nested pid namespaces: the host knew one of them.
        numbers = _field_of(launchpad.parent, b"NSpid:")
        if not numbers:
            self._describe_doubt(
                f"launchpad {launchpad.pid}: its parent cannot be looked at"
            )
            return True
        return host in numbers

    def _is_orphan(self, facts: holdings.ProcessFacts) -> bool:
        """Return whether it was part of a child, and has no launchpad above."""
        if facts.pid == os.getpid() or not self._is_mine(facts.pid):
            return False
        environment = holdings.read_file(f"/proc/{facts.pid}/environ") or b""
        if not any(text.startswith(_DOOR) for text in environment.split(b"\0")):
            return False
        above: holdings.ProcessFacts | None = facts
        while above is not None and above.pid > 1:
            if above.name == LAUNCHPAD_NAME:
                return False
            above = holdings.process_facts(above.parent)
        return True

    def _scratch(self) -> list[Path]:
        found = []
        for path in self._tmp.glob(f"{PREFIX}*"):
            if path.name.startswith(KEPT_PREFIX):
                continue
            try:
                status = path.lstat()
                is_mine = status.st_uid in self._owners
                if not stat.S_ISDIR(status.st_mode) or not is_mine:
                    continue
                if is_abandoned(path):
                    found.append(path)
            except FileNotFoundError:
                continue  # its host has just removed it
            except OSError as why:
                self._describe_doubt(
                    f"scratch directory {_text(str(path))}: {why.strerror}"
                )
        return found

    def _sockets(self) -> list[str]:
        named = os.environ.get(CONTROL_VARIABLE)
        paths = (named,) if named else usual_control_paths()
        return [path for path in paths if is_deaf(path)]

    def _describe_doubt(self, text: str) -> None:
        self.unknown[text] = None


def _field_of(pid: int, title: bytes) -> list[bytes]:
    """Return the words of one line of ``/proc/PID/status``; none if unreadable."""
    for line in (holdings.read_file(f"/proc/{pid}/status") or b"").splitlines():
        if line.startswith(title):
            return line.split()[1:]
    return []


def _text(name: str) -> str:
    return os.fsencode(name).decode(errors="replace")
