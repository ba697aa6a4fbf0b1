"""Files without a name: the kernel removes them when a host is killed."""

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
        directory: the directory of their file system; None for the system's temporary
            one.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self) -> int:
        """Open a new file; ``close`` closes it.

        Raises:
            OSError: no file can be made there.
        """
        fd = open_unnamed(self._directory)
        self._open.add(fd)
        return fd

    def take_over(self, fd: int) -> None:
        """Own a file that the program before this one has opened."""
        self._open.add(fd)

    def close(self, fd: int) -> None:
        """Close a file; its mappings stay."""
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
        if why.errno not in _NO_TMPFILE:
            raise
    fd, name = tempfile.mkstemp(dir=directory)
    os.unlink(name)
    return fd


_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
"""Errors of open(2) on a file system without O_TMPFILE."""


def identity_of(fd: int) -> tuple[int, int]:
    """Return the device and inode of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def descriptors_of(files: set[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Return (file, descriptor) of each descriptor of this process on given files."""
    found = []
    for name in os.listdir("/proc/self/fd") if files else ():
        fd = int(name)
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            identity = identity_of(fd)
            if identity in files:
                found.append((identity, fd))
    return found
