"""The bound on the network's work in one turn of the loop, for all children.

A thousand connections that begin, or end, at once would make one turn of it: nobody
else's file would be read meanwhile (spec S5).
"""

from __future__ import annotations

import trio

MAX_STEPS = 16
"""Steps in a turn; one takes 0.1 to 0.3 ms."""


class Pace:
    """Lets a few steps be done in each turn of the loop; the others in later ones."""

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._waiting = trio.lowlevel.ParkingLot()
        self._is_turn_counted = False

    async def wait_turn(self) -> None:
        """Wait for a turn that has room for one more step.

        Not a checkpoint while this turn has.
        """
        if self._left:
            self._left -= 1
            self._count_turn()
        else:
            await self._waiting.park()

    def _count_turn(self) -> None:
        """Have the steps of the next turn counted anew."""
        if not self._is_turn_counted:
            self._is_turn_counted = True
            trio.lowlevel.current_trio_token().run_sync_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_turn_counted = False
        woken = self._waiting.unpark(count=MAX_STEPS)
        self._left = MAX_STEPS - len(woken)
        if woken:
            self._count_turn()
