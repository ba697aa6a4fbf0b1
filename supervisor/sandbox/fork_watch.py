"""Less processor time for a child whose forks are refused again and again.

1. A refused fork costs all others: a hundred processes that try it without a pause take
   the processors. A child with ``REFUSALS`` or more in ``LOOK_S`` gets ``CPUS`` until
   ``CALM_S`` without one; for twice as long each time it begins again.
2. The kernel counts refusals (``pids.events``); they are read each ``LOOK_S`` only while
   a child with such a limit runs.
3. It needs a group with ``pids`` and ``cpu``; without one, the neighbours bear the cost.
4. A killed process gets its time back, since an end takes time.

Source: cgroup-v2.rst of the kernel ("pids.events", "cpu.max"); version 1 has the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import trio

from hostlib.linux.cgroup_files import bound_cpus, count_of, has_cpus_bound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostlib.journal import Journal
    from hostlib.user_values import Limits

LOOK_S = 0.2
"""Time between two looks: a fork bomb competes that long; a look costs 2 us."""

REFUSALS = 100
"""Refusals in ``LOOK_S`` that make a fork bomb.

A bomb gets some thousands in that time; a program that waits between attempts gets fewer.
"""

CALM_S = 1.0
"""Time without a refusal after which a child gets its time back: five looks."""

MOST_CALM_S = 64.0
"""Longest time for which a calm child is held back; with less a bomb with pauses gains."""

CPUS = 0.1
"""Processors' time of a group that is held back: 10 ms in each 100."""


class _WatchedChild:
    """A child whose forks may be refused.

    Attributes:
        child_id: the child's.
        name: its name in a configuration; None for one that has none.
        cpus: its own bound of processors' time; None without one.
        fd: its ``pids.events``.
        group: the directory whose processors' time can be bounded.
        refused: forks, at the last look.
        since: when the last one was, seconds of Trio's clock.
        is_held_back: it has ``CPUS``.
        calm_s: how long it has to be calm then.
    """

    __slots__ = (
        "calm_s",
        "child_id",
        "cpus",
        "fd",
        "group",
        "is_held_back",
        "name",
        "refused",
        "since",
    )

    def __init__(
        self, child_id: str, name: str | None, cpus: float | None, fd: int, group: str
    ) -> None:
        self.child_id = child_id
        self.name = name
        self.cpus = cpus
        self.fd = fd
        self.group = group
        self.refused = 0
        self.since = 0.0
        self.is_held_back = False
        self.calm_s = CALM_S


class ForkWatch:
    """Looks after the children of one host that have a limit of processes."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._watched: dict[int, _WatchedChild] = {}
        self._has_some = trio.Event()

    def descriptors(self) -> Iterable[int]:
        """Return what this holds of the host's descriptors."""
        return self._watched.keys()

    def watch(
        self, child_id: str, name: str | None, limits: Limits, groups: Iterable[str]
    ) -> None:
        """Watch a child, if its refused forks are counted and can be answered.

        Args:
            child_id: the child's.
            name: its name in a configuration; None for one that has none.
            limits: its own; one without ``processes`` is left alone.
            groups: the directories of its groups.
        """
        if limits.processes is None:
            return
        paths = tuple(groups)
        # Another process may remove a group at any time: then it is neither.
        bounds = {path: _has_bound(path, limits.cpus) for path in paths}
        bounded = next((path for path in paths if bounds[path] is not None), None)
        counted = next((fd for path in paths if (fd := _open_count(path)) >= 0), -1)
        if bounded is None or counted < 0:
            if counted >= 0:
                os.close(counted)
            return
        one = self._watched[counted] = _WatchedChild(
            child_id, name, limits.cpus, counted, bounded
        )
        # Held back by the program of this host before.
        one.is_held_back = not bounds[bounded]
        one.since = trio.current_time()
        with contextlib.suppress(OSError):
            one.refused = _refused(counted)
        self._has_some.set()

    def signalled(self, child_id: str, number: int) -> None:
        """Give a child that is about to be killed its time back, to end (rule 4)."""
        if number == signal.SIGKILL:
            self.forget(child_id)

    def forget(self, child_id: str) -> None:
        """Stop watching a child, and give it its time back (rule 4)."""
        for one in tuple(self._watched.values()):
            if one.child_id == child_id:
                if one.is_held_back:
                    _set_bound(one.group, one.cpus)
                self._drop(one)

    def _drop(self, one: _WatchedChild) -> None:
        del self._watched[one.fd]
        os.close(one.fd)

    async def run(self) -> None:
        """Bound and free the watched children until cancelled.

        Precondition at the end: each of them was forgotten.
        """
        before = trio.current_time()
        while True:
            if not self._watched:
                self._has_some = trio.Event()
                await self._has_some.wait()
                before = trio.current_time()
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            # A loop that is late, or was stopped, has seen a longer time.
            too_many = REFUSALS * max(1, round((now - before) / LOOK_S))
            for one in tuple(self._watched.values()):
                self._look(one, now, too_many)
            before = now

    def _look(self, one: _WatchedChild, now: float, too_many: int) -> None:
        before = one.refused
        try:
            one.refused = _refused(one.fd)
        except OSError:  # another process has removed the group
            self._drop(one)
            return
        if one.refused > before:
            one.since = now
        if one.is_held_back:
            if now - one.since >= one.calm_s:
                self._let_go(one)
        elif one.refused - before >= too_many:
            self._hold_back(one, one.refused - before)

    def _hold_back(self, one: _WatchedChild, refused: int) -> None:
        cpus = CPUS if one.cpus is None else min(one.cpus, CPUS)
        if _set_bound(one.group, cpus):
            one.is_held_back = True
            self._tell("child.held_back", one, cpus=cpus, refused=refused)

    def _let_go(self, one: _WatchedChild) -> None:
        if _set_bound(one.group, one.cpus):
            one.is_held_back = False
            one.calm_s = min(2 * one.calm_s, MOST_CALM_S)
            self._tell("child.let_go", one, cpus=one.cpus)

    def _tell(self, event: str, one: _WatchedChild, **more: float | None) -> None:
        self._journal.write(
            event,
            child_id=one.child_id,
            name=one.name,
            limit="processes",
            **more,
        )


def _set_bound(group: str, cpus: float | None) -> bool:
    """Bound the time of a group; tell whether that could be done."""
    with contextlib.suppress(OSError):  # it is gone
        return bound_cpus(group, cpus)
    return False


def _has_bound(group: str, cpus: float | None) -> bool | None:
    """Tell whether a group's time is bounded so; None if it cannot be."""
    with contextlib.suppress(OSError):  # it is gone
        return has_cpus_bound(group, cpus)
    return None


def _open_count(group: str) -> int:
    """Open the count of a group's refused forks; -1 if it has none."""
    with contextlib.suppress(OSError):  # another controller's, or an old kernel's
        return os.open(f"{group}/pids.events", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _refused(fd: int) -> int:
    """Return how many forks were refused, as the kernel counts them."""
    return count_of(os.pread(fd, 4096, 0), b"max")
