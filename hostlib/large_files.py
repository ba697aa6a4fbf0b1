"""Closing files whose pages take long to free, in a background thread.

Sources: close(2), unlink(2).
"""

import contextlib
import os

from hostlib.threads import in_background

INLINE_TRUNCATE_BYTES = 16 * 1024 * 1024
"""Longest file that is emptied inline: freeing its pages takes about a millisecond; a GiB
takes 100 ms."""


def close_file(fd: int) -> None:
    """Close a file; in a thread if that frees many pages.

    Closing a file without a name frees its pages, which takes 50 to 100 ms for a GiB.
    One thread closes all of them.

    Raises:
        OSError: close(2) failed; a failure in the thread is ignored.
    """
    if frees_much(fd):
        _closing.append(fd)
        in_background(_close, fd)
    else:
        os.close(fd)


def frees_much(fd: int) -> bool:
    """Return whether closing a file may free many pages."""
    status = os.fstat(fd)
    return not status.st_nlink and status.st_blocks * 512 > INLINE_TRUNCATE_BYTES


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # no caller waits for the result
        os.close(fd)
    _closing.remove(fd)


# A number may be in it twice: it can be reused between its close and its removal.
_closing: list[int] = []


def closing_files() -> tuple[int, ...]:
    """Return the descriptors that a thread is closing."""
    return tuple(_closing)
