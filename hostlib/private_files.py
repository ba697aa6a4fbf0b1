"""Files that are their owner's alone, for libraries that open them by name (SQLite)."""

from __future__ import annotations

import os


def open_private(path: str, directory: int | None = None) -> int:
    """Return a descriptor of a file; make it if there is none, let nobody else in.

    A link is not followed: a child may have put it there (attack 49).

    Args:
        path: of the file.
        directory: a descriptor of the one that the path lies beneath.

    Raises:
        OSError: it cannot be opened; ELOOP: it is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600, dir_fd=directory)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd
