"""Turns on a connection that several threads and processes share (spec T5)."""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident
from fcntl import F_GETSIG, F_SETSIG, LOCK_EX, LOCK_NB, LOCK_UN, fcntl, lockf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

UNDER_WAY = 63
"""Mark on a connection while a request is under way; see ``ConnectionTurn``."""


def client_errors() -> ModuleType:
    """Return ``vfs.client.errors``, which the first failure loads."""
    import vfs.client.errors  # noqa: PLC0415 - children without failures do not load it

    return vfs.client.errors


class ConnectionTurn:
    """The turn on a connection, held by one thread of one process (spec T5).

    Threads take a lock object, processes a POSIX record lock on the connection's
    descriptor, which the kernel drops when its holder ends.  If a holder dies in the middle
    of a request, the next one would misread its reply, or the host the next request.  So a
    request sets a mark that outlives its process: the signal number of the open file
    description (F_SETSIG, fcntl(2)), which has no other effect without O_ASYNC.  All this
    costs 1.6 us a request.

    Invariant: a process closes no duplicate of the descriptor while it has its turn, or
    the kernel drops the record lock.

    Args:
        shared: other processes may use the connection too.
    """

    __slots__ = ("_holder", "_pid", "_shared", "lock")

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self.lock = allocate_lock()
        self._holder = 0
        self._pid = os.getpid()

    def take(self, fd: int, *, wait: bool = True) -> bool:
        """Take the turn and mark that a request is under way.

        Args:
            fd: the descriptor for requests: a write lock needs one that is open for
                writing.
            wait: wait until the other holders have finished.

        Returns:
            Whether it was taken; always so after waiting.

        Raises:
            ConnectionLostError: a process died in the middle of its request.
            FsProxyError: ``EDEADLK``: this thread has the turn already (a finalizer or
                a signal handler came between a request and its reply).
        """
        if self._pid != os.getpid():
            # A forked process: the thread that held the lock does not exist here.
            self.lock = allocate_lock()
            self._holder = 0
            self._pid = os.getpid()
        if wait and self._holder == get_ident():
            raise client_errors().deadlock()
        if not self.lock.acquire(wait):
            return False
        try:
            if self._shared:
                self._take_from_processes(fd, wait=wait)
        except (BlockingIOError, PermissionError):  # both mean "locked", fcntl(2)
            self.lock.release()
            return False
        except BaseException:
            self.lock.release()
            raise
        self._holder = get_ident()
        return True

    @property
    def is_taken(self) -> bool:
        """Whether a thread of this process has it; true as long as the mark is set.

        For signal handlers, which may run between any two steps of ``take`` and
        ``give_back``.
        """
        return self._holder != 0

    def _take_from_processes(self, fd: int, *, wait: bool) -> None:
        lockf(fd, LOCK_EX if wait else LOCK_EX | LOCK_NB)
        if fcntl(fd, F_GETSIG) == UNDER_WAY:
            lockf(fd, LOCK_UN)
            raise client_errors().connection_abandoned(fd)
        self._holder = get_ident()  # before the mark: ``is_taken``
        fcntl(fd, F_SETSIG, UNDER_WAY)

    def give_back(self, fd: int, *, usable: bool) -> None:
        """Release the turn.

        Args:
            fd: the descriptor of ``take``.
            usable: the next bytes belong to the next request; else the mark stays.
        """
        try:
            if self._shared:
                if usable:
                    fcntl(fd, F_SETSIG, 0)
                lockf(fd, LOCK_UN)
        finally:
            self._holder = 0  # after the mark: ``is_taken``
            self.lock.release()
