"""Whose turn it is: to change what a child's bounds count, and to have the host's thread.

Rules of this file.

1. A task that hands a change to a thread has the turn from its look at what is counted to
   the account. It waits for threads meanwhile and for nothing else: for no client, and no
   second turn. A change in the Trio thread needs none, unless somebody has it
   (``is_taken``). A CLOSE, and the end of a client, wait for no turn.
2. To take apart what was sent costs the host more than to send it. So those who belong
   together (all strangers with a large head, the bodies of one child) have one share
   between them: one piece of work at a time, and after a long one a rest.
3. Where some of those can be told from others (by the listener that they came to), each
   kind has a share of its own within the common one: however many are of one kind, one of
   another kind waits for one of them.
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
"""So many times what a piece took a share rests: it has a third of the thread at most."""

SHORT_S = 0.001
"""Work that nobody feels, seconds: no rest follows it."""


class Turn:
    """Whose turn it is; an asynchronous context manager, not to be taken twice.

    Cancellation: the wait for it can be cancelled.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = trio.Lock()

    @property
    def is_taken(self) -> bool:
        """Whether somebody has it."""
        return self._lock.locked()

    async def __aenter__(self) -> None:
        note_work(1)  # it will go on: the program is not replaced meanwhile
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
        within: the share of which this is a part; None for one that is whole.
    """

    def __init__(self, within: Share | None = None) -> None:
        self._lock = trio.Lock()
        self._within = within

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Have the share for a block that does not wait: one piece of work.

        Cancellation: before the block, or after it.
        """
        async with self._lock:  # which lets others run in any case
            if self._within is not None:
                async with self._within.taken():
                    yield
                return
            begun_s = time.thread_time()
            yield
            took_s = time.thread_time() - begun_s
            if took_s > SHORT_S:
                await trio.sleep(RESTS * took_s)
