"""Files without a name: the kernel removes them when a host is killed."""

from __future__ import annotations

import errno
import os
import tempfile


def open_unnamed(directory: str | None = None) -> int:
    """Open a new file without a name, and return its descriptor.

    Args:
        directory: the directory of its file system; None for the system's temporary one.

    Raises:
        OSError: no file can be made there.
    """
    directory = directory or tempfile.gettempdir()
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
    try:
        return os.open(directory, flags, 0o600)
    except OSError as why:
        if why.errno not in NO_TMPFILE:
            raise
    fd, name = tempfile.mkstemp(dir=directory)
    os.unlink(name)
    return fd


NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
"""Errors of open(2) on a file system without O_TMPFILE."""
