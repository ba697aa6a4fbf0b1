"""One execution: a tool from its start to its exit code, with its output.

    spawn -> begin (pump, limits, exit) -> finished (its log is kept)

Rules of this file.

1. Its id and its slot are free before its exit code is sent.
2. stdout and stderr are one pipe, stdin is the null device, and no other descriptor of
   the host is open in a tool.
3. Output is logged as fast as the log takes it: the pipe is the backpressure.
4. Its tasks are the child's: one pumps the output and waits for the end; the tasks that
   end it, or that wait for other holders of the pipe, are cancelled then.
"""

from __future__ import annotations

import math
import os
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from hostlib.journal import text_of
from protocol.toolexec.requests import TIMED_OUT, TIMEOUT_NOTE
from supervisor.fleet.fence import FencedError
from supervisor.spawn.process import LaunchpadLost, ProcessState
from supervisor.toolexec.backends import launch
from supervisor.toolexec.door import close_door, open_door
from supervisor.toolexec.ending import (
    AT_ONCE,
    CLIENT_GONE,
    LADDERS,
    TIME_IS_UP,
    SignalLine,
    climb,
)
from supervisor.toolexec.output.log import LogFullError, LogState
from supervisor.toolexec.output.pump import OutputPump
from supervisor.toolexec.routes import ToolRefusedError
from supervisor.toolexec.slots import BusyError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from supervisor.spawn.process import ExitStatus, SpawnedProcess
    from supervisor.spawn.request import SpawnError
    from supervisor.toolexec.ending import Ladder
    from supervisor.toolexec.growth import Growth
    from supervisor.toolexec.output.log import OutputLog
    from supervisor.toolexec.routes import SpawnPlan
    from supervisor.toolexec.starts import Start

HOLDERS_S = 1.0
"""Longest wait for other holders of the pipe after the tool's own end."""

GIVEN_UP = "it was ended while it was being started"

PASSED_NOTE = b"sandhost: ended, for a limit of its child is passed: %b\n"
"""The note behind the output of a tool that passed a limit of its child."""

ABANDON_TIMEOUT_S = 5.0
"""Longest wait for the end of an unwanted start; it is killed at once."""


class ExecutionState(msgspec.Struct):
    """The state of an ``Execution``; times are seconds left or passed.

    Attributes:
        where: ``live``, ``kept``, or empty if only a reader knows it.
        line: the pipe of signals for its tool; -1 for none.
        passed: the limit for which it is killed; empty for none.
    """

    id: str
    key: str
    tool: bytes
    where: str
    log: LogState
    code: int | None
    timed_out: bool
    fault: str | None
    process: ProcessState | None = None
    pipe: int = -1
    timeout_s: float = 0.0
    climbs: list[tuple[str, float]] = []
    door_client: str = ""
    line: int = -1
    passed: str = ""


class Owner(launch.Owner, Protocol):
    """The executions of a child, as far as one of them needs them.

    Attributes:
        null_fd: the null device.
        nursery: runs them; None once the child is ending.
        growth: charges the child for made files; None if there is no bound.
    """

    null_fd: int
    nursery: trio.Nursery | None
    growth: Growth | None

    def release(self, execution: Execution, *, keep: bool) -> None:
        """Free the id and the slot; keep the output if ``keep`` is true."""
        ...


