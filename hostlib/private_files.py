"""Files with mode 0600, for libraries that open them by name (SQLite)."""

from __future__ import annotations

import os


def open_private(path: str, directory: int | None = None) -> int:
    """Return a descriptor of a file with mode 0600; make the file if there is none.

    A link is not followed: a child may have put it there (attack 49).

    Args:
        path: the file.
        directory: a descriptor of the directory to which the path is relative.

    Raises:
        OSError: the file cannot be opened; ELOOP: it is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600, dir_fd=directory)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd
