"""Closing files that give much back to the kernel: in a thread that nobody waits for.

One thread for all of them, there for as long as there are any.

Sources: close(2), unlink(2).
"""

import contextlib
import os
import threading

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
        _closer.close(fd)
    else:
        os.close(fd)


def frees_much(fd: int) -> bool:
    """Tell whether to close a file may give much back to the kernel."""
    status = os.fstat(fd)
    return not status.st_nlink and status.st_blocks * 512 > INLINE_TRUNCATE_BYTES


class _Closer:
    """A thread that closes files, for as long as there are any."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._is_at_work = False
        self._lock = threading.Lock()

    def close(self, fd: int) -> None:
        with self._lock:
            self._fds.append(fd)
            if self._is_at_work:
                return
            self._is_at_work = True
        afterwards(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._fds:
                    self._is_at_work = False
                    return
                fd = self._fds[0]
            with contextlib.suppress(OSError):  # nobody is there to be told
                os.close(fd)
            with self._lock:
                self._fds.remove(fd)

    def descriptors(self) -> tuple[int, ...]:
        return tuple(self._fds)


_closer = _Closer()


def files_closing() -> tuple[int, ...]:
    """Return the descriptors that are being closed in a thread."""
    return _closer.descriptors()