class Execution:
    """One run of one tool.

    Args:
        owner: the executions of its child.
        exec_id: unique among them.
        tool: its name.
        log: gets its output.

    Attributes:
        key: its key at its owner.
        code: its exit code once it is finished; None before.
        timed_out: whether its time limit ended it.
        fault: the reason why its output is incomplete; None if it is complete.
        passed: the limit of its child for which it was ended; empty for none.
        finished: set when it has its code.
        owner: the executions of its child.
        line: passes signals to its tool; None where they reach it directly.
        door_client: the nested client of its tool; empty for none.
        climbs: (ladder, time of its beginning) of each way in which it is being ended.
        timeout_at: the time of its limit.
        start: can be given up; None for one that the program before began.
    """

    def __init__(self, owner: Owner, exec_id: str, tool: str, log: OutputLog) -> None:
        self.id = self.key = exec_id
        self.tool = tool
        self.log = log
        self.code: int | None = None
        self.timed_out = False
        self.fault: str | None = None
        self.passed = ""
        self.finished = trio.Event()
        self.process: SpawnedProcess | None = None
        self.owner = owner
        self.line: SignalLine | None = None
        self.door_client = ""
        self.climbs: list[tuple[Ladder, float]] = []
        self.timeout_at = math.inf
        self.start: Start | None = None
        self._pump: OutputPump | None = None
        self._nursery: trio.Nursery | None = None
        self._aside: list[trio.CancelScope] = []
        self._door: AsyncExitStack | None = None

    def snapshot(self, where: str) -> tuple[ExecutionState, set[int]]:
        """Return its state for ``restore``, and its descriptors.

        Args:
            where: see ``ExecutionState``.
        """
        state = ExecutionState(
            id=self.id,
            key=self.key,
            tool=os.fsencode(self.tool),
            where=where,
            log=self.log.snapshot(),
            code=self.code,
            timed_out=self.timed_out,
            fault=self.fault,
            passed=self.passed,
        )
        fds = set(self.log.descriptors())
        if self.finished.is_set() or self.process is None:
            return state, fds
        now = trio.current_time()
        state.process = self.process.snapshot()
        state.pipe = -1 if self._pump is None else self._pump.pipe
        state.door_client = self.door_client
        if self.line is not None:
            state.line = self.line.fd
        if not self.timed_out and self.timeout_at < math.inf:
            state.timeout_s = max(0.001, self.timeout_at - now)
        names = {id(ladder): name for name, ladder in LADDERS.items()}
        state.climbs = [
            (names[id(ladder)], now - begun_s)
            for ladder, begun_s in self.climbs
            if ladder is not AT_ONCE
        ]
        return state, fds | {state.process.pidfd, state.pipe, state.line}

    def restore(self, state: ExecutionState) -> None:
        """Restore the execution of the program before; then call ``run``.

        A ladder continues with its next step; a tool that was killed for a limit is
        killed again.
        """
        self.key, self.code, self.fault = state.key, state.code, state.fault
        self.timed_out, self.passed = state.timed_out, state.passed
        if state.process is None:
            self.finished.set()
            return
        self.process = self.owner.host.launcher.restore_process(state.process)
        self._pump = OutputPump(state.pipe, self.log)
        self.door_client = state.door_client
        if state.line >= 0:
            self.line = SignalLine(state.line)
        for session in self.owner.child.sessions():
            if state.door_client and session.client.id == state.door_client:
                self._door = AsyncExitStack()
                self._door.push_async_callback(close_door, session)
        now = trio.current_time()
        self.climbs = [(LADDERS[name], now - ago_s) for name, ago_s in state.climbs]
        self.timeout_at = now + state.timeout_s if state.timeout_s else math.inf

    @property
    def output_end(self) -> int:
        """Return the end of the tool's own output; the host's note follows."""
        return self.log.end if self.log.note_at < 0 else self.log.note_at

    @property
    def has_begun(self) -> bool:
        """Whether its tool was started and reported."""
        return self._nursery is not None

    async def spawn(
        self,
        plan: SpawnPlan,
        cwd_fd: int,
        *,
        tty: bool = False,
        fd3: bool = False,
        with_doors: bool = False,
    ) -> None:
        """Start the tool; then call ``begin``, or give it up.

        Args:
            plan: the process.
            cwd_fd: its working directory, if the plan has one.
            tty: whether its output is a terminal.
            fd3: whether it has FD 3, as a nested client of the child.
            with_doors: see ``launch.launch``.

        Raises:
            ToolRefusedError: a limit of its child is passed, or the child's lease is over.
            SpawnError: it did not start.
            OSError: there is no pipe or door for it.
        """
        try:
            self.owner.host.fence.check(self.owner.child.id)
        except FencedError as why:
            raise ToolRefusedError(403, f"fenced: {why}\n".encode()) from None
        if self.owner.growth is not None:
            await self.owner.growth.begin(self.tool)
        async with AsyncExitStack() as door_stack:
            with ExitStack() as stack:  # descriptors of the tool alone
                ours, theirs = os.openpty() if tty else os.pipe2(os.O_CLOEXEC)
                stack.callback(os.close, theirs)
                self._pump = OutputPump(ours, self.log)
                if tty:
                    os.set_inheritable(ours, False)
                os.set_blocking(ours, False)
                if plan.is_elsewhere:
                    cwd_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                    stack.callback(os.close, cwd_fd)
                given = self.owner.null_fd
                if plan.reads_signals:
                    given, writer = os.pipe2(os.O_CLOEXEC)
                    stack.callback(os.close, given)
                    self.line = SignalLine(writer)
                fds: tuple[tuple[int, int], ...]
                fds = ((given, 0), (theirs, 1), (theirs, 2))
                if fd3:
                    door = await door_stack.enter_async_context(
                        open_door(self.owner.child)
                    )
                    stack.callback(door.close_tools_end)
                    plan = replace(plan, env={**plan.env, **door.env})
                    fds = (*fds, *door.fds)
                    self.door_client = door.client_id
                self.process = await launch.launch(
                    self.owner, plan, cwd_fd, fds, with_doors=with_doors
                )
            self._door = door_stack.pop_all()

    async def begin(self, timeout_s: float, sidecar: str) -> None:
        """Report and run the spawned tool, also after its client is gone.

        Args:
            timeout_s: its time limit; 0 for none.
            sidecar: runs it.

        Raises:
            BusyError: the child is ending; the execution is gone.
        """
        if self.owner.nursery is None or self.process is None:
            await self.abandon()
            raise BusyError
        self.owner.host.journal.write(
            "exec.started",
            child_id=self.owner.child.id,
            exec_id=self.id,
            tool=text_of(self.tool.encode("utf-8", "surrogateescape")),
            sidecar=sidecar,
            pid=self.process.pid,
        )
        self.run(self.owner.nursery, timeout_s)

    def run(self, nursery: trio.Nursery, timeout_s: float) -> None:
        """Run the spawned tool until it has ended and its output is logged.

        Args:
            nursery: of its child.
            timeout_s: its time limit; 0 for none.
        """
        process, pump = self.process, self._pump
        if process is None or pump is None:
            raise RuntimeError("an execution that was not spawned cannot run")
        self._nursery = nursery
        nursery.start_soon(self._live, process, pump)
        process.at_exit(partial(self._bound_holders, pump))
        if timeout_s > 0:
            self._start_task(self.enforce_timeout, timeout_s)
        if self.owner.growth is not None and not self.passed:
            self._start_task(self._enforce_growth, self.owner.growth)
        for ladder, begun_s in self.climbs:  # of the program before
            self._start_task(climb, process, self.line, ladder, begun_s)
        # Given up a moment too late.
        if self.start is not None and self.start.is_given_up:
            self._set_code(self.start.code)
            self.end(AT_ONCE)
        elif self.passed:  # the program before has killed it, or was about to
            self.end(AT_ONCE)

    async def _live(self, process: SpawnedProcess, pump: OutputPump) -> None:
        """Log the tool's output, wait for its end, and finish."""
        status = None
        try:
            try:
                if self.fault is None:  # else it failed in the program before
                    await pump.run()
                else:
                    await pump.discard_rest()
            except LogFullError as why:  # the output cannot be kept
                self.fault = str(why)
                self.end()
                await pump.discard_rest()
            finally:
                pump.has_ended = True
            status = await process.wait_exit_soon()
            if self.owner.growth is not None and self._nursery is not None:
                await self.owner.growth.last_look(self._nursery)
        finally:
            process.at_exit(None)
            self._finish(status)
            if self._door is not None:
                await self._door.aclose()

    def _bound_holders(self, pump: OutputPump) -> None:
        """Bound the wait for other holders of an ended tool's pipe."""
        if not pump.has_ended:
            self._start_task(self._outwait_holders, pump)

    async def _outwait_holders(self, pump: OutputPump) -> None:
        await trio.sleep(HOLDERS_S)
        pump.end_at_present()

    def _start_task(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task that is cancelled when the execution has finished."""
        if self._nursery is not None:
            self._nursery.start_soon(self._run_until_finished, work, *args)

    async def _run_until_finished(
        self, work: Callable[..., Awaitable[None]], *args: object
    ) -> None:
        with trio.CancelScope() as scope:
            self._aside.append(scope)
            if not self.finished.is_set():
                await work(*args)

    def end(self, ladder: Ladder = CLIENT_GONE) -> None:
        """Begin to end it: its client is gone."""
        if self.process is not None and not self.finished.is_set():
            begun_s = trio.current_time()
            self.climbs.append((ladder, begun_s))
            self._start_task(climb, self.process, self.line, ladder, begun_s)

    async def finish_given_up(self, code: int, sidecar: str) -> None:
        """Finish one whose start was given up, as if its tool had ended."""
        self._set_code(code)
        self._report_failed(sidecar, GIVEN_UP)
        await self.abandon(keep=True)

    async def finish_unstarted(self, why: SpawnError, sidecar: str) -> None:
        """Finish one whose tool execve(2) refused, as a shell does."""
        self.code = why.exit_status
        self._report_failed(sidecar, why.reason)
        await self.log.append(f"{why.text}\n".encode("utf-8", "surrogateescape"))
        await self.abandon(keep=True)

    def _set_code(self, code: int | None) -> None:
        self.code, self.timed_out = code, code == TIMED_OUT

    async def abandon(self, *, keep: bool = False) -> None:
        """Finish one that has not begun; ``keep`` its log or not."""
        if not keep:  # readers get no code: there is none
            self.fault = "it was not started"
        process = self.process
        if process is not None:
            with trio.move_on_after(ABANDON_TIMEOUT_S, shield=True):
                with suppress(LaunchpadLost):
                    await process.end_tree()
                    await process.wait_swept()
        self._finish(None, keep=keep)
        if self._door is not None:
            await self._door.aclose()

    async def end_now(self) -> None:
        """Kill it and all beneath it, and wait until nothing is left."""
        if self.start is not None:
            self.start.give_up()  # without effect if it is over
        if self.process is not None:
            with suppress(LaunchpadLost):
                await self.process.end_tree()
        await self.finished.wait()
        if self.process is not None:
            with suppress(LaunchpadLost):
                await self.process.wait_swept()

    async def enforce_timeout(self, timeout_s: float) -> None:
        """End the tool once its time is up, unless it has ended by itself."""
        self.timeout_at = trio.current_time() + timeout_s
        await trio.sleep_until(self.timeout_at)
        if self.process is None or self.process.has_exited:
            return  # in time; another holder of its pipe is waited for
        self.timed_out = True
        self.end(TIME_IS_UP)

    async def _enforce_growth(self, growth: Growth) -> None:
        self.passed = await growth.wait_passed()
        self.end(AT_ONCE)

    # Its end

    def _finish(self, status: ExitStatus | None, *, keep: bool = True) -> None:
        """Record its end and free its resources; a second call does nothing."""
        if self.finished.is_set():
            return
        note = self._note()
        if self.code is None:
            self.code = TIMED_OUT if self.timed_out else _exit_code(status)
        self.owner.release(self, keep=keep)
        if self._nursery is not None:
            self.owner.host.journal.write(
                "exec.ended",
                child_id=self.owner.child.id,
                exec_id=self.id,
                code=self.code,
                timed_out=self.timed_out,
                output_bytes=self.log.end,
            )
        self.log.finish(note)
        self.finished.set()
        if self._pump is not None:
            self._pump.close()
        if self.process is not None:
            self.process.close()
        if self.line is not None:
            self.line.close()
        for scope in self._aside:
            scope.cancel()

    def _note(self) -> bytes:
        """Return the host's note behind the output."""
        if self.timed_out:
            return TIMEOUT_NOTE
        return PASSED_NOTE % self.passed.encode() if self.passed else b""

    def _report_failed(self, sidecar: str, reason: str) -> None:
        """Report one that has a code and a log, and never began."""
        self.owner.host.journal.write(
            "exec.failed",
            child_id=self.owner.child.id,
            exec_id=self.id,
            tool=text_of(self.tool.encode("utf-8", "surrogateescape")),
            sidecar=sidecar,
            code=self.code,
            reason=reason,
        )

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host."""
        if self._pump is not None:
            yield from self._pump.descriptors()
        if self.process is not None:
            for fd in self.process.descriptors():
                yield fd, "pidfd"
        if self.line is not None and self.line.fd >= 0:
            yield self.line.fd, "line of signals"
        for fd in self.log.descriptors():
            yield fd, "output log"


def _exit_code(status: ExitStatus | None) -> int:
    """Return a shell's exit code; 137 for an unknown end."""
    if status is None or (status.code is None and status.signal is None):
        return 128 + 9
    if status.signal is not None:
        return 128 + status.signal
    return status.code or 0
