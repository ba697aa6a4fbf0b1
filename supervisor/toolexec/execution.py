"""One execution: a tool from its start to its exit code, and all that it prints.

    spawn -> run (pump, limits, exit) -> finished (its log is kept)

Rules of this file.

1. Its id and its slot are free before anybody is told its exit code.
2. stdout and stderr are one pipe, stdin is the null device, and nothing else of the
   host is open in a tool.
3. What is printed is logged as fast as the log takes it: the pipe is the backpressure.
"""

from __future__ import annotations

import array
import fcntl
import math
import os
import termios
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from protocol.toolexec import TIMED_OUT, TIMEOUT_NOTE
from supervisor import walled
from supervisor.launcher import LaunchpadLost
from supervisor.sandbox import Profile
from supervisor.spawn_request import SpawnRequest
from supervisor.toolexec.door import open_door
from supervisor.toolexec.ending import CLIENT_GONE, TIME_IS_UP, climb
from supervisor.toolexec.logstores import HEAD_BYTES
from supervisor.toolexec.outputlog import PIECE_BYTES, LogFullError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.launcher import ExitStatus, SpawnedProcess
    from supervisor.toolexec.ending import Ladder
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.outputlog import OutputLog
    from supervisor.toolexec.routes import SpawnPlan

PIPE_BYTES = 262_144
"""What the pipe of a tool that prints much is made to hold: two pieces, which a cache of
a core holds with what they are copied to."""

HOLDERS_S = 1.0
"""How long other holders of the pipe are waited for after the tool's own end."""


class Execution:
    """One run of one tool.

    Args:
        owner: the executions of its child.
        door_client: the nested client that its tool is; empty for none.
        climbs: (ladder, when it was begun) of each way in which it is being ended.
        timeout_at: when its time is up.
        exec_id: unique among them.
        tool: its name.
        log: takes its output.

    Attributes:
        code: its exit code once it is finished; None before.
        timed_out: its time limit ended it.
        fault: why its output is not whole; None if it is.
        finished: set when the code is there.
        owner: the executions of its child.
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
        self.owner = owner
        self._pipe = -1
        self._eof = trio.Event()
        self._idle: trio.CancelScope | None = None
        self._last_bytes: int | None = None
        self._nursery: trio.Nursery | None = None
        self.climbs: list[tuple[Ladder, float]] = []
        self.timeout_at = math.inf
        self._door = AsyncExitStack()
        self.door_client = ""

    @property
    def output_end(self) -> int:
        """Where the tool's own output ends; what follows is the host's last word."""
        return self.log.end if self.log.note_at < 0 else self.log.note_at

    async def spawn(
        self, plan: SpawnPlan, cwd_fd: int, *, tty: bool = False, fd3: bool = False
    ) -> None:
        """Start the tool; ``run`` it afterwards, or give it up.

        Args:
            plan: what is to be started.
            cwd_fd: its working directory.
            tty: its output is a terminal.
            fd3: it has FD 3, as a nested client of the child.

        Raises:
            SpawnError: it did not start.
            OSError: a pipe or a door cannot be had.
        """
        ours, theirs = os.openpty() if tty else os.pipe2(os.O_CLOEXEC)
        self._pipe = ours
        try:
            os.set_inheritable(ours, False)
            os.set_blocking(ours, False)
            null = self.owner.null_fd
            fds: tuple[tuple[int, int], ...] = ((null, 0), (theirs, 1), (theirs, 2))
            async with AsyncExitStack() as stack:
                door = None
                if fd3:
                    door = await stack.enter_async_context(open_door(self.owner.child))
                    plan = replace(plan, env={**plan.env, **door.env})
                    fds += door.fds
                request = spawn_request(plan, cwd_fd, fds)
                self.process = await self._launch(plan, request)
                if door is not None:
                    door.handed_over()
                    self.door_client = door.client_id
                self._door = stack.pop_all()
        finally:
            os.close(theirs)

    async def _launch(self, plan: SpawnPlan, request: SpawnRequest) -> SpawnedProcess:
        """Start it in all that its child runs in, or as the host runs."""
        host, child = self.owner.host, self.owner.child
        wanted = child.wanted
        if not plan.is_walled or wanted is None:
            return await host.launcher.spawn(request)
        # No less than the child has: what cannot be had here refuses the start, and
        # says nothing of the machine, for the workspace may be on any file system.
        layers = frozenset(name for name, _ in child.walls.applied)
        wanted = replace(
            wanted,
            profile=Profile(wanted.profile.name, layers, layers),
            cwd=plan.cwd,
            own=(),
            shared=plan.shared,
            kept=plan.kept,
            programs=plan.programs,
        )
        process, _ = await walled.spawn(host.launcher, host.machine, request, wanted)
        return process

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
            self._finish(status)
            await self._door.aclose()

    async def _live(
        self, process: SpawnedProcess, nursery: trio.Nursery, timeout_s: float
    ) -> ExitStatus:
        nursery.start_soon(self._pump)
        if timeout_s > 0:
            nursery.start_soon(self._enforce_timeout, timeout_s)
        for ladder, begun_s in self.climbs:
            nursery.start_soon(climb, process, ladder, begun_s)
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
        begun_s = trio.current_time()
        self.climbs.append((ladder, begun_s))
        if self._nursery is not None:  # else it was spawned, but does not run yet
            self._nursery.start_soon(climb, self.process, ladder, begun_s)

    async def abandon(self, *, keep: bool = False) -> None:
        """Finish what was never started; ``keep`` what is in its log."""
        self._finish(None, keep=keep)
        await self._door.aclose()

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
            if self.fault is not None:  # so it was in the program before
                await self._discard_rest()
                return
            await self.log.append_pending()
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
        self.timeout_at = trio.current_time() + timeout_s
        await trio.sleep_until(self.timeout_at)
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
        self.owner.finished(self, keep=keep)
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


def spawn_request(
    plan: SpawnPlan, cwd_fd: int, fds: tuple[tuple[int, int], ...]
) -> SpawnRequest:
    """Say what the launcher is to start: the one place where a tool's process is made."""
    return SpawnRequest(
        executable=plan.executable,
        argv=plan.argv,
        env=plan.env,
        cwd_fd=cwd_fd,
        fds=fds,
        rlimits=plan.rlimits,
    )


def _code(status: ExitStatus | None) -> int:
    """Return an exit code as a shell has it; 137 for an end that nobody saw."""
    if status is None or (status.code is None and status.signal is None):
        return 128 + 9
    if status.signal is not None:
        return 128 + status.signal
    return status.code or 0
