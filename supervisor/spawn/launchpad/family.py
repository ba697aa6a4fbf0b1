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


NO_IDENT = -1
"""The ident of a child that is in stock."""

_NOT_SEEN = (
    "its processes are not to be seen in /proc; mount that without hidepid="
    " (systemd: ProtectProc=default)"
)


class Child:
    """One child from its fork to its reaping.

    Attributes:
        state: of ``launchpad.life``.
        ident: the host's number for it; `NO_IDENT` while it is in stock.
        pidfd: held until SPAWNED carries it away, then -1.
        report: the pipe of its reports; -1 when its start has ended.
        applied: (layer, detail) of its sandbox, as it reported.
        failure: (errno, stage, detail), as it reported; None if it did not.
        init: the init of its pid namespace; -1 for none.
        groups: directories of its groups of processes.
        line: the socket by which an order reaches it; None if it has its order.
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
            report: the pipe of its reports.

        Raises:
            OSError: the process is not there.
        """
        self.state = state
        self.ident = NO_IDENT
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
            OSError: the process is not there; nothing was recorded.
        """
        # Before any wait: the pid still names this process, be it dead already.
        create_time = _create_time(pid)
        pidfd = os.pidfd_open(pid)
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pid, self.create_time, self.pidfd = pid, create_time, pidfd

    def read_reports(self) -> Iterator[tuple[Any, ...]]:
        """Yield its reports since the last call (`order.reports`).

        ``(ENDED,)`` is the last one: the pipe has no writer any more.
        """
        try:
            heard = os.read(self.report, REPORT_BYTES)
        except BlockingIOError:
            return
        yield from reports(heard)
        if not heard:
            yield (ENDED,)

    def let_go(self) -> None:
        """Close what is held of a child that comes to nothing."""
        if self.pidfd >= 0:
            os.close(self.take_pidfd())
        self.close_line()

    def take_pidfd(self) -> int:
        """Return the pidfd, which belongs to the caller from now on."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd

    def unlock(self) -> None:
        """Close its locks: nothing of it is left."""
        while self.locks:
            os.close(self.locks.pop())

    def close_line(self) -> None:
        """Close the line: no order comes any more."""
        if self.line is not None:
            self.line.close()
            self.line = None


class Family:
    """The tables of one launchpad.

    Args:
        epoll: tells that a start may have ended.
    """

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self.children: dict[int, Child] = {}  # by pid, until reaped
        self.by_ident: dict[int, Child] = {}  # of those that have an order
        self.by_report: dict[int, Child] = {}  # until exec or failure
        self.inits: set[int] = set()  # of pid namespaces whose child is there

    def watch_report(self, report: int) -> None:
        """Have the epoll tell when a pipe of reports has no writer any more.

        Raises:
            OSError: ``ENOSPC``: there is no watch for it; ``filename`` says what to do.
        """
        try:
            # No event is asked for: EPOLLHUP always comes. Earlier reports are read
            # then, or before a child is reaped.
            self._epoll.register(report, 0)
        except OSError as why:
            if why.errno != errno.ENOSPC:
                raise
            raise OSError(why.errno, why.strerror, NO_WATCH) from None

    def close_report(self, report: int) -> None:
        """Close a pipe of reports, watched or not."""
        try:
            # By hand: the copy in a forked child that has not exec'd keeps it there.
            self._epoll.unregister(report)
        except OSError:  # there was no watch for it
            pass
        finally:
            os.close(report)

    def add(self, child: Child, init: int) -> None:
        """Add a child that was forked, and its namespace's init."""
        self.children[child.pid] = child
        self.by_report[child.report] = child
        self._add_init(child, init)

    def assign(self, child: Child, ident: int) -> None:
        """Record the host's number for a child that has its order."""
        child.ident = ident
        self.by_ident[ident] = child

    def rename(self, child: Child, pid: int, init: int) -> None:
        """Record that a child goes on in another process, in a pid namespace.

        Raises:
            OSError: another process has killed it, and it was reaped already.
        """
        before = child.pid
        child.set_process(pid)
        del self.children[before]
        self.children[pid] = child
        self._add_init(child, init)

    def _add_init(self, child: Child, init: int) -> None:
        if init >= 0:
            child.init = init
            self.inits.add(init)

    def end_start(self, child: Child) -> None:
        """Record that a start has ended; close the pipe of its reports."""
        self.close_report(child.report)
        del self.by_report[child.report]
        child.report = -1

    def remove(self, child: Child) -> None:
        """Forget a child that was reaped; its init is a leftover from now on."""
        self.by_ident.pop(child.ident, None)
        self.inits.discard(child.init)

    def known_pids(self) -> set[int]:
        """Return the pids of direct children that are no leftovers."""
        return self.children.keys() | self.inits

    def reporting(self) -> tuple[Child, ...]:
        """Return the children whose start has not ended: they may report."""
        return tuple(self.by_report.values())

    @property
    def is_forking(self) -> bool:
        """Whether there may be processes that no report has named yet."""
        return any(child.state in IS_FORKING for child in self.by_report.values())

    def stock(self) -> list[processes.ProcessIdentity]:
        """Return the children that wait for an order, and their inits."""
        found = []
        for child in self.by_report.values():
            if child.state in IS_STOCK:
                found.append((child.pid, child.create_time))
                if child.init >= 0:
                    found.append((child.init, _create_time(child.init)))
        return found

    @property
    def is_starting(self) -> bool:
        """Whether a child that has an order is not its program yet."""
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


def describe_fork_error(error: OSError) -> tuple[int, str, bytes]:
    """Return (errno, stage, detail) of a failed fork, for the host."""
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
