"""Waiting for descriptors as Trio does, and by polling if no epoll watch is left.

Rules of this file.

1. The kernel counts epoll watches by user, over all user namespaces (epoll(7),
   max_user_watches).  A host that is not root shares that number with its children, so a
   child may use it up; host and waiting tasks go on all the same.
2. A task without a watch polls, and is late by at most ``LOOK_PAUSE_S``.  The first time
   is reported.
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
        """An object with a descriptor, such as a socket."""

        def fileno(self) -> int:
            """Return the descriptor."""


LOOK_PAUSE_S = 0.02
"""Pause between polls of a descriptor without a watch: no longer than delays on a busy
machine.  Each such wait takes 0.7 ms of a second; they are few, since Trio keeps the
watches that it has."""


_tell: trio.lowlevel.RunVar[Callable[[str], None]] = trio.lowlevel.RunVar("tell")


def report_unwatched_to(tell: Callable[[str], None]) -> None:
    """Set the function that is called the first time that no epoll watch is left."""
    _tell.set(tell)


def note_unwatched() -> None:
    """Record that a descriptor has no watch and is polled; report the first time."""
    tell = _tell.get(_ignore_report)
    _tell.set(_ignore_report)
    tell(f"What is waited for may be noticed late: {NO_WATCH}")


def _ignore_report(_: str) -> None:
    """Ignore the report: it was made before, or no function was set."""


async def wait_readable(fd: int | HasFileno) -> None:
    """Wait until a descriptor is readable, as ``trio.lowlevel.wait_readable``."""
    try:
        await trio.lowlevel.wait_readable(fd)
    except OSError as why:
        await _look(why, fd, select.POLLIN)


async def wait_writable(fd: int | HasFileno) -> None:
    """Wait until a descriptor is writable, as ``trio.lowlevel.wait_writable``."""
    try:
        await trio.lowlevel.wait_writable(fd)
    except OSError as why:
        await _look(why, fd, select.POLLOUT)


async def _look(why: OSError, fd: int | HasFileno, what: int) -> None:
    """Poll until a descriptor is ready, if there was no watch; else raise the error."""
    if why.errno != errno.ENOSPC:
        raise why
    note_unwatched()
    # A new poll each time: the descriptor may be closed meanwhile, and its number reused.
    while not _is_ready(fd, what):  # noqa: ASYNC110 - no event tells of it
        await trio.sleep(LOOK_PAUSE_S)


def _is_ready(fd: int | HasFileno, what: int) -> bool:
    poll = select.poll()
    poll.register(fd, what)
    return bool(poll.poll(0))
