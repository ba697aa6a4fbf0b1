"""A started child in the host's view: its pidfd, and the launchpad's reports."""

from __future__ import annotations

import errno
import os
import signal as signals
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from hostlib.linux import processes
from hostlib.readiness import wait_readable
from supervisor.spawn.launchpad import wire

if TYPE_CHECKING:
    from collections.abc import Callable

# The report of an exit leaves the launchpad microseconds after the pidfd wakes us; a
# machine that needs longer is in such trouble that no status is worth waiting for.
EXIT_REPORT_TIMEOUT_S = 1.0


class LaunchpadLost(Exception):  # noqa: N818 - a state of the host, fatal to it
    """The launchpad ended although nobody asked it to: the host must end too."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: exactly one of code and signal, or neither if unknown.

    Attributes:
        code: Its exit status.
        signal: The signal that killed it.
        utime_s: User time of it and of the children it waited for.
        stime_s: as above, in the kernel.
        maxrss_kib: Largest resident set; includes that of the launchpad it was forked
            from, so never below some 10,000.
    """

    code: int | None = None
    signal: int | None = None
    utime_s: float = 0.0
    stime_s: float = 0.0
    maxrss_kib: int = 0


Born = tuple[int, int, tuple[tuple[str, str], ...], int, int]


@dataclass(slots=True, eq=False)
class Record:
    """The launchpad's word on one child. All events are set when it is lost.

    Attributes:
        started: Set when `born` or `failure` is there.
        exited: Set when `status` is there.
        swept: Set when nothing it left behind is alive.
        abandoned: No task waits for `born` any more.
        born: (pid, create_time, applied, init, pidfd); the pidfd is the taker's.
        failure: (errno, stage, detail).
        stock: the answer to LIST.
        owners: the answer to OWNERS, a descriptor of the caller's; -1 if there is none.
        at_exit: called when `exited` is set; at once, and so not to wait or raise.
    """

    started: trio.Event = field(default_factory=trio.Event)
    exited: trio.Event = field(default_factory=trio.Event)
    swept: trio.Event = field(default_factory=trio.Event)
    abandoned: bool = False
    born: Born | None = None
    failure: tuple[int, str, bytes] | None = None
    status: ExitStatus | None = None
    stock: tuple[processes.ProcessIdentity, ...] = ()
    owners: int = -1
    at_exit: Callable[[], None] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether somebody waits for its start."""
        return not (self.started.is_set() or self.abandoned)

    def check(self) -> None:
        """Raise OSError if what was asked for could not be done."""
        if self.failure is not None:
            number = self.failure[0]
            raise OSError(number, os.strerror(number))

    def take(self, kind: int, said: list[Any], fds: list[int]) -> None:
        """Take in what the launchpad says of it.

        Args:
            kind: of ``launchpad.wire``.
            said: the rest of that message, without the id.
            fds: descriptors that came with it; this one's now.
        """
        if kind == wire.LISTED:
            (self.stock,) = said
            self.exited.set()
        elif kind in {wire.ARMED, wire.FURNISHED}:
            self.exited.set()
        elif kind == wire.OWNED:
            if fds:  # else this process may open no more
                (self.owners,) = fds
            self.exited.set()
        elif kind == wire.EXITED:
            self.status = ExitStatus(*said)
            self.tell_exit()
        elif kind == wire.FAILED:
            self.failure = tuple(said)
            self.started.set()
            self.tell_exit()
            self.swept.set()
        elif kind == wire.SPAWNED:
            self._take_born(said, fds)

    def _take_born(self, born: list[Any], fds: list[int]) -> None:
        if not fds:  # this process may open no more: nothing names the child
            self.failure = (errno.EMFILE, "pidfd", b"")
        elif self.abandoned:
            _end(fds[0])
        else:
            self.born = (*born, fds[0])
        self.started.set()

    def let_go(self) -> None:
        """End a child that no caller gets, now or when it is born."""
        self.abandoned = True
        if self.born is not None:  # it was born as the caller was cancelled
            _end(self.born[-1])

    def tell_exit(self) -> None:
        """Tell the tasks that wait that `status` is there, or never will be."""
        self.exited.set()
        if self.at_exit is not None:
            self.at_exit()


def _end(pidfd: int) -> None:
    """Kill a process that no caller gets, and close its pidfd.

    The launchpad may not hear of it: its socket can be full.
    """
    processes.signal_pidfd(pidfd, signals.SIGKILL)
    os.close(pidfd)


class ProcessState(msgspec.Struct):
    """A process, handed over.

    Attributes:
        status: how it ended, if nothing is left of it and the launchpad has forgotten
            it; None else, for then it says so to the next program.
    """

    ident: int
    pid: int
    create_time: int
    pidfd: int
    init: int
    status: tuple[int | None, int | None, float, float, int] | None = None


class Control(Protocol):
    """The host's way to its launchpad; ``launcher.Launcher`` is it."""

    def check(self) -> None:
        """Raise LaunchpadLost if there is no launchpad any more."""
        ...

    def check_host(self) -> None:
        """Raise LaunchpadLost if there is none any more and the host ends with it."""
        ...

    async def send(
        self, message: tuple[object, ...], fds: tuple[int, ...] = ()
    ) -> None:
        """Send one message, whole.

        Raises:
            LaunchpadLost: there is no launchpad any more.
        """
        ...


