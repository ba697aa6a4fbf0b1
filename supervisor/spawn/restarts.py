"""When a child that ended is started again: a total table, and how long to wait.

Decisions, pure: the clock and the dice are given.

Rules of this file.

1. ``TABLE`` has an entry for every (phase, event); a missing one is found by the import.
2. The wait doubles with each restart in a row, up to a longest one, and is spread to
   either side: children that failed together do not come back together.
3. A child that ran for as long as the period begins anew with the shortest wait.
4. More than ``max_restarts`` within the period, and it is given up, with the reason.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from hostlib.state_table import StateTable
from supervisor.spawn.restart_policies import is_restarted

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BACKOFF_S = 60.0
"""Longest wait but for the spread: what is repaired is back within a minute."""

SPREAD = 0.25
"""Part of the wait by which it may be shorter or longer."""


class Phase(Enum):
    """Where a kept child is, beyond the life of one process of it."""

    WAITING = "waiting"  # for those that it comes after
    RUNNING = "running"
    BACKING_OFF = "backing off"
    ENDING = "ending"  # it was asked to stop for good
    ENDED = "ended"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


DOWN = (
    Phase.GIVEN_UP,
    Phase.BACKING_OFF,
    Phase.WAITING,
    Phase.ENDED,
    Phase.STOPPED,
)
"""Phases without a process, those first that an operator has to hear of."""


class RestartEvent(Enum):
    """An event of its life."""

    START = "start"  # its turn has come, or somebody asked
    ENDED = "ended"  # and it is not to come back
    ENDED_AGAIN = "ended, comes back"
    ENDED_TOO_OFTEN = "ended too often"
    WAITED = "waited"
    STOP = "stop"


class RestartAction(Enum):
    """The keeper's action then."""

    NOTHING = "-"
    SPAWN = "spawn"
    WAIT = "wait"
    STOP = "stop it"
    LEAVE = "leave it"


_P, _H, _D = Phase, RestartEvent, RestartAction

_ROWS: dict[Phase, dict[RestartEvent, tuple[Phase, RestartAction]]] = {
    _P.WAITING: {
        _H.START: (_P.RUNNING, _D.SPAWN),
        _H.ENDED: (_P.WAITING, _D.NOTHING),
        _H.ENDED_AGAIN: (_P.WAITING, _D.NOTHING),
        _H.ENDED_TOO_OFTEN: (_P.WAITING, _D.NOTHING),
        _H.WAITED: (_P.WAITING, _D.NOTHING),
        _H.STOP: (_P.STOPPED, _D.LEAVE),
    },
    _P.RUNNING: {
        _H.START: (_P.RUNNING, _D.NOTHING),
        _H.ENDED: (_P.ENDED, _D.LEAVE),
        _H.ENDED_AGAIN: (_P.BACKING_OFF, _D.WAIT),
        _H.ENDED_TOO_OFTEN: (_P.GIVEN_UP, _D.LEAVE),
        _H.WAITED: (_P.RUNNING, _D.NOTHING),
        _H.STOP: (_P.ENDING, _D.STOP),
    },
    _P.BACKING_OFF: {
        _H.START: (_P.RUNNING, _D.SPAWN),
        _H.ENDED: (_P.BACKING_OFF, _D.NOTHING),
        _H.ENDED_AGAIN: (_P.BACKING_OFF, _D.NOTHING),
        _H.ENDED_TOO_OFTEN: (_P.BACKING_OFF, _D.NOTHING),
        _H.WAITED: (_P.RUNNING, _D.SPAWN),
        _H.STOP: (_P.STOPPED, _D.LEAVE),
    },
    _P.ENDING: {
        _H.START: (_P.ENDING, _D.NOTHING),
        _H.ENDED: (_P.STOPPED, _D.LEAVE),
        _H.ENDED_AGAIN: (_P.STOPPED, _D.LEAVE),
        _H.ENDED_TOO_OFTEN: (_P.STOPPED, _D.LEAVE),
        _H.WAITED: (_P.ENDING, _D.NOTHING),
        _H.STOP: (_P.ENDING, _D.STOP),  # asked twice: at once
    },
    **{
        phase: {
            _H.START: (_P.RUNNING, _D.SPAWN),
            _H.ENDED: (phase, _D.NOTHING),
            _H.ENDED_AGAIN: (phase, _D.NOTHING),
            _H.ENDED_TOO_OFTEN: (phase, _D.NOTHING),
            _H.WAITED: (phase, _D.NOTHING),
            _H.STOP: (phase if phase is _P.GIVEN_UP else _P.STOPPED, _D.NOTHING),
        }
        for phase in (_P.ENDED, _P.STOPPED, _P.GIVEN_UP)
    },
}

