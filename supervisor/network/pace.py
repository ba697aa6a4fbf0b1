"""The bound on the network's work in one turn of the loop, for all children.

A thousand connections that begin, or end, at once would make one long turn: no other
child's file would be read meanwhile (spec S5).
"""

from __future__ import annotations

from typing import NoReturn

import trio

MAX_STEPS = 16
"""Steps in a turn; one takes 0.1 to 0.3 ms."""


class Pace:
    """Lets a few steps be done in each turn of the loop; `run` begins the next turns."""

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._waiting = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()

    async def wait_turn(self) -> None:
        """Wait for a turn that has room for one more step.

        Not a checkpoint while this turn has.
        """
        if self._left:
            self._left -= 1
            self._idle.unpark()
        else:
            await self._waiting.park()

    async def run(self) -> NoReturn:
        """Make room in each turn that comes behind one with a step, until cancelled.

        A parked task: `run_sync_soon` writes to a socket, and costs four times as much.
        """
        while True:
            woken = self._waiting.unpark(count=MAX_STEPS)
            self._left = MAX_STEPS - len(woken)
            if woken:
                await trio.lowlevel.checkpoint()
            else:
                await self._idle.park()