class SpawnedProcess:
    """One child that became its program. Owned, and waited for, by one task (I2).

    Attributes:
        pid: Names the process only together with `create_time`.
        create_time: Clock ticks since boot, field 22 of ``/proc/PID/stat``.
        applied: (layer, detail) of its sandbox, as it said itself before its exec.
        init: The pid of its pid namespace's init, which ends after it; -1 for none.
    """

    def __init__(
        self,
        control: Control,
        ident: int,
        record: Record,
        born: Born,
    ) -> None:
        self.pid, self.create_time, self.applied, self.init, self._pidfd = born
        self._control = control
        self.ident = ident
        self.record = record
        self.is_awaited = False  # somebody waits, or has waited, for the pidfd

    async def wait_exit(self) -> ExitStatus:
        """Wait until the process has ended (not what it started: `wait_swept`).

        Returns:
            Its status; neither code nor signal if the launchpad did not tell in time.

        Raises:
            LaunchpadLost: It has ended; its status is lost.

        Cancellation: nothing is lost, wait again.
        """
        self.is_awaited = True
        await wait_readable(self._pidfd)
        with trio.move_on_after(EXIT_REPORT_TIMEOUT_S):
            await self.record.exited.wait()
        return self._status()

    async def wait_exit_soon(self) -> ExitStatus:
        """Wait like `wait_exit`, where the end is thought to be near.

        The report alone is waited for first: one wake-up, and not two.
        """
        with trio.move_on_after(EXIT_REPORT_TIMEOUT_S):
            await self.record.exited.wait()
        return self._status() if self.has_exited else await self.wait_exit()

    def _status(self) -> ExitStatus:
        if self.record.status is None:
            self._control.check_host()
            return ExitStatus()
        return self.record.status

    @property
    def status(self) -> ExitStatus | None:
        """How it has ended; None if it runs, or its status is lost."""
        return self.record.status

    def at_exit(self, call: Callable[[], None] | None) -> None:
        """Set what is called when its exit is told, at once if it was; see `Record`.

        One call at a time; None for none any more.
        """
        self.record.at_exit = call
        if call is not None and self.has_exited:
            call()

    async def wait_swept(self) -> None:
        """Wait until nothing that this ended process left behind is alive.

        Raises:
            LaunchpadLost: The host itself ends what is left.
        """
        await self.record.swept.wait()
        self._control.check_host()

    @property
    def is_swept(self) -> bool:
        """Whether nothing that it left behind is alive."""
        return self.record.swept.is_set()

    def send_signal(self, signal: int) -> None:
        """Signal this process alone; nothing if it has ended already."""
        if self._pidfd < 0:  # closed, so ended
            return
        try:
            signals.pidfd_send_signal(self._pidfd, signal)
        except ProcessLookupError:
            return

    async def signal_tree(self, signal: int) -> None:
        """Signal this process and all beneath it; returns when that is asked for."""
        message = (wire.SIGNAL, self.ident, int(signal))
        try:
            await self._control.send(message)
        except LaunchpadLost:  # then it has ended as well
            self._control.check_host()

    async def end_tree(self) -> None:
        """SIGKILL this process and all beneath it; returns when that is asked for.

        A process that escapes this by forking is ended after the process's death.
        """
        await self.signal_tree(signals.SIGKILL)

    @property
    def has_exited(self) -> bool:
        """Whether the launchpad has said so."""
        return self.record.exited.is_set()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors: the pidfd, until `close`."""
        return (self._pidfd,) if self._pidfd >= 0 else ()

    def snapshot(self) -> ProcessState:
        """Return it as ``Launcher.restore_process`` takes it; it is not closed."""
        status = None
        if self.record.swept.is_set():
            status = astuple(self.record.status or ExitStatus())
        return ProcessState(
            self.ident, self.pid, self.create_time, self._pidfd, self.init, status
        )

    def close(self) -> None:
        """Give the pidfd back. Does not end the process. A second call does nothing."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            if self.is_awaited:
                trio.lowlevel.notify_closing(pidfd)
            os.close(pidfd)
