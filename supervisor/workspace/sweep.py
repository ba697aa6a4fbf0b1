"""Leftovers of a crash among workspaces: found, and ended where that is certain.

Rule: a workspace that another process has locked is at work, and left alone. A changed file of a
workspace is never removed here: a workspace that a dead host had stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.commit import CommitGivenUpError
from supervisor.workspace.commit_journal import STAGING_PREFIX, CommitJournal
from supervisor.workspace.directory import (
    HALF,
    IN_THE_MAKING,
    InUseError,
    WorkspaceError,
    workspaces_dir,
    workspaces_in,
)
from supervisor.workspace.layer_store import LayerStore
from supervisor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAKING_S = 60.0
"""Age at which a half made workspace is abandoned: making one takes milliseconds."""


class Leftover(NamedTuple):
    """A thing that a crash has left.

    Attributes:
        path: of it.
        what: it is.
        workspace: whose commit it is; "" for what is to be removed, or left alone.
        is_removable: it is to be removed.
    """

    path: str
    what: str
    workspace: str = ""
    is_removable: bool = False


def sweep_workspaces(state_dir: str) -> Iterator[str]:
    """End the leftovers of a crash in a state directory; yield a line for each."""
    for left in find_left(state_dir):
        if left.workspace:
            yield f"{left.what}: {left.path} ({_finish(state_dir, left.workspace)})"
        elif left.is_removable:
            yield _remove(left)
        else:
            how = "left alone; another state directory may have it"
            yield f"{left.what}: {left.path} ({how})"


def finish_removals(state_dir: str) -> Iterator[str]:
    """Remove what a killed ``discard`` left of a workspace; yield it, a line each."""
    for left in _find_halves(state_dir):
        yield _remove(left)
    with contextlib.suppress(OSError):  # it is tried again by the next command
        LayerStore(state_dir).sweep()


def _may_be_in_the_making(path: str) -> bool:
    """Tell whether another command may be making a workspace: then take no lock.

    The maker is refused where it finds a lock, and holds none just before its last rename.
    """
    try:
        is_new = time.time() - os.stat(path).st_mtime < _MAKING_S
    except OSError:
        return True
    return IN_THE_MAKING in path and is_new


def _remove(left: Leftover) -> str:
    why = remove_tree(Path(left.path))
    done = "removed" if why is None else f"not removed: {why.strerror}"
    return f"{left.what}: {left.path} ({done})"


def _find_halves(state_dir: str) -> Iterator[Leftover]:
    where = workspaces_dir(state_dir)
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(where)):
            path = os.path.join(where, name)
            if HALF not in name or _may_be_in_the_making(path):
                continue
            if not _is_locked(path):
                what = "a workspace that was half made or half discarded"
                yield Leftover(path, what, is_removable=True)


def find_left(state_dir: str) -> Iterator[Leftover]:
    """Yield what a crash has left; nothing of what somebody works on."""
    yield from _find_halves(state_dir)
    where = workspaces_dir(state_dir)
    bases: set[bytes] = set()
    known: set[bytes] = set()
    for name in workspaces_in(state_dir):
        try:
            with Workspace(state_dir, name) as workspace:
                bases.add(workspace.state.base)
                journal = _journal_of(workspace)
        except InUseError:
            continue
        except (WorkspaceError, OSError):  # `workspace list` says what is wrong
            continue
        if journal is not None:
            known.add(journal.staging)
            what = "a commit that was interrupted"
            yield Leftover(os.path.join(where, name), what, name)
    for base in sorted(bases):
        yield from _stages(base, known)


def _journal_of(workspace: Workspace) -> CommitJournal | None:
    data = workspace.directory.read("commit")
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=CommitJournal)
    except msgspec.DecodeError:
        return None


def _stages(base: bytes, known: set[bytes]) -> Iterator[Leftover]:
    """Yield the stages in a base that no commit of these workspaces has."""
    try:
        names = os.listdir(base)
    except OSError:
        return
    for name in sorted(names):
        if name.startswith(STAGING_PREFIX) and name not in known:
            path = os.fsdecode(os.path.join(base, name))
            yield Leftover(path, "a stage of a commit that no workspace here has")


def _is_locked(path: str) -> bool:
    """Tell whether a process works on a directory, or it cannot be looked at."""
    try:
        fd = os.open(path, DIRECTORY)
    except OSError:
        return True
    with closing_fd(fd):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _finish(state_dir: str, name: str) -> str:
    """End a commit; return how."""
    try:
        with Workspace(state_dir, name) as workspace:
            workspace.directory.check_idle()
            is_applied = workspace.finish_commit()
            undone = workspace.text_of_undone()
    except CommitGivenUpError as why:
        return str(why)
    except (WorkspaceError, OSError) as why:
        return f"not ended: {why}"
    if is_applied is None:
        return "ended by another"
    return "finished" if is_applied else undone
