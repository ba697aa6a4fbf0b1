"""Watches short steps, and looks at those that take long.

Rules of this file.

1. A short step costs an entry in a set and no task. One task looks at all steps every
   ``LOOK_S`` while there are some, and sleeps while there are none.
2. A step that lasts a whole ``LOOK_S`` is looked at, until it is removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from typing import NoReturn

LOOK_S = 0.25
"""Time between two looks: a tenth of the time for a client's end."""


class Brief(Protocol):
    """A step that should be short."""

    def look(self) -> None:
        """Handle a slow step, at once and without waiting."""
        ...


class Lookout:
    """The short steps under way in one host."""

    def __init__(self) -> None:
        self._under_way: set[Brief] = set()
        self._some = trio.Event()

    @property
    def under_way(self) -> frozenset[Brief]:
        """The steps that have not ended."""
        return frozenset(self._under_way)

    def add(self, one: Brief) -> None:
        """Watch a step."""
        self._under_way.add(one)
        self._some.set()

    def remove(self, one: Brief) -> None:
        """Remove a step that has ended; nothing if it is not there."""
        self._under_way.discard(one)

    async def run(self) -> NoReturn:
        """Look at slow steps until cancelled."""
        while True:
            await self._some.wait()
            while self._under_way:
                before = tuple(self._under_way)
                await trio.sleep(LOOK_S)
                for one in self._under_way.intersection(before):
                    one.look()
            self._some = trio.Event()
