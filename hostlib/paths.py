"""Absolute paths, and the usual directories of this user's daemon.

getcwd(2) fails in a directory that was removed, with an error that names nothing.
"""

from __future__ import annotations

import errno
import os

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
