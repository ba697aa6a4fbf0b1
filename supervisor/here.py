"""Where relative paths begin, and where a daemon of this user has its run-time directory.

getcwd(2) fails in a directory that was removed, with an error that names nothing.
"""

from __future__ import annotations

import errno
import os

ROOT_RUNTIME_DIR = "/run/sandhost"
"""The run-time directory of root's daemon, and of the systemd unit's."""

GONE = "the working directory is gone; change to one that is there"


def working_directory() -> str:
    """Return it as an absolute path.

    Raises:
        FileNotFoundError: it was removed.
    """
    try:
        return os.getcwd()  # noqa: PTH109 - a str is wanted
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
        path = os.path.realpath(path)  # noqa: TID251 - for whoever wrote it, not a proof
    return "/" + os.path.abspath(path).lstrip("/")  # noqa: PTH100 - it keeps two


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
