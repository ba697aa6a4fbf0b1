"""Closing files that give much back to the kernel: in a thread that nobody waits for.

Sources: close(2), unlink(2).
"""

import contextlib
import os

from hostlib.threads import afterwards

INLINE_TRUNCATE_BYTES = 16 * 1024 * 1024
"""Longest file that is emptied inline: to free its pages takes about a millisecond, as
long as others wait anyhow; a GiB takes 100 ms."""


def close_file(fd: int) -> None:
    """Close a file; in a thread where that gives much back to the kernel.

    That is one without a name: to free a GiB takes 50 to 100 ms. One thread closes all
    of them, however many there are.

    Raises:
        OSError: it could not be closed as it should; not from the thread.
    """
    if frees_much(fd):
        _closing.append(fd)
        afterwards(_close, fd)
    else:
        os.close(fd)


def frees_much(fd: int) -> bool:
    """Tell whether to close a file may give much back to the kernel."""
    status = os.fstat(fd)
    return not status.st_nlink and status.st_blocks * 512 > INLINE_TRUNCATE_BYTES


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # nobody is there to be told
        os.close(fd)
    _closing.remove(fd)


_closing: list[int] = []  # a number may be in it twice: it is free before it is removed


def files_closing() -> tuple[int, ...]:
    """Return the descriptors that are being closed in a thread."""
    return tuple(_closing)
