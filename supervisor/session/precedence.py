"""Going before others while many clients ask at once.

What it is: the weight of this process's scheduling group, raised for as long as a crowd is
served without a pause. What it is not: it gives nobody less than its share when the host
has nothing to do, and it is no more than a request.

Children have a session each, and the kernel shares a processor out by sessions
(``sched_autogroup``, sched(7)). A host that serves sixteen of them is one of seventeen,
and whoever it wakes takes its place: it has 60 % of a processor where there is one for it
alone. One client alone is the other way round: it has to go first when it is woken.

Only for a host that leads its session, as a daemon does: others of a session share its
group. Only for one that may (CAP_SYS_NICE); for all others nothing changes.

Why so: ADR 63.
"""

from __future__ import annotations

import os

CROWD = 4
"""Clients that are ready in one turn and are many; fewer are served as they come."""

TURNS = 32
"""Crowded turns without a rest that make a crowd, and others in a row that end it: a
millisecond.  Of turns with fewer the pump tells only where they may end one."""

_GROUP = "/proc/self/autogroup"
_AHEAD, _AS_OTHERS = b"-10", b"0"  # nice values: nine times the weight of others


class Precedence:
    """Whether this process goes before others.

    Attributes:
        is_ahead: it does.
    """

    __slots__ = ("_may", "_turns", "is_ahead")

    def __init__(self) -> None:
        self.is_ahead = False
        self._turns = 0  # that speak for a change
        self._may = os.getsid(0) == os.getpid()

    def turn(self, ready: int) -> None:
        """Take note of a turn in which so many clients were ready."""
        if (ready >= CROWD) == self.is_ahead:
            self._turns = 0
            return
        self._turns += 1
        if self._turns == TURNS:
            self._change()

    def rest(self) -> None:
        """Take note that nobody asks, or that the host stops."""
        self._turns = 0
        if self.is_ahead:
            self._change()

    def _change(self) -> None:
        self._turns = 0
        if not self._may:
            return
        try:
            _ask_for(_AS_OTHERS if self.is_ahead else _AHEAD)
        except BlockingIOError:
            return  # ten times a second without CAP_SYS_ADMIN: another time
        except OSError:  # no such kernel, or it is not for us
            self._may = False
        else:
            self.is_ahead = not self.is_ahead


def _ask_for(nice: bytes) -> None:
    """Ask for a weight of this process's group.

    Raises:
        OSError: it was not given.
    """
    fd = os.open(_GROUP, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, nice)
    finally:
        os.close(fd)
