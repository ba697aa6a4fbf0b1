"""One change at a time to what a child's bounds count, while a thread is at it.

A worker thread changes a file; what the ledger says of it is looked at and corrected
in the Trio thread, before and after. Between the two nobody beneath the same bounds may
change what was looked at.

Rules of this file.

1. A task that hands such a change to a thread has the turn from the look to the account.
   Who has it waits for threads and for nothing else: for no client, and no second turn.
2. What is changed in the Trio thread needs no turn, unless somebody has it (``is_taken``):
   then it waits for its own. Where nothing is bounded nobody waits (``ledger.turn_of``).
3. A CLOSE, and the end of a client, wait for no turn: of a file that has lost its last
   name meanwhile they give back nothing, for the holder of the turn does.
"""

from __future__ import annotations

import trio

from hostlib.threads import note_work


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
        note_work(1)  # who waits will go on: the program is not replaced meanwhile
        try:
            await self._lock.acquire()
        except BaseException:
            note_work(-1)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        note_work(-1)
