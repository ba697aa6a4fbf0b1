"""Starts of tools that can be given up: an exec can hang as long as a disk.

    with Start(...): order, exec -> the tool runs

Rules of this file.

1. A start takes a millisecond: it is looked at only if it takes long (``slow_steps``).
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

    from supervisor.toolexec.slow_steps import Lookout
    from supervisor.toolexec.wire import Wire

LEAST_S = 0.001
"""The remainder of a time limit that the start has used up: 0 would be no limit."""


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
        lookout: of this host.
        wire: of the client.
        limit_s: the time limit of its tool, seconds; 0 for none.
        detach: whether it goes on without the client.

    Attributes:
        code: the exit code of a given-up start; None for none.

    Raises:
        StartEndedError: it was given up with an exit code.
        BusyError: it was given up without one: its client is gone.
    """

    __slots__ = ("_detach", "_lookout", "_scope", "_until", "_wire", "code")

    def __init__(
        self,
        lookout: Lookout,
        wire: Wire,
        limit_s: float = 0.0,
        *,
        detach: bool = False,
    ) -> None:
        self._lookout = lookout
        self._wire = wire
        self._detach = detach
        self._until = trio.current_time() + limit_s if limit_s else math.inf
        self._scope = trio.CancelScope()
        self.code: int | None = None

    def __enter__(self) -> None:
        self._lookout.add(self)
        self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._lookout.remove(self)
        is_swallowed = self._scope.__exit__(kind, error, trace)
        if not self._scope.cancelled_caught:
            return is_swallowed
        if self.code is None:
            raise BusyError
        raise StartEndedError(self.code)

    def give_up(self, code: int | None = None) -> None:
        """End it if it is not over: with an exit code, or without a client."""
        self.code = code
        self._scope.cancel()

    @property
    def is_given_up(self) -> bool:
        """Whether giving up was asked for, even if too late."""
        return self._scope.cancel_called

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
