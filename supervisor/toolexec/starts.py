"""Starts of tools that can be given up: an exec can hang as long as a disk.

    with Start(...): order, exec -> the tool runs

Rules of this file.

1. A start takes a millisecond, and costs an entry in a set and no task. One task looks
   at all starts every ``LOOK_S`` while there are some: at those that were there before.
2. A start without its client is given up, unless it is detached (spec E25), and so is
   one that takes longer than its tool may run.
3. A signal ends a process before its exec, as the kernel's default does: it has no
   handlers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from protocol.toolexec.requests import TIMED_OUT
from supervisor.toolexec.slots import BusyError
from supervisor.toolexec.wire import GoneError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn

    from supervisor.toolexec.wire import Wire

LEAST_S = 0.001
"""The remainder of a time limit that the start has used up: 0 would be no limit."""


LOOK_S = 0.25
"""Time between two looks: a tenth of the time for a client's end."""


class StartEndedError(Exception):
    """A start was given up; its client gets the reply of an ended tool.

    Attributes:
        code: its exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Start:
    """One start, made inside its block; the block raises if it was given up.

    Args:
        watch: of this host.
        wire: of the client.
        limit_s: the time limit of its tool, seconds; 0 for none.
        detach: whether it goes on without the client.

    Attributes:
        code: the exit code of a given-up start; None for none.
        is_given_up: whether giving up was asked for, even if too late.

    Raises:
        StartEndedError: it was given up with an exit code.
        BusyError: it was given up without one: its client is gone.
    """

    __slots__ = (
        "_detach",
        "_scope",
        "_until",
        "_watch",
        "_wire",
        "code",
        "is_given_up",
    )

    def __init__(
        self,
        watch: StartWatch,
        wire: Wire,
        limit_s: float = 0.0,
        *,
        detach: bool = False,
    ) -> None:
        self._watch = watch
        self._wire = wire
        self._detach = detach
        self._until = trio.current_time() + limit_s if limit_s else math.inf
        self._scope = trio.CancelScope()
        self.code: int | None = None
        self.is_given_up = False

    def __enter__(self) -> None:
        self._watch.add(self)
        self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._watch.remove(self)
        is_swallowed = self._scope.__exit__(kind, error, trace)
        if not self._scope.cancelled_caught:
            return is_swallowed
        if self.code is None:
            raise BusyError
        raise StartEndedError(self.code)

    def give_up(self, code: int | None = None) -> None:
        """End it if it is not over: with an exit code, or without a client."""
        self.code = code
        self.is_given_up = True
        self._scope.cancel()

    @property
    def left_s(self) -> float:
        """Return the rest of its tool's time, seconds; 0 for no limit."""
        if self._until == math.inf:
            return 0.0
        return max(LEAST_S, self._until - trio.current_time())

    def look(self) -> None:
        """Give it up if its client is gone, or it takes too long."""
        if trio.current_time() >= self._until:
            self.give_up(TIMED_OUT)
        elif not self._detach:
            try:
                self._wire.check_there()
            except (GoneError, OSError):
                self.give_up()


class StartWatch:
    """The starts under way in one host."""

    def __init__(self) -> None:
        self._under_way: set[Start] = set()
        self._some = trio.Event()

    @property
    def under_way(self) -> frozenset[Start]:
        """The starts that have not ended."""
        return frozenset(self._under_way)

    def add(self, one: Start) -> None:
        """Watch a start."""
        self._under_way.add(one)
        self._some.set()

    def remove(self, one: Start) -> None:
        """Remove a start that has ended."""
        self._under_way.discard(one)

    async def run(self) -> NoReturn:
        """Look at slow starts until cancelled (rule 1)."""
        while True:
            await self._some.wait()
            while self._under_way:
                before = tuple(self._under_way)
                await trio.sleep(LOOK_S)
                for one in self._under_way.intersection(before):
                    one.look()
            self._some = trio.Event()
