"""A throttle on work that others can ask for without end: one piece of it at a time.

Rules of this file.

1. To take apart what was sent costs the host more than to send it.  So those who belong
   together (all strangers with a large head, the bodies of one child) have one throttle
   between them, and after a long piece of work it rests for ``RESTS`` times as long: they
   have a part of the host's thread, and the others have the rest.
2. Where some of those can be told from others (by the listener that they came to), each
   kind has a throttle of its own within the common one: however many are of one kind,
   who is of another waits for one of them.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RESTS = 2
"""A third of the thread is the most that goes through one."""

SHORT_S = 0.001
"""Work that nobody feels, seconds: no rest follows it."""


class Throttle:
    """Work of which one piece is done at a time.

    Args:
        within: the throttle of which this is a part; None for one that is whole.
    """

    def __init__(self, within: Throttle | None = None) -> None:
        self._lock = trio.Lock()
        self._within = within

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Have the turn for a block that does not wait: one piece of work.

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
