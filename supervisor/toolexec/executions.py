"""Executions: one tool each, from its slot to its exit code.

    admit (id, slot) -> start (spawn) -> run (pump, limits, exit) -> finished (log kept)

Rules of this file.

1. An execution belongs to one child: it runs in that child's nursery, and when the child
   ends, it ends.  Another child does not find it.
2. Its id and its slot are free before anybody is told its exit code.
3. A slot is there for a child that has few, however many others have (spec S7).
4. stdout and stderr are one pipe, stdin is the null device, and nothing else of the
   host is open in a tool.
"""

from __future__ import annotations

import array
import fcntl
import os
import secrets
import termios
from collections import OrderedDict
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from protocol.toolexec import TIMED_OUT, TIMEOUT_NOTE
from supervisor import walled
from supervisor.launcher import LaunchpadLost
from supervisor.spawn_request import SpawnRequest
from supervisor.toolexec.door import open_door
from supervisor.toolexec.ending import CLIENT_GONE, TIME_IS_UP, climb
from supervisor.toolexec.outputlog import (
    HEAD_BYTES,
    PIECE_BYTES,
    LogFullError,
    OutputLog,
    Quota,
)
from supervisor.toolexec.workspace import path_of
from vfs.hostio import in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.child import Child
    from supervisor.host import Host
    from supervisor.launcher import ExitStatus, SpawnedProcess
    from supervisor.toolexec.ending import Ladder
    from supervisor.toolexec.routes import SpawnPlan

PIPE_BYTES = 262_144
"""What the pipe of a tool that prints much is made to hold: two pieces, which a cache of
a core holds with what they are copied to."""

HOLDERS_S = 1.0
"""How long other holders of the pipe are waited for after the tool's own end."""

END_TIMEOUT_S = 5.0
"""Longest wait for the executions of an ended child; they are killed at once, and only
a process that is stuck in the kernel takes longer."""

KEPT_EXECUTIONS = 32
"""Finished executions of one child whose output can be asked for again; each holds up
to 64 KiB of memory, the rest is on the disk and within the quota."""

QUOTA_LIMITS = 2
"""How many logs at their limit one child may have on the disk."""

GUARANTEED_SLOTS = 8
"""Slots that are there for a child however many others have."""


class BusyError(Exception):
    """There is no slot."""


class InUseError(Exception):
    """A live execution of the same child has this id; the text is the id."""


