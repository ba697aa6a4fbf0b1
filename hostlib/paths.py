"""Absolute paths, and the usual directories of this user's daemon.

getcwd(2) fails in a directory that was removed, with an error that names no path.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

ROOT_RUNTIME_DIR = "/run/sandhost"
"""The run-time directory of root's daemon, and of the systemd unit's."""

CHECKPOINTS = "checkpoints"
"""The directory of kept LLM fds of all children, in the state directory."""

LEDGER = "llm-quota.sqlite3"
"""The database of used tokens, in the state directory."""

GONE = "the working directory is gone; change to one that is there"

CONTROL_VARIABLE = "SANDHOST_CONTROL"
"""The variable that names the control socket where no option does."""


def working_directory() -> str:
    """Return the working directory as an absolute path.

    Raises:
        FileNotFoundError: the directory was removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, GONE) from None


def absolute(path: str) -> str:
    """Return a path as absolute text; links stay, unless the path has ``..``.

    Raises:
        FileNotFoundError: the path is relative to a working directory that was removed.
    """
    if not path.startswith("/"):
        path = f"{working_directory()}/{path}"
    if ".." in path.split("/"):
        # ".." after a link is the parent of the link's target, not of the link.
        path = os.path.realpath(path)  # noqa: TID251 - for its writer, not a proof
    return "/" + os.path.abspath(path).lstrip("/")


def usual_runtime_dir() -> str:
    """Return the default run-time directory of a daemon of this user."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if given:  # systemd.exec(5)
        return given
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return f"{base}/sandhost"
    user = os.geteuid()
    return f"/tmp/sandhost-{user}" if user else ROOT_RUNTIME_DIR  # noqa: S108 - 0700


def usual_control_paths() -> tuple[str, ...]:
    """Return the paths of daemons' sockets where none is configured.

    First this user's, then root's.
    """
    places = dict.fromkeys((usual_runtime_dir(), ROOT_RUNTIME_DIR))
    return tuple(f"{place}/control" for place in places)


def usual_state_dir() -> str:
    """Return the default state directory of this user."""
    environ = os.environ
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return given
    if os.geteuid() == 0:
        return "/var/lib/sandhost"
    home = environ.get("HOME") or "/nonexistent"
    return f"{environ.get('XDG_STATE_HOME') or f'{home}/.local/state'}/sandhost"


# ``tempfile`` takes a temporary directory only if it can write a file there at that moment,
# so it finds none on a full disk.  Most callers here make no file; the others get a better
# error from the kernel, with a path.

_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_USUAL = ("/tmp", "/var/tmp")  # noqa: S108 - what is made there has names of its own


def temporary_directory() -> str:
    """Return the system's temporary directory, and set it for ``tempfile``.

    If no directory can be written (full disks), it is the first in which this user may
    write by its rights; else the usual one, whose error is the clearest.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        named = [os.environ.get(name, "") for name in _VARIABLES]
        found = [p for p in (*named, *_USUAL) if p.startswith("/") and _may_write(p)]
        tempfile.tempdir = found[0] if found else _USUAL[0]
        return tempfile.tempdir


def _may_write(path: str) -> bool:
    return Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)
