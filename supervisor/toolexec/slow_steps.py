"""Steps that are over in a moment, and are looked at only where they take long.

Rules of this file.

1. Nothing is made for what is over in a moment: it is put down and crossed out.  One task
   for all looks at them every ``LOOK_S`` while there are some, and sleeps while there are
   none.
2. A step that is there for a whole ``LOOK_S`` is looked at, each time until it is
   removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from typing import NoReturn

LOOK_S = 0.25
"""Between two looks at what takes long: a tenth of what a client's end may take."""


class Brief(Protocol):
    """A step that may take longer than it should."""

    def look(self) -> None:
        """Do what is to be done for it where it takes long; at once, and so not to wait."""
        ...


class Lookout:
    """The steps under way in one host that should be over in a moment."""

    def __init__(self) -> None:
        self._under_way: set[Brief] = set()
        self._some = trio.Event()

    @property
    def under_way(self) -> frozenset[Brief]:
        """The steps that are not over."""
        return frozenset(self._under_way)

    def put_down(self, one: Brief) -> None:
        """Have an eye on something."""
        self._under_way.add(one)
        self._some.set()

    def cross_out(self, one: Brief) -> None:
        """Forget something that is over; nothing if it is not there."""
        self._under_way.discard(one)

    async def run(self) -> NoReturn:
        """Look at those that take long, until cancelled."""
        while True:
            await self._some.wait()
            while self._under_way:
                before = tuple(self._under_way)
                await trio.sleep(LOOK_S)
                for one in self._under_way.intersection(before):
                    one.look()
            self._some = trio.Event()