class Slots:
    """How many executions a host may run at once.

    A child may have all of them; one that has fewer than ``guaranteed`` gets its next
    one in any case.

    Args:
        limit: slots of the host.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.guaranteed = max(1, min(GUARANTEED_SLOTS, limit // 8))
        self.used = 0

    def take(self, of_child: int) -> None:
        """Take one for a child that has ``of_child`` already.

        Raises:
            BusyError: there is none.
        """
        if of_child >= self.limit:
            raise BusyError
        if self.used >= self.limit and of_child >= self.guaranteed:
            raise BusyError
        self.used += 1

    def give(self) -> None:
        """Give one back."""
        self.used -= 1


class Execution:
    """One run of one tool.

    Args:
        owner: the executions of its child.
        exec_id: unique among them.
        tool: its name.
        log: takes its output.

    Attributes:
        code: its exit code once it is finished; None before.
        timed_out: its time limit ended it.
        fault: why its output is not whole; None if it is.
        finished: set when the code is there.
    """

    def __init__(
        self, owner: ChildExecutions, exec_id: str, tool: str, log: OutputLog
    ) -> None:
        self.id = exec_id
        self.tool = tool
        self.log = log
        self.code: int | None = None
        self.timed_out = False
        self.fault: str | None = None
        self.finished = trio.Event()
        self.process: SpawnedProcess | None = None
        self._owner = owner
        self._pipe = -1
        self._eof = trio.Event()
        self._idle: trio.CancelScope | None = None
        self._last_bytes: int | None = None
        self._nursery: trio.Nursery | None = None
        self._ladder: Ladder | None = None
        self._held = AsyncExitStack()

    async def spawn(
        self, plan: SpawnPlan, cwd_fd: int, *, tty: bool = False, fd3: bool = False
    ) -> None:
        """Start the tool; ``run`` it afterwards, or give it up.

        Args:
            plan: what to start.
            cwd_fd: where; the caller's to close.
            tty: its stdout and stderr are a terminal.
            fd3: it has a door of its own.

        Raises:
            SpawnError: it did not start.
            OSError: a pipe or a door cannot be had.
        """
        ours, theirs = os.openpty() if tty else os.pipe2(os.O_CLOEXEC)
        self._pipe = ours
        try:
            os.set_inheritable(ours, False)
            os.set_blocking(ours, False)
            null = self._owner.null_fd
            fds = ((null, 0), (theirs, 1), (theirs, 2))
            if not fd3:
                self.process = await self._owner.spawn(plan, cwd_fd, fds)
                return
            door = await self._held.enter_async_context(open_door(self._owner.child))
            plan = replace(plan, env={**plan.env, **door.env})
            self.process = await self._owner.spawn(plan, cwd_fd, (*fds, *door.fds))
            door.handed_over()
        finally:
            os.close(theirs)

    async def run(self, timeout_s: float) -> None:
        """Own the tool until it has ended and all it printed is logged.

        Args:
            timeout_s: its time limit; 0 for none.
        """
        process = self.process
        if process is None:
            raise RuntimeError("an execution that was not spawned cannot run")
        status = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    status = await self._live(process, nursery, timeout_s)
                finally:
                    self._nursery = None  # before it closes to what ``end`` starts
                nursery.cancel_scope.cancel()
        finally:
            await self._held.aclose()
            self._finish(status)

    async def _live(
        self, process: SpawnedProcess, nursery: trio.Nursery, timeout_s: float
    ) -> ExitStatus:
        nursery.start_soon(self._pump)
        if timeout_s > 0:
            nursery.start_soon(self._enforce_timeout, timeout_s)
        if self._ladder is not None:
            nursery.start_soon(climb, process, self._ladder)
        status = await process.wait_exit()
        with trio.move_on_after(HOLDERS_S):
            await self._eof.wait()
        self._stop_at_what_is_there()
        await self._eof.wait()
        return status

    def end(self, ladder: Ladder = CLIENT_GONE) -> None:
        """Begin to end it: nobody wants it any more."""
        if self.process is None or self.finished.is_set():
            return
        if self._nursery is None:
            self._ladder = ladder  # it was spawned, but does not run yet
        else:
            self._nursery.start_soon(climb, self.process, ladder)

    async def abandon(self, *, keep: bool = False) -> None:
        """Finish what was never started; ``keep`` what is in its log."""
        await self._held.aclose()
        self._finish(None, keep=keep)

    async def end_now(self) -> None:
        """Kill it, with all beneath it, and wait until nothing is left."""
        if self.process is not None:
            with suppress(LaunchpadLost):
                await self.process.end_tree()
                await self.finished.wait()
                await self.process.wait_swept()

    # The pump: tool -> log

    async def _pump(self) -> None:
        fd = self._pipe
        try:
            data: bytes | memoryview = await self._read(HEAD_BYTES)
            buffer = None
            while data:
                await self.log.append(data)
                if buffer is not None:
                    size = await self._read_into(buffer)
                    data = memoryview(buffer)[:size]
                elif len(data) < HEAD_BYTES:
                    data = await self._read(HEAD_BYTES)
                else:  # a tool that prints much
                    with suppress(OSError):  # EPERM: the user's share of pipes is used
                        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                    buffer = bytearray(PIECE_BYTES)
                    size = await self._read_into(buffer)
                    data = memoryview(buffer)[:size]
        except LogFullError as why:
            self.fault = str(why)
            await self._discard_rest()
        finally:
            self._eof.set()

    async def _discard_rest(self) -> None:
        """End a tool whose output cannot be kept; what it still prints is lost."""
        self.end()
        while await self._read(HEAD_BYTES):
            pass

    async def _read(self, size: int) -> bytes:
        """Return what the tool printed, ``b""`` at the end."""
        while True:
            await (
                trio.lowlevel.checkpoint()
            )  # a tool that prints on and on is one of many
            try:
                return os.read(self._pipe, self._allowed(size))
            except BlockingIOError:
                if not await self._more():
                    return b""
            except OSError:  # EIO: the last holder of a terminal is gone
                return b""

    async def _read_into(self, buffer: bytearray) -> int:
        while True:
            await trio.lowlevel.checkpoint()
            allowed = self._allowed(len(buffer))
            try:
                return os.readv(self._pipe, [memoryview(buffer)[:allowed]])
            except BlockingIOError:
                if not await self._more():
                    return 0
            except OSError:
                return 0

    def _allowed(self, size: int) -> int:
        if self._last_bytes is None:
            return size
        size = min(size, self._last_bytes)
        self._last_bytes -= size
        return size

    async def _more(self) -> bool:
        """Wait for output; False if what still comes is nobody's."""
        if self._last_bytes is not None:
            return False
        with trio.CancelScope() as self._idle:
            await trio.lowlevel.wait_readable(self._pipe)
        return True

    def _stop_at_what_is_there(self) -> None:
        """Take what the pipe holds now for the last: others hold it for ever."""
        if not self._eof.is_set():
            waiting = array.array("i", [0])
            fcntl.ioctl(self._pipe, termios.FIONREAD, waiting)
            self._last_bytes = waiting[0]
            if self._idle is not None:
                self._idle.cancel()

    async def _enforce_timeout(self, timeout_s: float) -> None:
        await trio.sleep(timeout_s)
        self.timed_out = True
        self.end(TIME_IS_UP)

    # Its end

    def _finish(self, status: ExitStatus | None, *, keep: bool = True) -> None:
        if self._pipe >= 0:
            trio.lowlevel.notify_closing(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
        if self.process is not None:
            self.process.close()
        if self.code is None:
            self.code = TIMED_OUT if self.timed_out else _code(status)
        self._owner.finished(self, keep=keep)
        self.log.finish(TIMEOUT_NOTE if self.timed_out else b"")
        self.finished.set()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what this holds of the host's descriptors."""
        if self._pipe >= 0:
            yield self._pipe, "tool's output"
        if self.process is not None:
            for fd in self.process.descriptors():
                yield fd, "pidfd"
        for fd in self.log.descriptors():
            yield fd, "output log"


def _code(status: ExitStatus | None) -> int:
    """Return an exit code as a shell has it; 137 for an end that nobody saw."""
    if status is None or (status.code is None and status.signal is None):
        return 128 + 9
    if status.signal is not None:
        return 128 + status.signal
    return status.code or 0


class ChildExecutions:
    """The executions of one child.

    Args:
        host: whose child it is.
        child: the child.
        slots: of the host.
        log_limit_bytes: of one log.
        directory: where logs are made.
        null_fd: the null device.

    Attributes:
        nursery: in which they run; the child's.
        live: those that run, by id.
        kept: those that have finished and whose output is still there, oldest first.
    """

    def __init__(
        self,
        host: Host,
        child: Child,
        slots: Slots,
        log_limit_bytes: int,
        directory: str,
        null_fd: int,
    ) -> None:
        self.host = host
        self.child = child
        self.null_fd = null_fd
        self.nursery: trio.Nursery | None = None
        self.live: dict[str, Execution] = {}
        self.kept: OrderedDict[str, Execution] = OrderedDict()
        self._slots = slots
        self._directory = directory
        self._log_limit_bytes = log_limit_bytes
        self._quota = Quota(
            QUOTA_LIMITS * log_limit_bytes, self._give_one_up, self._close_file
        )

    def admit(
        self, tool: str, exec_id: str | None = None, *, keep_all: bool = False
    ) -> Execution:
        """Reserve an id and a slot.

        Args:
            tool: its name.
            exec_id: wanted; None for a fresh one.
            keep_all: its output is wanted whole, at its end.

        Raises:
            InUseError: the id is that of a live execution.
            BusyError: there is no slot.
        """
        exec_id = exec_id or secrets.token_hex(16)
        if exec_id in self.live:
            raise InUseError(exec_id)
        if self.nursery is None:
            raise BusyError  # the child is ending
        self._slots.take(len(self.live))
        earlier = self.kept.pop(exec_id, None)
        if earlier is not None:
            earlier.log.discard()
        log = OutputLog(
            self._directory, self._log_limit_bytes, self._quota, keep_all=keep_all
        )
        execution = self.live[exec_id] = Execution(self, exec_id, tool, log)
        return execution

    async def spawn(
        self, plan: SpawnPlan, cwd_fd: int, fds: tuple[tuple[int, int], ...]
    ) -> SpawnedProcess:
        """Start a tool as the child itself was started: the one place where it is made.

        It has the child's user, layers and cgroups, in the directory of the plan.

        Raises:
            SpawnError: it did not start.
        """
        request = SpawnRequest(
            executable=plan.executable,
            argv=plan.argv,
            env=plan.env,
            cwd_fd=cwd_fd,
            fds=fds,
            rlimits=plan.rlimits,
        )
        launcher, wanted = self.host.launcher, self.child.wanted
        if wanted is None or plan.is_of_the_host:
            return await launcher.spawn(request)
        root = self._root()
        is_beneath = f"{plan.cwd}/".startswith(f"{root}/")
        wanted = replace(
            wanted,
            cwd=plan.cwd,
            is_given=True,
            workspace=root if is_beneath else plan.cwd,
        )
        return (await walled.spawn(launcher, self.host.machine, request, wanted))[0]

    def _root(self) -> str:
        """Return where the child's root is now."""
        for fd in self.child.places[0].backend.descriptors():
            return path_of(fd)
        return self.child.spec.root

    def begin(self, execution: Execution, timeout_s: float, sidecar: str) -> None:
        """Let a spawned execution run, whatever becomes of who asked for it."""
        process = execution.process
        if self.nursery is None or process is None:
            raise RuntimeError("an execution without a process or a child cannot run")
        self.host.journal.write(
            "exec.started",
            child_id=self.child.id,
            exec_id=execution.id,
            tool=execution.tool.encode("utf-8", "surrogateescape").decode(
                errors="backslashreplace"
            ),
            sidecar=sidecar,
            pid=process.pid,
        )
        self.nursery.start_soon(execution.run, timeout_s)

    def finished(self, execution: Execution, *, keep: bool) -> None:
        """Free the id and the slot; keep the output if there is to be any."""
        del self.live[execution.id]
        self._slots.give()
        if execution.process is not None:
            self.host.journal.write(
                "exec.ended",
                child_id=self.child.id,
                exec_id=execution.id,
                code=execution.code,
                timed_out=execution.timed_out,
                output_bytes=execution.log.end,
            )
        if not keep:
            execution.log.discard()
            return
        self.kept[execution.id] = execution
        while len(self.kept) > KEPT_EXECUTIONS:
            self._give_one_up()

    def find(self, exec_id: str) -> Execution | None:
        """Return an execution whose output is there, None if there is none."""
        return self.live.get(exec_id) or self.kept.get(exec_id)

    def _give_one_up(self) -> bool:
        if not self.kept:
            return False
        self.kept.popitem(last=False)[1].log.discard()
        return True

    def _close_file(self, fd: int) -> None:
        """Close a file in a thread: to free 256 MiB of cache takes 10 to 30 ms."""
        if self.nursery is None:
            os.close(fd)
        else:
            self.nursery.start_soon(in_thread, os.close, fd)

    async def close(self) -> None:
        """End every execution and forget all output: the child has ended."""
        nursery, self.nursery = self.nursery, None
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            async with trio.open_nursery() as ending:
                for execution in tuple(self.live.values()):
                    ending.start_soon(execution.end_now)
        if nursery is not None:
            nursery.cancel_scope.cancel()
        while self._give_one_up() or self._quota.drop_spare():
            pass

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what this holds of the host's descriptors."""
        for execution in (*self.live.values(), *self.kept.values()):
            yield from execution.descriptors()
        for fd in self._quota.descriptors():
            yield fd, "spare output log"
