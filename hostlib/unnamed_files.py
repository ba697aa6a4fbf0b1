"""Files that never have a name: a host that is killed leaves nothing of them behind."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class UnnamedFiles:
    """The open files without a name of one spool.

    Args:
        directory: where they are made; None: the system's temporary one.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> int:
        """Open a new file; ``close`` closes it.

        Raises:
            OSError: the directory cannot have one.
        """
        fd = open_unnamed(self._directory)
        self._open.add(fd)
        return fd

    def take_over(self, fd: int) -> None:
        """Own a file that another program of this host has opened."""
        self._open.add(fd)

    def close(self, fd: int) -> None:
        """Close a file; what is mapped of it stays."""
        self._open.discard(fd)
        os.close(fd)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield each descriptor, with a word for it."""
        for fd in tuple(self._open):
            yield fd, "content"

    def identities(self) -> set[tuple[int, int]]:
        """Return the device and inode of each file."""
        found = set()
        for fd in tuple(self._open):
            with contextlib.suppress(OSError):  # a thread has just closed it
                found.add(identity_of(fd))
        return found


def open_unnamed(directory: str | None = None) -> int:
    """Open a new file that has no name, or none any more; return its descriptor.

    Args:
        directory: where it is made; None: the system's temporary one.

    Raises:
        OSError: the directory cannot have one.
    """
    directory = directory or tempfile.gettempdir()
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
    try:
        return os.open(directory, flags, 0o600)
    except OSError as why:
        if why.errno not in _NO_TMPFILE:
            raise
    fd, name = tempfile.mkstemp(dir=directory)
    os.unlink(name)
    return fd


_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
"""Errors of a file system without O_TMPFILE, open(2)."""


def identity_of(fd: int) -> tuple[int, int]:
    """Return the device and inode of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def descriptors_of(files: set[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Return (file, descriptor) of each that this process has of some files."""
    found = []
    for name in os.listdir("/proc/self/fd") if files else ():
        fd = int(name)
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            identity = identity_of(fd)
            if identity in files:
                found.append((identity, fd))
    return found
