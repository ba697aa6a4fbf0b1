"""The children of a launchpad, from their fork until they are reaped.

One record a child, and the tables by which it is found.

Invariant: a child is in `children` until it is reaped, in `by_ident` from its order on,
in `by_report` until its start has ended, well or badly.
"""

from __future__ import annotations

import errno
import os

from hostlib.linux import processes
from hostlib.linux.epoll import NO_WATCH
from supervisor.spawn.launchpad.life import IS_FORKING, IS_STOCK
from supervisor.spawn.launchpad.order import ENDED, REPORT_BYTES, reports

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import select
    from collections.abc import Iterator
    from typing import Any


NOBODY = -1
"""The ident of a child that is in stock."""

_NOT_SEEN = (
    "its processes are not to be seen in /proc; mount that without hidepid="
    " (systemd: ProtectProc=default)"
)


class Child:
    """One child from its fork to its reaping.

    Attributes:
        state: of ``launchpad.life``.
        ident: the host's number for it; `NOBODY` while it is in stock.
        pidfd: held until SPAWNED carries it away, then -1.
        report: where the forked child tells how it fares; -1 when that is known.
        applied: (layer, detail) of its sandbox, as it told.
        failure: (errno, stage, detail), as it told; None if it did not.
        init: the init of its pid namespace; -1 for none.
        groups: directories of its groups of processes.
        line: by which an order reaches it; None if it has one.
        locks: descriptors that are kept until nothing of it is left.
    """

    __slots__ = (
        "applied",
        "create_time",
        "failure",
        "groups",
        "ident",
        "init",
        "line",
        "locks",
        "pid",
        "pidfd",
        "report",
        "state",
    )

    def __init__(self, state: int, pid: int, report: int) -> None:
        """Add a process that was forked.

        Args:
            state: of ``launchpad.life``.
            pid: its own.
            report: where it tells how it fares.

        Raises:
            OSError: it is not there.
        """
        self.state = state
        self.ident = NOBODY
        self.report = report
        self.applied: tuple[object, ...] = ()
        self.failure: tuple[Any, ...] | None = None
        self.init = -1
        self.groups: tuple[bytes, ...] = ()
        self.line: _socket.socket | None = None
        self.locks: list[int] = []
        self.pidfd = -1
        self.set_process(pid)

    def set_process(self, pid: int) -> None:
        """Record which process is to become the program.

        Raises:
            OSError: it is not there; nothing was noted.
        """
        # Before any wait: the pid still names this process, be it dead already.
        create_time = _create_time(pid)
        pidfd = os.pidfd_open(pid)
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pid, self.create_time, self.pidfd = pid, create_time, pidfd

    def told(self) -> Iterator[tuple[Any, ...]]:
        """Yield what it has told since the last time (`order.reports`).

        ``(ENDED,)`` is the last: nobody can tell more.
        """
        try:
            told = os.read(self.report, REPORT_BYTES)
        except BlockingIOError:
            return
        yield from reports(told)
        if not told:
            yield (ENDED,)

    def let_go(self) -> None:
        """Close what is held of a child that comes to nothing."""
        if self.pidfd >= 0:
            os.close(self.take_pidfd())
        self.hang_up()

    def take_pidfd(self) -> int:
        """Return the pidfd, which belongs to the caller from now on."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd

    def unlock(self) -> None:
        """Close what was kept for it: nothing of it is left."""
        while self.locks:
            os.close(self.locks.pop())

    def hang_up(self) -> None:
        """Close the line: no order comes by it any more."""
        if self.line is not None:
            self.line.close()
            self.line = None


class Family:
    """The tables of one launchpad.

    Args:
        epoll: tells that a start may be over.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self.children: dict[int, Child] = {}  # by pid, until reaped
        self.by_ident: dict[int, Child] = {}  # of those that have an order
        self.by_report: dict[int, Child] = {}  # until exec or failure
        self.inits: set[int] = set()  # of pid namespaces whose child is there

    def listen(self, report: int) -> None:
        """Hear of it when all is told that comes by a pipe.

        Raises:
            OSError: ``ENOSPC``: there is no watch for it; ``filename`` says what to do.
        """
        try:
            # Nothing is asked for: EPOLLHUP always comes, when it is known what becomes
            # of a child. Its earlier reports are read with that, or before a child is
            # reaped.
            self._epoll.register(report, 0)
        except OSError as why:
            if why.errno != errno.ENOSPC:
                raise
            raise OSError(why.errno, why.strerror, NO_WATCH) from None

    def close_report(self, report: int) -> None:
        """Close a pipe, whether it was listened to or not."""
        try:
            # By hand: the copy in a forked child that has not exec'd keeps it there.
            self._epoll.unregister(report)
        except OSError:  # there was no watch for it
            pass
        finally:
            os.close(report)

    def enter(self, child: Child, init: int) -> None:
        """Add a child that was forked, and its namespace's init."""
        self.children[child.pid] = child
        self.by_report[child.report] = child
        self._has_init(child, init)

    def order(self, child: Child, ident: int) -> None:
        """Record whose child it is."""
        child.ident = ident
        self.by_ident[ident] = child

    def rename(self, child: Child, pid: int, init: int) -> None:
        """Record that a child goes on in another process, in a pid namespace.

        Raises:
            OSError: killed by another, and reaped, before anybody knew it.
        """
        before = child.pid
        child.set_process(pid)
        del self.children[before]
        self.children[pid] = child
        self._has_init(child, init)

    def _has_init(self, child: Child, init: int) -> None:
        if init >= 0:
            child.init = init
            self.inits.add(init)

    def start_is_over(self, child: Child) -> None:
        """Record that nothing more is heard of a start; close its end of the pipe."""
        self.close_report(child.report)
        del self.by_report[child.report]
        child.report = -1

    def bury(self, child: Child) -> None:
        """Forget a child that was reaped; its init is a leftover from now on."""
        self.by_ident.pop(child.ident, None)
        self.inits.discard(child.init)

    def known(self) -> set[int]:
        """Return the pids of direct children that are no leftovers."""
        return self.children.keys() | self.inits

    def talking(self) -> tuple[Child, ...]:
        """Return those who may tell something before their start has ended."""
        return tuple(self.by_report.values())

    @property
    def is_forking(self) -> bool:
        """Whether there may be processes that nobody has told of yet."""
        return any(child.state in IS_FORKING for child in self.by_report.values())

    def stock(self) -> list[processes.ProcessIdentity]:
        """Return those that wait for an order, and their inits."""
        found = []
        for child in self.by_report.values():
            if child.state in IS_STOCK:
                found.append((child.pid, child.create_time))
                if child.init >= 0:
                    found.append((child.init, _create_time(child.init)))
        return found

    @property
    def is_starting(self) -> bool:
        """Whether somebody waits for a child to become its program."""
        return any(child.state not in IS_STOCK for child in self.by_report.values())

    def clear(self) -> list[bytes]:
        """Forget all: every process is a leftover now; return their groups."""
        groups: list[bytes] = []
        for child in self.children.values():
            child.let_go()
            groups += child.groups
        self.children.clear()
        self.by_report.clear()
        self.inits.clear()
        return groups


def no_fork(error: OSError) -> tuple[int, str, bytes]:
    """Return why nobody could be forked, as the host is told."""
    about = error.filename if isinstance(error.filename, str) else ""
    return error.errno or errno.EIO, "fork", os.fsencode(about)


def _create_time(pid: int) -> int:
    """Start of an unreaped child, in clock ticks since boot."""
    try:
        stat = processes.read_parent_and_start(pid)
    except PermissionError:
        stat = None
    if stat is None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), _NOT_SEEN)
    return stat[1]
