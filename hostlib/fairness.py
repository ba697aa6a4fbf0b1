"""Fairness: turns for changes that are counted, and shares of the host's thread.

1. A task that gives a change to a thread holds the turn from its check of the count to
   the charge.  Meanwhile it waits for threads only, never for a client or a second turn.
   A change in the Trio thread needs no turn, unless a task holds it (``is_taken``).  A
   CLOSE and the end of a client wait for no turn.
2. Parsing costs the host more than sending costs a client.  So clients of one group (all
   clients without a token, the bodies of one child) have one share between them: one
   piece of work at a time, and a rest after a long piece.
3. Kinds of clients within a group (by their listener) have a share each within the common
   one, so that many clients of one kind delay one of another kind by one piece only.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from hostlib.threads import note_work

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RESTS = 2
"""A share rests this many times as long as its piece took: it has at most a third of the
thread."""

SHORT_S = 0.001
"""Longest work, seconds, after which a share does not rest."""


class Turn:
    """A turn, as an asynchronous context manager; its holder may not take it again.

    Cancellation: the wait for it can be cancelled.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = trio.Lock()

    @property
    def is_taken(self) -> bool:
        """Whether a task holds the turn."""
        return self._lock.locked()

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for the turn."""
        return self._lock.statistics().tasks_waiting

    async def __aenter__(self) -> None:
        note_work(1)  # the program is not replaced while a task waits or works
        try:
            await self._lock.acquire()
        except BaseException:
            note_work(-1)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        note_work(-1)


class Share:
    """A share of the host's thread, for work of which one piece is done at a time.

    Args:
        within: the share of which this is a part; None for a whole one.
    """

    def __init__(self, within: Share | None = None) -> None:
        self._lock = trio.Lock()
        self._within = within

    @property
    def held_or_waiting(self) -> int:
        """The number of tasks that hold the share or wait for it."""
        found = self._lock.statistics()
        return found.tasks_waiting + found.locked

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold the share for a block that does not wait: one piece of work.

        Cancellation: before the block, or after it.
        """
        async with self._lock:  # a checkpoint, so that other tasks run
            if self._within is not None:
                async with self._within.hold():
                    yield
                return
            begun_s = time.thread_time()
            try:
                yield
            finally:  # work that fails has taken as long
                took_s = time.thread_time() - begun_s
                if took_s > SHORT_S:
                    await trio.sleep(RESTS * took_s)
