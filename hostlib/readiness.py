"""Waiting for descriptors, also where no epoll watch is left.

Trio's waits, and a way without them.

Rules of this file.

1. The kernel counts epoll watches by user, over all user namespaces (epoll(7),
   max_user_watches).  A host that is not root shares that number with its children, so
   one of them may have used it up: that ends neither the host nor what waits.
2. Who has no watch looks again and again, and is late by ``LOOK_PAUSE_S`` at most.  That
   this has begun is told, once.
"""

from __future__ import annotations

import errno
import select
from typing import TYPE_CHECKING

import trio

from hostlib.linux.epoll import NO_WATCH

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class HasFileno(Protocol):
        """A socket, say."""

        def fileno(self) -> int:
            """Return its descriptor."""


LOOK_PAUSE_S = 0.02
"""Between looks at what cannot be watched: late by no more than a busy machine makes it.
Each who waits so takes 0.7 ms of a second; Trio keeps the watches that it has, so these
are the few that have come since."""


_tell: trio.lowlevel.RunVar[Callable[[str], None]] = trio.lowlevel.RunVar("tell")


def tell_by(tell: Callable[[str], None]) -> None:
    """Have it told when no epoll watch is left for something, the first time."""
    _tell.set(tell)


def note_unwatched() -> None:
    """Record that something has no watch, and is looked at."""
    tell = _tell.get(_to_nobody)
    _tell.set(_to_nobody)
    tell(f"What is waited for may be noticed late: {NO_WATCH}")


def _to_nobody(_: str) -> None:
    """Tell nobody: it was told before, or nobody asked for it."""


async def wait_readable(fd: int | HasFileno) -> None:
    """Wait as ``trio.lowlevel.wait_readable``."""
    try:
        await trio.lowlevel.wait_readable(fd)
    except OSError as why:
        await _look(why, fd, select.POLLIN)


async def wait_writable(fd: int | HasFileno) -> None:
    """Wait as ``trio.lowlevel.wait_writable``."""
    try:
        await trio.lowlevel.wait_writable(fd)
    except OSError as why:
        await _look(why, fd, select.POLLOUT)


async def _look(why: OSError, fd: int | HasFileno, what: int) -> None:
    """Look until it is ready, if there was no watch to wait by."""
    if why.errno != errno.ENOSPC:
        raise why
    note_unwatched()
    # A new one each time: it may be closed meanwhile, and its number given again.
    while not _is_ready(fd, what):  # noqa: ASYNC110 - no event tells of it
        await trio.sleep(LOOK_PAUSE_S)


def _is_ready(fd: int | HasFileno, what: int) -> bool:
    poll = select.poll()
    poll.register(fd, what)
    return bool(poll.poll(0))
