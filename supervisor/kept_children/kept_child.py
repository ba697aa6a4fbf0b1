"""One kept child: its name, its section, and the life of its processes.

One task from its turn to its last end, restarts included.
"""

from __future__ import annotations

import math
import os
import random
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import trio

from hostlib.handover import HandoverError, text_as_bytes
from hostlib.threads import in_thread
from supervisor.children.lifecycle import START_PATIENCE_S, State
from supervisor.children.specs import ChildOptions, make_spec, policy_options
from supervisor.config.child import restart_policy, stop_signal
from supervisor.kept_children.input_pipe import InputPipe
from supervisor.kept_children.kept_state import KeptChildState
from supervisor.kept_children.logs import Capture, ChildLog
from supervisor.sandbox.scratch import Scratch
from supervisor.spawn.restarts import (
    TABLE,
    Phase,
    RestartAction,
    RestartEvent,
    Restarts,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from supervisor.children.child import Child
    from supervisor.config.child import ChildSection
    from supervisor.config.policy import PolicySection
    from supervisor.config.sandbox import SandboxSection
    from supervisor.host import Host
    from supervisor.kept_children.fleet_place import FleetPlace
    from supervisor.workspace.use import WorkspaceUse

NOT_STARTED = 125
"""The exit status that is recorded for a child that was not started."""

FINAL = frozenset({Phase.ENDED, Phase.STOPPED, Phase.GIVEN_UP})


def options_of(
    section: ChildSection,
    policy: PolicySection | None,
    sandboxes: Mapping[str, SandboxSection],
    workspaces: tuple[WorkspaceUse, ...] = (),
) -> ChildOptions:
    """Return the options of a section, its policy and the policy's workspaces."""
    return replace(
        policy_options(policy, sandboxes, workspaces),
        dialect=section.dialect,
        transport=section.transport,
        env=dict(section.env),
        cwd=section.cwd,
        stop_signal=stop_signal(section.stop_signal),
        policy=section.policy,
    )


class SharedParts(NamedTuple):
    """The parts that the children of one daemon share.

    Attributes:
        scratch_dir: where their private directories are made.
        room: bounds starts (``roster.STARTS_AT_ONCE``).
    """

    scratch_dir: str | None
    room: trio.Semaphore


class KeptChild:
    """One kept child.

    Args:
        host: starts its processes.
        name: its own.
        section: its configuration.
        options: made from section and policy.
        log: gets its output.
        shared: the parts that all kept children share.

    Attributes:
        phase: the phase of its life.
        reason: the reason for that phase; None if there is none.
        child: its process now; None between two processes.
        status: of its last process; None before the first has ended.
        has_lived: whether its last process was started, however soon it ended.
        pid: of its last process that was started; None before the first one.
        failed_status: the exit status that `run` gives where its last start failed.
        begun: set when its process was started or never will be; also between two.
        ended: clear from the end of a process until the next step is decided.
        settled: set while none of its processes runs or is about to.
        configured: whether the configuration names it.
        placed: its place in a fleet; None for a child of this host alone.
        input: of its process now; None for one whose standard input is empty.
    """

    def __init__(
        self,
        host: Host,
        name: str,
        section: ChildSection,
        options: ChildOptions,
        log: ChildLog,
        shared: SharedParts,
    ) -> None:
        self.name = name
        self.section = section
        self.options = options
        self.log = log
        self.phase = Phase.STOPPED
        self.reason: str | None = None
        self.child: Child | None = None
        self.status: int | None = None
        self.has_lived = False
        self.pid: int | None = None
        self.failed_status = NOT_STARTED
        self.begun = trio.Event()
        self.ended = trio.Event()
        self.ended.set()
        self.settled = trio.Event()
        self.settled.set()
        self.configured = True
        self.placed: FleetPlace | None = None
        self.input: InputPipe | None = None
        self.restarts = Restarts(
            restart_policy(section), trio.current_time, random.random
        )
        self._host = host
        self._scratch_dir = shared.scratch_dir
        self._room = shared.room
        self._waiting = trio.CancelScope()  # an order may end it before it is entered
        self._starting = trio.CancelScope()
        self._start_until = math.inf
        self._due_at = -math.inf
        self._last_end: Mapping[str, object] = {}
        self._held: set[Capture | Scratch] = set()
        self._left: KeptChildState | None = None  # until its task continues with it

    # The hand-over

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing of it is being started or cleaned up."""
        if self.settled.is_set():
            return True
        if self.phase is Phase.BACKING_OFF:
            return self._due_at > trio.current_time() and not self._held
        child = self.child
        return child is not None and not child.gone.is_set() and len(self._held) == 2

    def snapshot(self) -> KeptChildState:
        """Return what the next program takes over; nothing of it changes.

        Precondition: it is at rest.
        """
        state = KeptChildState(
            name=self.name,
            section=text_as_bytes(msgspec.to_builtins(self.section)),
            options=text_as_bytes(msgspec.to_builtins(self.options)),
            phase=self.phase.value,
            reason=self.reason,
            status=self.status,
            configured=self.configured,
            restarts=self.restarts.snapshot(),
            dropped_bytes=self.log.segments.dropped_bytes,
        )
        if self.settled.is_set():
            return state
        if self.child is None:
            state.wait_s = max(0.0, self._due_at - trio.current_time())
            return state
        state.child_id = self.child.id
        for held in self._held:
            if isinstance(held, Scratch):
                state.scratch = held.snapshot()
            else:
                state.output_fd, state.error_fd = held.fds
        return state

    def restore(self, state: KeptChildState, child: Child | None) -> None:
        """Restore the state of the program before; ``run`` continues with it.

        Args:
            state: the record of the program before.
            child: its process now; None between two processes.
        """
        self.phase = Phase(state.phase)
        self.reason = state.reason
        self.status = state.status
        self.configured = state.configured
        self.log.segments.dropped_bytes = state.dropped_bytes
        self.restarts.restore(state.restarts)
        self.begun.set()
        if self.phase in FINAL:
            return
        self.settled = trio.Event()
        self.child = child  # an order may come before its task begins
        self._left = state

    async def _finish_inherited(self, left: KeptChildState) -> bool:
        """Wait for the end of the process or pause before; return whether it starts again."""
        if self.child is None:
            return await self._wait(left.wait_s)
        if left.scratch is None:
            raise HandoverError(f"child {self.name} has no directories")
        pipes = self._capturing(left.output_fd, left.error_fd)
        async with self._holding(Scratch.restore(left.scratch)), pipes:
            status = await self._live(self.child)
        return await self._wait_for_next(status)

    # Orders

    def begin(self) -> bool:
        """Prepare for ``run``; return False if a run is under way already."""
        if not self.settled.is_set():
            if self.phase is Phase.BACKING_OFF:
                self.restarts.reset()
                self._waiting.cancel()
                self._expect_start()
            return False
        self.settled = trio.Event()
        self._expect_start()
        self._waiting = trio.CancelScope()
        self.phase = Phase.WAITING
        self.reason = None
        self._start_until = math.inf
        self.restarts.reset()
        return True

    def _expect_start(self) -> None:
        """Clear ``begun`` until the next process was started, or never will be."""
        self.has_lived = False
        if self.begun.is_set():  # else tasks wait for it already
            self.begun = trio.Event()

    def stop(self, grace_s: float | None = None) -> None:
        """Ask it to end for good; ``settled`` is set when it has."""
        action = self._handle(RestartEvent.STOP)
        if self.settled.is_set():
            return
        self.reason = "stopped on request"
        if action is RestartAction.STOP and self.child is not None:
            self.child.stop(grace_s)
        elif action is RestartAction.STOP:  # it is being started
            patience_s = START_PATIENCE_S if grace_s is None else grace_s
            until_s = trio.current_time() + min(START_PATIENCE_S, patience_s)
            # Repeated requests do not extend the wait.
            self._start_until = min(self._start_until, until_s)
            self._starting.deadline = self._start_until
        elif action is RestartAction.LEAVE:
            self._waiting.cancel()

    async def run(self, after: Iterable[KeptChild]) -> None:
        """Own it from its turn, or from the hand-over, to its last end."""
        left, self._left = self._left, None
        try:
            if left is not None:
                if await self._finish_inherited(left):
                    await self._run_processes()
                return
            with self._waiting:
                for other in after:
                    await other.begun.wait()
            if self.phase is not Phase.WAITING:
                return
            self._handle(RestartEvent.START)
            await self._run_processes()
        finally:
            self.begun.set()
            self.ended.set()
            self.settled.set()

    async def _run_processes(self) -> None:
        """Run one process after another, until none is to follow."""
        while True:
            self.restarts.started()
            if not await self._wait_for_next(await self._run_once()):
                return

    async def _wait_for_next(self, status: int) -> bool:
        """Record a process's end and wait for the restart; return False if none is due."""
        self.status = status
        # The end that was asked for is no reason to count a restart.
        is_ending = self.phase is Phase.ENDING
        meaning = RestartEvent.ENDED if is_ending else self.restarts.ended(status)
        action = self._handle(meaning)
        self.ended.set()
        if action is not RestartAction.WAIT:
            self._tell_end(meaning)
            return False
        return await self._back_off()

    async def _back_off(self) -> bool:
        self._waiting = trio.CancelScope()
        wait_s = self.restarts.wait_s()
        self._host.log.write(
            "INFO",
            f"Child {self.name} is started again in {wait_s:.3g} s",
            **self._end_fields(),
            status=self.status,
            reason=self.reason,
            restarts=self.restarts.total,
        )
        self._host.journal.write(
            "child.restarting",
            name=self.name,
            status=self.status,
            reason=self.reason,
            wait_s=round(wait_s, 3),
        )
        return await self._wait(wait_s)

    async def _wait(self, wait_s: float) -> bool:
        """Wait for a restart; return whether it is still wanted then."""
        self._due_at = trio.current_time() + wait_s
        with self._waiting:
            await trio.sleep_until(self._due_at)
        is_wanted = self._handle(RestartEvent.WAITED) is RestartAction.SPAWN
        if is_wanted:
            self._expect_start()
        return is_wanted

    def _tell_end(self, meaning: RestartEvent) -> None:
        if (
            meaning is not RestartEvent.ENDED_TOO_OFTEN
            or self.phase is not Phase.GIVEN_UP
        ):
            return
        policy = self.restarts.policy
        self.reason = (
            f"given up: more than {policy.max_restarts} restarts within"
            f" {policy.within_s:g} s; at last it {self.reason}"
        )
        self._host.log.write(
            "ERROR",
            f"Child {self.name} {self.reason}",
            **self._end_fields(),
            status=self.status,
            reason=self.reason,
        )
        self._host.journal.write(
            "child.given_up", name=self.name, status=self.status, reason=self.reason
        )

    def _end_fields(self) -> dict[str, object]:
        """Return the fields that identify the child and its end in a line of the log."""
        return {"child": self.name, **self._last_end}

    def _handle(self, event: RestartEvent) -> RestartAction:
        self.phase, action = TABLE.step(self.phase, event)
        return action

    # One process

    async def _run_once(self) -> int:
        """Run one process; return its exit status when all of it is gone."""
        self._last_end = {}
        with self._open_start_scope() as waiting:
            await self._room.acquire()
        if waiting.cancelled_caught:
            return NOT_STARTED
        async with AsyncExitStack() as stack:
            try:
                child = await self._start(stack)
            except OSError as why:
                return self._record_failed_start(why.strerror or str(why))
            finally:
                self._room.release()
            return NOT_STARTED if child is None else await self._live(child)

    async def _start(self, stack: AsyncExitStack) -> Child | None:
        """Make its directories and pipes, and start its process.

        Args:
            stack: removes them at its end.

        Returns:
            The child; None if an order has stopped the start.

        Raises:
            OSError: the machine lacks something; the text is for `ps`.
        """
        has_input = self.placed is not None and self.placed.program.takes_input
        options, where = self.options, self._scratch_dir
        has_user = "uid" in options.sandbox.layers
        try:
            scratch = Scratch(options.root, where=where, has_user=has_user)
        except OSError as why:
            text = f"cannot make its directories: {why.strerror}"
            raise OSError(why.errno, text) from why
        await stack.enter_async_context(self._holding(scratch))
        try:
            given, (out, out_end), (err, err_end) = _open_stdio(has_input=has_input)
        except OSError as why:
            text = f"no descriptors for it: {why.strerror}"
            raise OSError(why.errno, text) from why
        self.log.begin()
        await stack.enter_async_context(self._capturing(out, err))
        await stack.enter_async_context(self._passing(given.writer))
        return await self._spawn(scratch, (given.reader, out_end, err_end))

    @asynccontextmanager
    async def _holding(self, scratch: Scratch) -> AsyncIterator[None]:
        self._held.add(scratch)
        try:
            yield
        finally:
            failure = await scratch.remove()
            self._held.discard(scratch)
            if failure is not None:
                self._host.log.write("WARNING", failure, child=self.name)

    @asynccontextmanager
    async def _capturing(self, out: int, err: int) -> AsyncIterator[None]:
        """Keep the output that comes through its pipes, up to the last byte."""
        capture = Capture(self.log, out, err)
        self._held.add(capture)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(capture.run)
                try:
                    yield
                finally:
                    capture.finish()
        finally:
            self._held.discard(capture)

    @asynccontextmanager
    async def _passing(self, writer: int) -> AsyncIterator[None]:
        """Pass its input on to its process; -1 for none."""
        if writer < 0:
            yield
            return
        self.input = pipe = InputPipe(writer)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pipe.run)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.input = None
            pipe.close()

    def _open_start_scope(self) -> trio.CancelScope:
        """Return a scope for a start's waits; ``stop`` sets its deadline."""
        self._starting = trio.CancelScope(deadline=self._start_until)
        return self._starting

    async def _spawn(
        self, scratch: Scratch, stdio: tuple[int, int, int]
    ) -> Child | None:
        """Start its process; return None if it was stopped before its exec.

        Closes the descriptors that it was given.
        """
        most_files = self._host.settings.open_files_per_client
        words = tuple(self.section.command)
        try:
            options = await self._prepare_options()
            spec = make_spec(options, words, scratch, stdio, most_files)
            account = self.name if self.configured else None
            spec = replace(spec, name=self.name, account=account)
            launcher = None
            if self.placed is not None:
                spec = self.placed.spec_of(spec)
                launcher = self.placed.launcher
            with self._open_start_scope():
                return await self._host.spawn(spec, launcher)
            return None
        finally:
            for fd in stdio:
                # So that the pipes end when the child's processes are gone.
                os.close(fd)

    async def _prepare_options(self) -> ChildOptions:
        """Return its options with its workspaces found, or made where they are new.

        Raises:
            OSError: one cannot be used; ``strerror`` says why.
        """
        options = self.options
        if not options.workspaces:
            return options
        uses = await in_thread(_prepare_uses, options.workspaces)
        return replace(options, workspaces=uses, cwd=options.cwd or uses[0].base)

    async def _live(self, child: Child) -> int:
        self.child = child
        self.has_lived = True
        self.pid = None if child.process is None else child.process.pid
        self.begun.set()
        if self.phase is Phase.ENDING and child.state is State.RUNNING:
            child.stop()  # the order came during the start
        try:
            status = await child.wait_gone()
        finally:
            self.child = None
            self.ended = trio.Event()
            self._last_end = child.end_fields()
        if child.failure is not None:
            failure = child.failure
            return self._record_failed_start(failure.text, failure.exit_status)
        if self.phase is not Phase.ENDING:
            self.reason = child.ending
        return status

    def _record_failed_start(self, text: str, status: int = NOT_STARTED) -> int:
        self.failed_status = status
        self.reason = f"did not start{self.section.policy_phrase()}: {text}"
        self.has_lived = False
        self.begun.set()
        self._host.log.write(
            "WARNING",
            f"Child {self.name} {self.reason}",
            **self._end_fields(),
            status=NOT_STARTED,
            reason=self.reason,
        )
        return NOT_STARTED

    # Views

    def descriptors(self) -> Iterable[tuple[int, str]]:
        """Yield its descriptors of the host beside those of its process."""
        for fd in self.log.descriptors():
            yield fd, "child log"
        for fd in () if self.input is None else self.input.descriptors():
            yield fd, "child input"
        for held in self._held:
            if isinstance(held, Scratch):
                yield from held.descriptors()
            else:
                yield from ((fd, "child output") for fd in held.descriptors())

    def extra_fields(self) -> dict[str, object]:
        """Return its fields in ``ps`` beside those of its process."""
        return {
            "restart": self.section.restart,
            "restarts": self.restarts.total,
            "reason": self.reason,
            "log_dropped_bytes": self.log.segments.dropped_bytes,
            "incarnation": None
            if self.placed is None
            else self.placed.life.incarnation,
        }

    def row(self) -> dict[str, object]:
        """Return its row in ``ps`` while it has no process."""
        return {
            "id": self.name,
            "name": self.name,
            "pid": None,
            "create_time": None,
            "state": self.phase.value,
            "command": self.section.command,
            "client_id": None,
            "started_at": None,
            "isolation": None,  # not tried, so not reported
            **self.extra_fields(),
            "status": self.status,
            "usage": None,
        }


def _prepare_uses(uses: tuple[WorkspaceUse, ...]) -> tuple[WorkspaceUse, ...]:
    """Return uses of workspaces as found, or as made (for a worker thread)."""
    # Imports what the start needs, here: in the Trio thread all other children would
    # wait for that (attack 41).
    import supervisor.children.child_workspaces  # noqa: F401, PLC0415 - with one
    from supervisor.workspace.run import prepare_uses  # noqa: PLC0415 - with one

    return prepare_uses(uses)


class _Input(NamedTuple):
    """A standard input: its reading end, and its writing end; -1 without one."""

    reader: int
    writer: int


def _open_stdio(*, has_input: bool) -> tuple[_Input, tuple[int, int], tuple[int, int]]:
    """Return the input, and both ends of the pipes for stdout and stderr."""
    with ExitStack() as stack:
        if has_input:
            given = _Input(*os.pipe2(os.O_CLOEXEC))
        else:
            given = _Input(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1)
        for fd in given:
            if fd >= 0:
                stack.callback(os.close, fd)
        out = os.pipe2(os.O_CLOEXEC)
        for fd in out:
            stack.callback(os.close, fd)
        err = os.pipe2(os.O_CLOEXEC)
        stack.pop_all()
    return given, out, err
