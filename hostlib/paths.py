"""Absolute paths, and the usual directories of this user's daemon.

getcwd(2) fails in a directory that was removed, with an error that names nothing.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

ROOT_RUNTIME_DIR = "/run/sandhost"
"""The run-time directory of root's daemon, and of the systemd unit's."""

CHECKPOINTS = "checkpoints"
"""In the state directory: what has been kept of LLM fds, of all children."""

LEDGER = "llm-quota.sqlite3"
"""There too: what has been spent."""

GONE = "the working directory is gone; change to one that is there"


def working_directory() -> str:
    """Return it as an absolute path.

    Raises:
        FileNotFoundError: it was removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, GONE) from None


def absolute(path: str) -> str:
    """Return a path as absolute text; links stay as they are, unless ``..`` comes in it.

    Raises:
        FileNotFoundError: it is relative to a working directory that was removed.
    """
    if not path.startswith("/"):
        path = f"{working_directory()}/{path}"
    if ".." in path.split("/"):
        # It is above what a link leads to, and not above the link.
        path = os.path.realpath(path)  # noqa: TID251 - for its writer, not a proof
    return "/" + os.path.abspath(path).lstrip("/")


def usual_runtime_dir() -> str:
    """Return the run-time directory of a daemon of this user that is told of no other."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if given:  # systemd.exec(5)
        return given
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return f"{base}/sandhost"
    user = os.geteuid()
    return f"/tmp/sandhost-{user}" if user else ROOT_RUNTIME_DIR  # noqa: S108 - 0700


def usual_state_dir() -> str:
    """Return the state directory of this user where nothing else is said."""
    environ = os.environ
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return given
    if os.geteuid() == 0:
        return "/var/lib/sandhost"
    home = environ.get("HOME") or "/nonexistent"
    return f"{environ.get('XDG_STATE_HOME') or f'{home}/.local/state'}/sandhost"


# Where the system's temporary directory is, also when its disk is full.
#
# ``tempfile`` takes a directory only if a file can be written in it at that moment, and
# otherwise says that there is none. Most of what asks here makes no file at all, and who does
# is told by the kernel what the matter is, and with which path.

_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_USUAL = ("/tmp", "/var/tmp")  # noqa: S108 - what is made there has names of its own


def temporary_directory() -> str:
    """Return the system's temporary directory.

    Where nothing can be written anywhere, it is the first that this user may write in; or
    else the usual one, whose error is then the clearest. ``tempfile`` has it from then on.
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