TABLE = StateTable("kept child", Phase, RestartEvent, _ROWS)
"""The life of a kept child; every event can happen in every phase."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When and how often (face: [child.NAME]).

    Attributes:
        restart: one of ``restart_policies.RESTARTS``.
        backoff_s: the first wait, seconds.
        max_restarts: most restarts within the period.
        within_s: the period, seconds.
        max_backoff_s: the longest wait, seconds.
        spread: part of a wait by which it may be shorter or longer.
    """

    restart: str = "no"
    backoff_s: float = 1.0
    max_restarts: int = 5
    within_s: float = 300.0
    max_backoff_s: float = MAX_BACKOFF_S
    spread: float = SPREAD

    def wants(self, status: int) -> bool:
        """Tell whether a child that ended with this status comes back."""
        return is_restarted(self.restart, status)

    def is_endless(self) -> bool:
        """Tell whether a child that ends at once, again and again, is never given up.

        That is where the waits between so many restarts take as long as the period.
        """
        waits_s, wait_s = 0.0, self.backoff_s
        for _ in range(self.max_restarts):
            waits_s += min(wait_s, self.max_backoff_s)
            wait_s *= 2
            if waits_s >= self.within_s:
                return True
            if wait_s == 0:
                break
        return False


class RestartsState(msgspec.Struct):
    """The hand-over of the restarts of one child; ages in seconds."""

    total: int
    in_a_row: int
    age_s: float
    recent_ages_s: list[float]


class Restarts:
    """The restarts of one child.

    Args:
        policy: when and how often.
        clock: seconds of a monotonic clock; jumps of the wall clock do not count.
        dice: 0 <= dice() < 1.

    Attributes:
        total: restarts so far.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        clock: Callable[[], float],
        dice: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.total = 0
        self._clock = clock
        self._dice = dice
        self._recent: deque[float] = deque()
        self._in_a_row = 0
        self._started = clock()

    def started(self) -> None:
        """Record that it was started."""
        self._started = self._clock()

    def ended(self, status: int) -> RestartEvent:
        """Tell what its end means.

        Args:
            status: as a shell would see it; 0 for success.
        """
        policy = self.policy
        if not policy.wants(status):
            return RestartEvent.ENDED
        now = self._clock()
        if now - self._started >= policy.within_s:
            self._in_a_row = 0
        while self._recent and now - self._recent[0] >= policy.within_s:
            self._recent.popleft()
        if len(self._recent) >= policy.max_restarts:
            return RestartEvent.ENDED_TOO_OFTEN
        self._recent.append(now)
        self.total += 1
        return RestartEvent.ENDED_AGAIN

    def wait_s(self) -> float:
        """Return how long to wait before the restart that was just decided."""
        # 2.0 ** 1024 is none, and the cap is reached long before.
        wait_s = self.policy.backoff_s * 2.0 ** min(self._in_a_row, 64)
        self._in_a_row += 1
        spread = 1 + self.policy.spread * (2 * self._dice() - 1)
        return min(wait_s, self.policy.max_backoff_s) * spread

    def snapshot(self) -> RestartsState:
        """Return what ``restore`` takes: no two programs count time alike."""
        now = self._clock()
        return RestartsState(
            self.total,
            self._in_a_row,
            now - self._started,
            [now - then for then in self._recent],
        )

    def restore(self, state: RestartsState) -> None:
        """Restore the restarts of the program before."""
        now = self._clock()
        self.total = state.total
        self._in_a_row = state.in_a_row
        self._started = now - state.age_s
        self._recent = deque(now - age for age in state.recent_ages_s)

    def reset(self) -> None:
        """Forget the past: somebody asked for this start."""
        self._recent.clear()
        self._in_a_row = 0
