"""Turns: work that others can ask for without end, done by one of them at a time.

Rule of this file: to take apart what was sent costs the host more than to send it.  So
those who belong together (all strangers with a large head, the bodies of one child) have
one turn between them, and after a long piece of work the turn rests for ``RESTS`` times
as long: they have a part of the host's thread, and the others have the rest.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RESTS = 2
"""A third of the thread is the most that a turn can have."""

SHORT_S = 0.001
"""Work that nobody feels, seconds: no rest follows it."""


class Turn:
    """Work of which one piece is done at a time."""

    def __init__(self) -> None:
        self._lock = trio.Lock()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Have the turn for a block that does not wait: one piece of work.

        Cancellation: before the block, or after it.
        """
        async with self._lock:  # which lets others run in any case
            begun_s = time.thread_time()
            yield
            took_s = time.thread_time() - begun_s
            if took_s > SHORT_S:
                await trio.sleep(RESTS * took_s)
