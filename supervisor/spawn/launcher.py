"""The host's side of the launchpad: spawns, waits for, signals and ends children.

One reader task owns the incoming side of the control socket; any task may spawn.

1. A child is named by its pidfd, which is the authority on its exit (spec S2).
2. Each descriptor has one holder: sources of a `SpawnRequest` stay the caller's, the pidfd
   is the `SpawnedProcess`'s, the control socket the `Launcher`'s.
3. After `spawn` the child alone has copies of the sources (spec T2); a cancelled spawn
   leaves no child.
4. Without the launchpad all children end, and the owner gets `LaunchpadLost`. A host that
   outlives the loss sees ended children, and starts that fail. Read next: ``wire``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal as signals
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import trio

from hostlib.descendants import end_descendants
from hostlib.linux.processes import exit_status
from hostlib.readiness import wait_readable, wait_writable
from supervisor.spawn.launchpad import wire
from supervisor.spawn.process import (
    Born,
    ExitStatus,
    LaunchpadLost,
    Record,
    SpawnedProcess,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from hostlib.linux import processes
    from supervisor.spawn.inner_pair import InnerListener
    from supervisor.spawn.launchpad.start import LaunchpadProcess
    from supervisor.spawn.process import ProcessState
    from supervisor.spawn.request import SpawnRequest

# The launchpad ends 50 processes in 20 ms and exits. Slower work (a dead network file
# system, a fork bomb) is left to it, and it is left alive for that.
STOP_TIMEOUT_S = 2.0

# Microseconds, unless it is stopped or has very much to end.
STOCK_TIMEOUT_S = 0.5

# The launchpad forks one at a time; more requests under way only hold descriptors.
SPAWNS_UNDER_WAY = 16

# The launchpad has forked by then, a crowd's turn included. A longer start is an exec that
# hangs, and only that child may wait for it.
SPAWN_TURN_S = 1.0


class RecordState(msgspec.Struct, array_like=True):
    """The launchpad's word on a process.

    Attributes:
        ident: its number.
        abandoned: no caller waits for it any more.
        status: the values of ``ExitStatus``; None while it runs.
    """

    ident: int
    abandoned: bool
    status: tuple[int | None, int | None, float, float, int] | None


class Launcher:
    """The host's hand on its launchpad.

    Start `run` in the nursery that is to fail when the launchpad is lost; cancelling it
    ends every child.
    """

    def __init__(
        self,
        launchpad: LaunchpadProcess,
        own_children: Container[int] = (),
        *,
        is_outlived: bool = False,
    ) -> None:
        """Take the launchpad over.

        Args:
            launchpad: From `start_launchpad`; its descriptors are the launcher's now.
            own_children: Pids of children that the host started by other means and
                that are not to be ended when the launchpad is lost. Read then.
            is_outlived: The host goes on when the launchpad is lost, without its children.
        """
        self._is_outlived = is_outlived
        self._launchpad = launchpad
        self._own_children = own_children
        self.control = launchpad.control
        self._records: dict[int, Record] = {}
        self.handed_over: dict[int, Record] = {}  # of children that are not here yet
        self._last_ident = 0
        self._sending = trio.Lock()  # one writer waits for room, the others for it
        self._room = trio.Semaphore(SPAWNS_UNDER_WAY)
        self._lost: str | None = None

    async def run(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> NoReturn:
        """Own the control socket: take in what the launchpad says.

        Raises:
            LaunchpadLost: It ended by itself. Every process beneath the host has been
                killed and reaped (within `STOP_TIMEOUT_S`).

        Cancellation: ends the launchpad and every process beneath it, and waits for
        that for at most `STOP_TIMEOUT_S`.
        """
        reason = "the host is stopping"
        try:
            task_status.started()
            await self._receive()
            reason = "the launchpad ended unexpectedly: its children are gone"
        finally:
            self._give_up(reason)
            with trio.move_on_after(STOP_TIMEOUT_S, shield=True):
                await self._end_launchpad()
        raise LaunchpadLost(reason)

    async def spawn(self, request: SpawnRequest) -> SpawnedProcess:
        """Start a child; returns when it has become its program.

        Raises:
            SpawnError: It did not; nothing is left of it.
            LaunchpadLost: No child can be started any more.

        Cancellation: a child that was started all the same is killed, and waited for, 2 s
        at most.
        """
        try:
            return await self._spawn(request)
        except LaunchpadLost:
            self.check_host()
            raise request.gone() from None

    async def _spawn(self, request: SpawnRequest) -> SpawnedProcess:
        try:  # a free place needs no checkpoint here: there is one below
            self._room.acquire_nowait()
        except trio.WouldBlock:
            await self._room.acquire()
        try:
            ident, record = await self._ask(request)
        except BaseException:
            self._room.release()
            raise
        try:
            try:
                with trio.move_on_after(SPAWN_TURN_S):
                    await record.started.wait()
            finally:
                self._room.release()
            born = await self.await_start(request, record)
        except BaseException:
            await self._abandon(ident, record)
            raise
        return SpawnedProcess(self, ident, record, born)

    async def _ask(self, request: SpawnRequest) -> tuple[int, Record]:
        """Send the order for a child; return its number, and its record to be filled."""
        self._last_ident += 1
        ident = self._last_ident
        message = (wire.SPAWN, ident, *request.body())
        record = self._records[ident] = Record()
        try:
            if self._sending.locked() or not self._has_put(message, request.sources):
                await self.send(message, request.sources)
        except BaseException:
            self._records.pop(ident, None)  # it was not sent
            raise
        return ident, record

    async def spare(self, groups: tuple[tuple[bytes, bytes], ...]) -> None:
        """Tell the launchpad of empty groups, in which a child may wait for its order.

        Raises:
            LaunchpadLost: no child can be started any more.
        """
        await self.send((wire.SPARE, 0, groups))

    async def stock(self) -> tuple[processes.ProcessIdentity, ...]:
        """Return the children in stock: (pid, create_time) of each.

        No process is named if the launchpad does not answer in time: it is in trouble,
        and its children are as suspicious as everything beneath it.

        Raises:
            LaunchpadLost: the launchpad has ended.
        """
        with trio.move_on_after(STOCK_TIMEOUT_S):
            return (await self._query(wire.LIST)).stock
        self.check()
        return ()

    async def owners(self, user: int, owner: int) -> int:
        """Return a user namespace that shows an owner's files as a user's; the caller's.

        Raises:
            OSError: none can be made here.
            LaunchpadLost: the launchpad has ended.
        """
        record = await self._query(wire.OWNERS, user, owner)
        record.check()
        if record.owners < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return record.owners

    async def furnish(
        self, listener: InnerListener, net: int, users: tuple[int, ...]
    ) -> None:
        """Make sockets and routes in the net namespace of a child that runs.

        Args:
            listener: wants them; what it gets is there when this returns.
            net: the namespace.
            users: the user namespace that owns it, if that is not this process's.

        Raises:
            OSError: they cannot be made.
            LaunchpadLost: the launchpad has ended.
        """
        fds = (net, listener.way, *users)
        record = await self._query(wire.FURNISH, listener.order(), fds=fds)
        record.check()

    async def arm(self, deadline_s: float) -> None:
        """Set the time at which the kernel ends the launchpad and all children.

        It fires while this process, the launchpad and the children are stopped (spec
        FL6). Each call replaces the time of the one before.

        Args:
            deadline_s: of CLOCK_BOOTTIME; one that has passed ends them at once.

        Raises:
            OSError: the kernel makes no timer.
            LaunchpadLost: the launchpad has ended.
        """
        record = await self._query(wire.ARM, int(deadline_s * 1e9))
        record.check()

    async def _query(
        self, kind: int, *body: object, fds: tuple[int, ...] = ()
    ) -> Record:
        """Send a message that starts no child; return the record of its answer.

        Raises:
            LaunchpadLost: the launchpad has ended.
        """
        self._last_ident += 1
        ident = self._last_ident
        record = self._records[ident] = Record()
        try:
            await self.send((kind, ident, *body), fds)
            await record.exited.wait()
        finally:
            self._records.pop(ident, None)
        self.check()
        return record

    def check(self) -> None:
        """Raise LaunchpadLost if there is no launchpad any more."""
        if self._lost is not None:
            raise LaunchpadLost(self._lost)

    def check_host(self) -> None:
        """Raise LaunchpadLost if there is none any more and the host ends with it."""
        if not self._is_outlived:
            self.check()

    @property
    def launchpad_pid(self) -> int:
        """The launchpad's pid; a child of this process until the launcher ends."""
        return self._launchpad.pid

    def snapshot(self) -> tuple[int, list[RecordState]]:
        """Return what ``restore`` takes."""
        return self._last_ident, [
            RecordState(
                ident,
                record.abandoned,
                None if record.status is None else astuple(record.status),
            )
            for ident, record in self._records.items()
        ]

    def restore(self, last_ident: int, left: Iterable[RecordState]) -> None:
        """Know the processes of the program before; called before it listens.

        Args:
            last_ident: the number of the newest process.
            left: the records of those that are not forgotten.
        """
        self._last_ident = last_ident
        for said in left:
            record = self._records[said.ident] = Record()
            record.abandoned = said.abandoned
            if not said.abandoned:
                record.started.set()
            if said.status is not None:
                record.status = ExitStatus(*said.status)
                record.exited.set()
        # A child may be swept before it is put in: its record is kept for it.
        self.handed_over = dict(self._records)

    def restore_process(self, state: ProcessState) -> SpawnedProcess:
        """Return a process of the program before; it is the caller's."""
        record = self.handed_over.pop(state.ident, None)
        if record is None:
            record = Record()
            if state.status is not None:
                record.status = ExitStatus(*state.status)
            for event in (record.started, record.exited, record.swept):
                event.set()
        born = (state.pid, state.create_time, (), state.init, state.pidfd)
        record.born = born
        return SpawnedProcess(self, state.ident, record, born)

    def descriptors(self) -> tuple[int, int]:
        """Return its control socket and the launchpad's pidfd."""
        return self.control.fileno(), self._launchpad.pidfd

    @property
    def is_at_rest(self) -> bool:
        """Whether no message is being sent, and no caller waits for a start."""
        return not (
            self._sending.locked()
            or self._room.value < SPAWNS_UNDER_WAY
            or any(record.is_under_way for record in self._records.values())
        )

    def inits(self) -> dict[int, int]:
        """Return the init of each process that has a pid namespace, by its pid."""
        born = (record.born for record in self._records.values())
        return {one[0]: one[3] for one in born if one is not None and one[3] >= 0}

    def statistics(self) -> dict[str, int]:
        """Return the number of known children, from their spawn until they are swept."""
        return {"children": len(self._records)}

    async def send(
        self, message: tuple[object, ...], fds: tuple[int, ...] = ()
    ) -> None:
        """Send one message, whole, when there is room for it.

        Raises:
            LaunchpadLost: No caller is there to take it.
        """
        async with self._sending:
            while not self._has_put(message, fds):
                with contextlib.suppress(trio.ClosedResourceError):  # lost: check
                    await wait_writable(self.control)

    def _has_put(self, message: tuple[object, ...], fds: tuple[int, ...]) -> bool:
        """Send as ``send`` where there is room; the caller is the one who sends."""
        self.check()
        try:
            wire.send_message(self.control, message, fds)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            # `run` is about to read the same, and tells everybody.
            raise LaunchpadLost("the launchpad is gone") from None
        return True

    # ---------------------------------------------------------- what it says

    async def _receive(self) -> None:
        """Take messages in until the launchpad is gone."""
        while True:
            try:
                received = wire.receive_message(self.control)
            except BlockingIOError:
                await wait_readable(self.control)
                continue
            if received is None:
                return
            self.take_message(*received)

    def take_message(self, message: tuple[Any, ...], fds: list[int]) -> None:
        """Take a message of the launchpad, with the descriptors that came with it."""
        kind, ident, *rest = message
        if kind == wire.SWEPT:
            for ended in ident:
                if record := self._records.pop(ended, None):
                    record.swept.set()
        elif record := self._records.get(ident):
            if kind == wire.FAILED:
                del self._records[ident]
            record.take(kind, rest, fds)
        else:  # the task that asked was cancelled
            for fd in fds:
                os.close(fd)

    async def await_start(self, request: SpawnRequest, record: Record) -> Born:
        """Wait for what the launchpad says to a request."""
        if not record.started.is_set():
            await record.started.wait()
        if record.failure is not None:
            raise request.error(*record.failure)
        if record.born is None:
            raise LaunchpadLost(self._lost)
        return record.born

    async def _abandon(self, ident: int, record: Record) -> None:
        """End a child that no caller gets, born yet or not; wait until it is gone.

        Bounded. Its user and directories are given back then.
        """
        record.let_go()
        if ident not in self._records:  # it failed before it was anything
            return
        message = (wire.SIGNAL, ident, int(signals.SIGKILL))
        with trio.move_on_after(STOP_TIMEOUT_S, shield=True):
            with contextlib.suppress(LaunchpadLost):  # then it is dead already
                await self.send(message)
                await record.swept.wait()

    # ---------------------------------------------------------- the end

    def _give_up(self, reason: str) -> None:
        """Tell all tasks that wait, and close the control socket."""
        self._lost = reason
        records, self._records = self._records, {}
        for record in records.values():
            record.started.set()
            record.tell_exit()
            record.swept.set()
        trio.lowlevel.notify_closing(self.control)
        self.control.close()

    async def _end_launchpad(self) -> None:
        """Wait for its end, which the closed socket asks for; reap it."""
        pidfd = self._launchpad.pidfd
        try:
            signals.pidfd_send_signal(pidfd, signals.SIGCONT)  # should it be stopped
            await wait_readable(pidfd)
            went_well = exit_status(pidfd) == 0
        finally:
            os.close(pidfd)
        if not went_well:
            await end_descendants(self._own_children)
