"""Starts of tools, as what may be given up: an exec can hang for as long as a disk does.

    with Start(...): order, exec -> the tool runs

Rules of this file.

1. A start is over within a millisecond: it is looked at only if it takes long
   (``slow_steps``).
2. A start without its client is given up, unless it was to be detached (spec E25), and
   so is one that takes longer than its tool may run.
3. A signal ends who is not its program yet, as the kernel would end it: nothing in it
   handles one.
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
"""The rest of a time limit that its start has used up: 0 would be none."""


class StartEndedError(Exception):
    """A start was given up, and what asked for it is answered as a tool that has ended.

    Attributes:
        code: its exit code.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Start:
    """One start, within whose block it is made; left by an error if it was given up.

    Args:
        lookout: of this host.
        wire: of the client that asked for it.
        limit_s: what its tool may take, seconds; 0 for no limit.
        detach: it goes on when the client is gone.

    Attributes:
        code: the exit code with which it was given up; None for none.

    Raises:
        StartEndedError: it was given up with an exit code.
        BusyError: it was given up without one: nobody waits for it.
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
        self._lookout.put_down(self)
        self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._lookout.cross_out(self)
        is_swallowed = self._scope.__exit__(kind, error, trace)
        if not self._scope.cancelled_caught:
            return is_swallowed
        if self.code is None:
            raise BusyError
        raise StartEndedError(self.code)

    def give_up(self, code: int | None = None) -> None:
        """End it if it is not over: as a tool with an exit code, or for nobody."""
        self.code = code
        self._scope.cancel()

    @property
    def is_given_up(self) -> bool:
        """Whether that was asked for, be it too late."""
        return self._scope.cancel_called

    @property
    def left_s(self) -> float:
        """The rest of its tool's time, seconds; 0 for no limit."""
        if self._until == math.inf:
            return 0.0
        return max(LEAST_S, self._until - trio.current_time())

    def look(self) -> None:
        """Give it up if nobody waits for it any more, or it takes too long."""
        if trio.current_time() >= self._until:
            self.give_up(TIMED_OUT)
        elif not self._detach:
            try:
                self._wire.check_there()
            except (GoneError, OSError):
                self.give_up()
