"""Descriptors of files and directories: closed with a block, opened without links."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hostlib.linux.syscalls import open_exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of open(2) for a directory itself, to read it and what is in it."""


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Give a descriptor, which is closed when the block ends."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_directory(path: bytes, top: int) -> int:
    """Open a directory beneath another one without following any link.

    Args:
        path: relative to the other one; b"" for that itself.
        top: a descriptor of the other one.

    Raises:
        OSError: as of ``open_exactly``.
    """
    return open_exactly(path or b".", top, DIRECTORY)
