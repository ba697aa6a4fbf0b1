"""One child: its process, its sessions, its end; one task owns it (I2).

Rules of this file.

1. All that a child acquires is released in reverse order by one stack, also after a
   failed start and after a hand-over.
2. The exit of the process ends the child (spec S2), in this order: new programs are
   refused; its earlier requests are done, and nested clients are closed before their parent
   (spec S3); its refusals are counted; the stack gives back the process, what services
   made for it (tools, the model), leftover processes, the sessions' nursery, root
   and grants, workspaces, user and groups; the end is reported, and the child is gone.
3. ``lifecycle`` decides what an event means; this file only acts.
"""

from __future__ import annotations

import _socket
import math
import os
import signal
import socket
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, assert_never

import trio

from hostlib.clock import timestamp
from hostlib.handover import HandoverError
from hostlib.linux.syscalls import open_exactly
from supervisor.children.child_limits import ChildLimits
from supervisor.children.child_state import (
    ChildState,
    WallsState,
    restore_spec,
    snapshot_spec,
)
from supervisor.children.child_walls import (
    report_walls,
    restore_walls,
    restore_wanted,
    snapshot_walls,
    take_wanted,
)
from supervisor.children.clients import Clients
from supervisor.children.environment import add_offered, fill_in_recipe
from supervisor.children.held_descriptors import ATTACHING, HeldDescriptors
from supervisor.children.lifecycle import TABLE, Action, Event, State
from supervisor.fsproxy.door_socket import VARIABLE, DoorSocket
from supervisor.fsproxy.ports import Portable
from supervisor.sandbox import refusals, start
from supervisor.sandbox.home import check_owner
from supervisor.sandbox.plan import Walls
from supervisor.spawn.ends import Ends
from supervisor.spawn.inner_pair import InnerListener
from supervisor.spawn.process import LaunchpadLost, ProcessState
from supervisor.spawn.request import SpawnError, SpawnRequest, find_executable
from vfs.places import close_places
from vfs.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from supervisor.children.child_workspaces import ChildWorkspaces
    from supervisor.fsproxy.session import Session
    from supervisor.fsproxy.traffic import Traffic
    from supervisor.parts import Parts
    from supervisor.sandbox.plan import WantedWalls
    from supervisor.spawn.launcher import Launcher
    from supervisor.spawn.launchpad.layers.loopback import LoopbackOrder
    from supervisor.spawn.process import ExitStatus, SpawnedProcess
    from supervisor.spec import ChildSpec
    from vfs.handover import NumberedObjects, Numbering
    from vfs.places import Place

SWEEP_TIMEOUT_S = 5.0
"""Longest wait for the rest of a dead child's processes. They are killed at once; only
a process that is stuck in the kernel takes longer."""

STANDARD = (0, 1, 2)

DIRECTORY = "working directory"


class Child:
    """One child of a host, from its start to its end.

    Args:
        host: the parts that all children of the host share.
        child_id: unique in the host.
        spec: describes the child.
        siblings: all children of the host by id, this one included until it is gone.
        on_overdue: called if the child outlives the grace period of a stop.
        launcher: starts the child and its tools; None for the host's own.

    Attributes:
        state: the phase of its life.
        clients: its sessions.
        limits: the use and the refusals of its limits.
        exit: the end of its process; None before.
        failure: the reason why it was not started; None if it was.
        timed_out: whether its time limit ended it.
        ended_for: any other reason for which the host ended it; "" for none.
        gone: set when nothing of it is left.
        begun: set when its process runs and its session has begun, or never will.
        scope: covers its whole life; cancelled when no caller waits for its start any
            more.
        places: its root and grants.
        wanted: the walls that the child and its tools are to run in.
        walls: the walls that it runs in, once it does.
    """

    def __init__(
        self,
        host: Parts,
        child_id: str,
        spec: ChildSpec,
        siblings: dict[str, Child],
        on_overdue: Callable[[Child], None],
        launcher: Launcher | None = None,
    ) -> None:
        self.launcher = host.launcher if launcher is None else launcher
        self.id = child_id
        self.spec = spec
        self.state = State.STARTING
        self.exit: ExitStatus | None = None
        self.failure: SpawnError | None = None
        self.timed_out = False
        self.ended_for = ""
        self.gone = trio.Event()
        self.begun = trio.Event()
        self.scope = trio.CancelScope()
        self.process: SpawnedProcess | None = None
        self.places: tuple[Place, ...] = ()
        self.wanted: WantedWalls | None = None
        self.walls = Walls(spec.sandbox.name)
        self.limits = ChildLimits(host, self)
        self._host = host
        self._siblings = siblings
        self._on_overdue = on_overdue
        self._held = HeldDescriptors()
        self.clients = Clients(host, child_id, self._held)
        self._workspaces: ChildWorkspaces | None = None
        self._ends: Ends | None = None
        self._inner: InnerListener | None = None
        self._has_services_inside = False
        self._nursery: trio.Nursery | None = None
        self._is_stopped = False
        self._grace_s = host.settings.grace_s
        self._killed_at = math.inf
        self._timeout_at = math.inf
        # The first two steps: a restored child has a process already.
        self._acquire: Callable[[AsyncExitStack], Awaitable[None]] = self._start
        self._begin: Callable[[], None] = partial(self._handle, Event.SPAWNED)
        if spec.workspaces:
            from supervisor.children.child_workspaces import ChildWorkspaces  # noqa: PLC0415 - with one

            self._workspaces = ChildWorkspaces(host, self, siblings, self._held)

    @classmethod
    def restore(
        cls,
        host: Parts,
        state: ChildState,
        numbered: NumberedObjects,
        siblings: dict[str, Child],
        on_overdue: Callable[[Child], None],
    ) -> Child:
        """Return a child of the program before, whose process runs already.

        Args:
            host: the parts that all children of the host share.
            state: the record of the program before.
            numbered: all places and policies.
            siblings: as for a new one.
            on_overdue: as for a new one.

        Raises:
            HandoverError: this program knows no such child.
        """
        spec = restore_spec(state.spec)
        child = cls(host, state.id, spec, siblings, on_overdue)
        child.timed_out = state.timed_out
        child._acquire = partial(child._restore, state, numbered)
        child._begin = partial(child._resume, state)
        return child

    # Orders from outside

    def stop(self, grace_s: float | None = None) -> None:
        """Send SIGTERM, and SIGKILL after the grace period (spec S6).

        Args:
            grace_s: seconds between the two; None for the host's setting.
        """
        if grace_s is not None:
            self._grace_s = grace_s
        is_first = not self._is_stopped
        self._is_stopped = True
        if is_first and self.state is State.RUNNING and self._nursery is not None:
            self._nursery.start_soon(self._enforce_end)
        self._handle(Event.STOP)

    def end_for(self, reason: str) -> None:
        """End the child at once, and record the reason."""
        self.ended_for = reason
        self.stop(0.0)

    async def wait_gone(self) -> int:
        """Wait until nothing of it is left; return its exit status, 128+n by signal."""
        await self.gone.wait()
        return self.status

    # How it ended

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self.exit is not None

    @property
    def status(self) -> int:
        """Return its exit status as a shell shows it (face: exit statuses of ``run``)."""
        if self.failure is not None:
            return self.failure.exit_status
        if self.exit is None or (self.exit.code is None and self.exit.signal is None):
            return 125
        if self.exit.signal is not None:
            return 128 + self.exit.signal
        return self.exit.code or 0

    @property
    def ending(self) -> str:
        """How its process ended, in words; a supervisor that restarts it reads them, too."""
        ended = self.exit
        if ended is None or (ended.code is None and ended.signal is None):
            return "ended with an unknown status"
        why = f": {self.ended_for}" if self.ended_for else ""
        if self.timed_out:
            why = ": its time limit was up"
        if ended.signal is None:
            return f"exited with {self.status}{why}"
        try:
            name = signal.Signals(ended.signal).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {ended.signal}"
        return f"was killed by {name}{why}"

    # Its life

    async def run(self) -> None:
        """Own the child from its start until it is gone, and in no table (I5)."""
        try:
            with self.scope:
                await self._start_and_live()
        finally:
            # Also where its life was cancelled: the host is being torn down.
            self.state = State.REAPING
            try:
                self._handle(Event.CLEANED)
            finally:
                del self._siblings[self.id]
                self.gone.set()
                self.begun.set()

    async def _start_and_live(self) -> None:
        async with AsyncExitStack() as stack:
            try:
                await self._acquire(stack)
            except SpawnError as why:
                self.failure = why
            except OSError as why:
                self.failure = refusals.not_prepared(why)
            except LaunchpadLost:
                raise
            except Exception as why:  # noqa: BLE001 - one start, and not the host
                self.failure = refusals.internal_error(why)
            if self.failure is not None:
                self._handle(Event.SPAWN_FAILED)
                return
            # Cancelled while it was born: its session is closed already.
            await trio.lowlevel.checkpoint_if_cancelled()
            self._begin()
            await self._live()

    async def _start(self, stack: AsyncExitStack) -> None:
        """Start its process; its stack gives back all that the start acquires."""
        spec = self.spec
        if spec.fleet is not None:
            self._host.fence.add(self.id, spec.fleet)
            stack.callback(self._host.fence.remove, self.id)
        if self._workspaces is not None:
            self._workspaces.drop_at_end(stack)
        cwd_fd = os.open(spec.cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._held.keep(stack, cwd_fd, DIRECTORY)
        wanted, groups = take_wanted(self._host, self.id, spec, self._workspaces, stack)
        self.wanted, self.limits.groups = wanted, groups
        if wanted.files.home:
            check_owner(wanted.files.home, wanted.user)
        root = None
        if self._workspaces is not None:
            root = await self._workspaces.mount(stack, wanted)
        policy = self._make_policy(stack, cwd_fd, root)
        wanted.files.readable = spec.readable(self.places)
        ends = self._ends = Ends(spec.transport, spec.dialect)
        stack.callback(ends.close)
        nursery = await self._open_nursery(stack)
        self.clients.open(nursery, policy, spec, ends)
        stack.push_async_callback(self._wait_swept)
        env = await self._make_environment(stack, ends)
        start_fd = self._open_start(stack, cwd_fd, wanted)
        process = self.process = await self._spawn(start_fd, ends, env, wanted)
        stack.callback(process.close)
        stack.callback(self._kill_unless_ended)
        if self._workspaces is not None:
            root = self.places[0] if spec.has_workspace_root else None
            await self._workspaces.name_process(process)
            await self._workspaces.take_mounts(stack, wanted, root)
        self._watch_forks(stack)
        ends.close_child_ends()
        if self._inner is not None:
            self._inner.serve_received()

    async def _live(self) -> None:
        """Wait for its process's end, and begin its own (rule 2)."""
        process, session, nursery = self.process, self.session, self._nursery
        if process is None or session is None or nursery is None:
            raise RuntimeError("a child that was not started cannot live")
        # Only what the child has a bound for: each task here delays the start of a
        # child.
        if self._is_stopped:
            nursery.start_soon(self._enforce_end)
        if self._timeout_at < math.inf:
            nursery.start_soon(self._enforce_timeout)
        if self._workspaces is not None:
            self._workspaces.start_tasks(nursery)
        self.clients.serve_door()
        try:
            self.exit = await process.wait_exit()
        except LaunchpadLost:
            self._host.log.write(
                "ERROR",
                "The launchpad is lost, and with it the child",
                **self.log_fields(),
            )
            raise
        self._tell_end(process, session)
        self._handle(Event.EXITED)
        await self.clients.finish()
        self.limits.count()

    async def _open_nursery(self, stack: AsyncExitStack) -> trio.Nursery:
        """Open the nursery of its sessions; they are closed before it is left."""
        nursery = self._nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        stack.push_async_callback(self.clients.finish)
        return nursery

    def _kill_unless_ended(self) -> None:
        """Kill the process if the life of the child was cancelled before it ended."""
        if self.process is not None and self.exit is None:
            self.process.send_signal(signal.SIGKILL)

    async def _wait_swept(self) -> None:
        """Wait until nothing of the dead or killed process is alive.

        Also after a start that failed or was cancelled: its user is given back then.
        """
        if self.process is None:
            return
        # A launchpad that is lost is told by its launcher, which ends its tree.
        with trio.move_on_after(SWEEP_TIMEOUT_S, shield=True), suppress(LaunchpadLost):
            await self.process.wait_swept()

    async def _enforce_end(self) -> None:
        """Kill the child if it outlives the grace period of a stop (spec S6)."""
        self._killed_at = trio.current_time() + self._grace_s
        await trio.sleep_until(self._killed_at)
        if self.exit is not None:
            return
        self._on_overdue(self)
        self._handle(Event.GRACE_OVER)

    async def _enforce_timeout(self) -> None:
        await trio.sleep_until(self._timeout_at)
        if self.exit is None:
            self.timed_out = True
            self.stop()

    # Its start

    def _make_policy(
        self, stack: AsyncExitStack, cwd_fd: int, root: Place | None
    ) -> Policy:
        spec = self.spec
        places = self.places = spec.open_places(self._host.settings.written, root)
        stack.callback(close_places, places)
        return Policy(
            places,
            top_level=spec.top_level,
            cwd_fd=cwd_fd,
            tools=spec.tools,
            model=spec.model,
            image_tokens=spec.image_tokens,
        )

    async def _make_environment(
        self, stack: AsyncExitStack, ends: Ends
    ) -> dict[str, str]:
        """Return its environment, with what each service offers."""
        spec = self.spec
        env = {**spec.env, **ends.env, "FSPROXY_TOP_LEVEL": spec.top_level_word}
        env.update(spec.walls_env)
        env.pop(VARIABLE, None)
        env.update(self.clients.open_door(spec, stack))
        if spec.network_keys is not None and self._host.services.network is None:
            raise refusals.names_not_served()
        for service in self._host.services:
            offered = await service.child_starting(self, stack)
            self._warn(add_offered(env, offered, spec))
        self._warn(fill_in_recipe(env, spec))
        return env

    def _warn(self, texts: Iterator[str]) -> None:
        for text in texts:
            self._host.log.write("WARNING", text, child_id=self.id)

    def _open_start(
        self, stack: AsyncExitStack, cwd_fd: int, wanted: WantedWalls
    ) -> int:
        """Return a descriptor of the child's first directory, as its mounts show it."""
        path = self.spec.cwd
        mount = wanted.files.mount_of(path)
        if mount is None or mount.fd < 0:
            return cwd_fd
        fd = open_exactly(os.fsencode(mount.inside(path)), mount.fd)
        self._held.keep(stack, fd, DIRECTORY)
        return fd

    def _watch_forks(self, stack: AsyncExitStack) -> None:
        forks = self._host.forks
        spec = self.spec
        forks.watch(self.id, spec.name, spec.group_limits, self.limits.groups.made)
        stack.callback(forks.forget, self.id)

    async def _spawn(
        self, cwd_fd: int, ends: Ends, env: dict[str, str], wanted: WantedWalls
    ) -> SpawnedProcess:
        spec = self.spec
        stdio = zip(spec.stdio, STANDARD, strict=True)
        path = spec.env.get("PATH")
        executable = find_executable(
            spec.command[0], path, spec.cwd, wanted.files.shown
        )
        request = SpawnRequest(
            executable=executable,
            argv=spec.command,
            env=env,
            cwd_fd=cwd_fd,
            fds=(*stdio, *ends.child_fds()),
            rlimits=spec.rlimits,
            umask=spec.umask,
            listener=self._inner,
            sends=None if self._workspaces is None else self._workspaces.sent,
        )
        host, limit_s = self._host, spec.timeout_s or math.inf
        self._timeout_at = trio.current_time() + limit_s
        # An exec can hang, and that time is the child's too.
        with trio.CancelScope(deadline=self._timeout_at) as patience:
            process, self.walls = await start.spawn(
                self.launcher, host.machine, request, wanted
            )
        if patience.cancelled_caught:
            self.timed_out = True
            raise refusals.too_late(executable, limit_s)
        self.walls.missing.update(self._missing_services())
        if spec.network_keys is not None and spec.network_keys.upstream is not None:
            why = f"the proxy {spec.network_keys.upstream} looks names up"
            self.walls.missing[start.ADDRESSES] = why
        fields = {**self.log_fields(), "pid": process.pid}
        report_walls(host, spec, self.walls, fields)
        return process

    # The hand-over

    def snapshot(self, numbers: Numbering) -> ChildState:
        """Return what the next program takes over; nothing of it changes.

        Raises:
            HandoverError: a part of it cannot be handed over.
        """
        session, process = self.session, self.process
        if process is None or session is None:
            raise HandoverError(f"{self.id} has no process")
        now = trio.current_time()
        born = process.snapshot()
        side, door = self.clients.side, self.clients.door
        side_fd = -1 if side is None else side.fileno()
        door_fd = -1 if door is None else door.fd
        # A descriptor that ATTACH carries belongs to the session that asked for
        # it.
        words = self._held.words.items()
        held = {fd: word for fd, word in words if word != ATTACHING}
        numbers.fds |= {*process.descriptors(), *held}
        numbers.fds |= {fd for fd in (side_fd, door_fd) if fd >= 0}
        is_limited = self.spec.timeout_s is not None
        return ChildState(
            id=self.id,
            spec=snapshot_spec(self.spec),
            state=self.state.value,
            timed_out=self.timed_out,
            timeout_s=max(0.0, self._timeout_at - now) if is_limited else None,
            grace_s=max(0.0, min(self._grace_s, self._killed_at - now)),
            ident=born.ident,
            pid=born.pid,
            create_time=born.create_time,
            pidfd=born.pidfd,
            places=[numbers.number_owned_place(place) for place in self.places],
            session=session.snapshot(numbers),
            side_fd=side_fd,
            held=held,
            walls=snapshot_walls(self.walls, self.wanted, born.init),
            door_fd=door_fd,
            door_name="" if door is None else door.name,
            past_traffic=self.clients.past,
        )

    async def _restore(
        self, state: ChildState, numbered: NumberedObjects, stack: AsyncExitStack
    ) -> None:
        """Restore the descriptors of the program before, for the same order of release."""
        host = self._host
        if state.walls is not None:
            self._restore_walls(state.walls, stack)
        if self._workspaces is not None:
            self._workspaces.restore(stack, state.held)
        else:
            for fd, word in state.held.items():
                self._held.keep(stack, fd, word)
        self.places = tuple(numbered.places[number] for number in state.places)
        stack.callback(close_places, self.places)
        side = socket.socket(fileno=state.side_fd) if state.side_fd >= 0 else None
        self._ends = Ends.handed_over(side)
        stack.callback(self._ends.close)
        nursery = await self._open_nursery(stack)
        self.clients.restore(nursery, state.session, side, numbered)
        self.clients.past = state.past_traffic
        if self.wanted is not None:
            self._restore_shown(self.wanted, state.held)
        stack.push_async_callback(self._wait_swept)
        if state.door_fd >= 0:
            listener = _socket.socket(fileno=state.door_fd)
            door = DoorSocket(self.spec, state.door_name, listener)
            self.clients.hold_door(door, stack)
        for service in host.services:
            if isinstance(service, Portable):
                await service.restore_child(self, stack)
        init = -1 if state.walls is None else state.walls.init
        self.process = host.launcher.restore_process(
            ProcessState(state.ident, state.pid, state.create_time, state.pidfd, init)
        )
        stack.callback(self.process.close)
        stack.callback(self._kill_unless_ended)
        self._watch_forks(stack)

    def _restore_walls(self, left: WallsState, stack: AsyncExitStack) -> None:
        """Restore the walls that it runs in, with its user and groups."""
        self.walls = restore_walls(left)
        self.wanted, groups = restore_wanted(self._host, self.spec, left, stack)
        if groups.made:
            self.limits.restore(groups)

    def _restore_shown(self, wanted: WantedWalls, held: Mapping[int, str]) -> None:
        """Restore what it and its tools see; it has its places and workspaces."""
        wanted.files.readable = self.spec.readable(self.places)
        if self._workspaces is not None:
            self._workspaces.restore_shown(wanted, held)

    def _resume(self, state: ChildState) -> None:
        """Continue where the program before has stopped."""
        self.state = State(state.state)
        self._grace_s = state.grace_s
        if self.state is State.STOPPING:
            self._is_stopped = True
        self.clients.resume()
        self.begun.set()
        if state.timeout_s is not None and not self.timed_out:
            self._timeout_at = trio.current_time() + state.timeout_s

    # The view of services (`ports.ChildView`)

    @property
    def session(self) -> Session | None:
        """Its own session; None before it has one."""
        return self.clients.own

    @property
    def threads(self) -> trio.CapacityLimiter | None:
        """Bounds the threads that look at its own files; None for no bound."""
        session = self.session
        return None if session is None else session.client.ledger.threads

    def sessions(self) -> Iterator[Session]:
        """Yield its sessions, each before those nested in it."""
        return iter(self.clients)

    def open_nested(self, policy: Policy, label: str) -> tuple[Session, socket.socket]:
        """Return a new session beneath its own; see ``Clients.open_nested``.

        Raises:
            OSError: no descriptor, or no more clients, for this child (spec S7).
        """
        return self.clients.open_nested(policy, label)

    def carrying(self, carried: socket.socket) -> AbstractContextManager[None]:
        """Hold a socket while it or its copy is sent to a client; close it afterwards."""
        return self._held.carrying(carried)

    def listen_within(
        self,
        port: int,
        serve: Callable[[socket.socket], None],
        stack: AsyncExitStack,
    ) -> int:
        """Return the port on which it will listen on loopback of its own net namespace.

        Precondition: the child is not spawned yet.

        Args:
            port: taken if no other service has it.
            serve: called with the non-blocking listener once the child runs; never
                called where the child shares its loopback with other programs.
            stack: closes the listener if ``serve`` was not called.

        Returns:
            The port; the caller tells it to the child.

        Raises:
            OSError: no descriptor is left for the way of the listener to the host.
        """
        self._has_services_inside = True
        if self.spec.network != "host" and "netns" in self.spec.sandbox.layers:
            return self._open_inner(stack).add_listener(port, serve)
        return port

    def make_within(
        self,
        order: LoopbackOrder,
        serve: Callable[[list[socket.socket], bool], None],
        stack: AsyncExitStack,
    ) -> None:
        """Make the sockets of a network by name in its own net namespace.

        Precondition: the child is not spawned yet, and ``listen_within`` was not
        called.

        Args:
            order: the sockets; the child is not started without them.
            serve: called with the non-blocking sockets once the child runs (those of v6
                only if the namespace has it), and whether it has v6.
            stack: closes the sockets if ``serve`` was not called.

        Raises:
            OSError: no descriptor is left for their way to the host.
        """
        self._open_inner(stack).add_sockets(order, serve)

    def _open_inner(self, stack: AsyncExitStack) -> InnerListener:
        if self._inner is None:
            self._inner = InnerListener()
            stack.callback(self._inner.close)
        return self._inner

    def _missing_services(self) -> dict[str, str]:
        """Return a report of the ports of services that are out of reach, if any are."""
        layers = dict(self.walls.applied)
        is_shared = self.walls.network == "host" or "netns" in layers
        if not self._has_services_inside or is_shared:
            return {}
        how = start.instead_of_listener(self.spec.sandbox)
        return {start.LISTENER: f"it has no net namespace; {how}"}

    # Reports

    @property
    def held(self) -> Mapping[int, str]:
        """Descriptors that it holds for its start and its end, with a word for each."""
        return self._held.words

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host, with a word for each."""
        yield from self._held.words.items()
        for place in self.places:
            for fd in place.backend.descriptors():
                yield fd, "root or grant"
        for part, word in (
            (self.process, "pidfd"),
            (self._ends, "connection"),
            (self._inner, "inner listener"),
            (self._workspaces, "inner mounts"),
        ):
            for fd in () if part is None else part.descriptors():
                yield fd, word
        yield from self.clients.descriptors()

    def report_omitted(self) -> None:
        """Write the number of events that its audits left out so far."""
        if self._workspaces is not None:
            self._workspaces.report_omitted()

    def traffic(self) -> Traffic:
        """Return what it and its nested clients asked for, from its start to now."""
        return self.clients.traffic()

    def row(self) -> dict[str, object]:
        """Return the child as one row of ``ps``."""
        process = self.process
        session = self.session
        return {
            "id": self.id,
            "name": self.spec.name,
            "pid": process.pid if process is not None else None,
            "create_time": process.create_time if process is not None else None,
            "state": self.state.value,
            "command": self._shown_command(),
            "client_id": session.client.id if session is not None else None,
            "started_at": timestamp(session.client.connected_at) if session else None,
            # Before the start no layer was tried yet.
            "isolation": None if process is None else self.walls.row(),
            "traffic": self.traffic().row(),
            "workspaces": self._host.sizes.rows(self.spec.workspaces),
        }

    def log_fields(self) -> dict[str, object]:
        """Return the fields that identify it in a line of the log."""
        session = self.session
        client_id = None if session is None else session.client.id
        pid = None if self.process is None else self.process.pid
        name = self.spec.name
        fields: dict[str, object] = {} if name is None else {"child": name}
        return {**fields, "child_id": self.id, "client_id": client_id, "pid": pid}

    def end_fields(self) -> dict[str, object]:
        """Return the fields that identify it and its end in a line of the log."""
        ended = self.exit
        if ended is None:
            return self.log_fields()
        return {**self.log_fields(), "code": ended.code, "signal": ended.signal}

    def _shown_command(self) -> list[str]:
        return [os.fsencode(a).decode(errors="replace") for a in self.spec.command]

    def _tell_end(self, process: SpawnedProcess, session: Session) -> None:
        """Log its end: as a warning if it failed and no operator asked for its end.

        A child of ``run`` never warns: ``run`` passes its status on.
        """
        ended = self.exit
        if ended is None:
            raise RuntimeError("a child that runs has not ended")
        was_asked = self._is_stopped and not (self.timed_out or self.ended_for)
        is_obeying = was_asked and ended.signal == self.spec.stop_signal
        is_kept = self._host.roster is not None
        failed = bool(self.status) and is_kept and not is_obeying
        self._host.log.write(
            "WARNING" if failed else "INFO",
            f"Process {process.pid} terminated, cleaning up client {session.client.id}",
            **self.end_fields(),
            status=self.status,
            reason=self.ending,
        )

    # Events

    def _handle(self, event: Event) -> None:
        """Enter the state that follows an event, and do the table's action."""
        self.state, action = TABLE.step(self.state, event)
        match action:
            case Action.SERVE:
                self._serve()
            case Action.SERVE_AND_TERMINATE:
                self._serve()
                self.send_signal(self.spec.stop_signal)
            case Action.TERMINATE:
                self.send_signal(self.spec.stop_signal)
            case Action.KILL:
                self.send_signal(signal.SIGKILL)
            case Action.REPORT:
                self._report()
            case Action.CLEAN_UP | Action.NOTHING:
                pass  # `run` unwinds its stack as soon as there is nothing to wait for
            case _:
                assert_never(action)

    def _serve(self) -> None:
        """Serve its session: its process runs."""
        process, session, journal = self.process, self.session, self._host.journal
        if process is None or session is None:
            raise RuntimeError("a child that was not started cannot be served")
        life = self.spec.fleet
        self.clients.serve(process.pid)
        # At once: the records below run beside the child.
        self.begun.set()
        journal.write(
            "child.spawned",
            child_id=self.id,
            name=self.spec.name,
            client_id=session.client.id,
            pid=process.pid,
            command=self._shown_command(),
            isolation=self.walls.row(),
            fleet_id=None if life is None else life.child,
            incarnation=None if life is None else life.incarnation,
        )
        self._host.log.write(
            "INFO", f"Child {self.spec.name or self.id} started", **self.log_fields()
        )

    def send_signal(self, number: int) -> None:
        """Send a signal to the child's process, if it has not ended."""
        if self.process is not None:
            self._tell_signal(self.process, number)
            self.process.send_signal(number)

    async def signal_tree(self, number: int) -> None:
        """Send a signal to the child's process and to all beneath it."""
        if self.process is not None:
            self._tell_signal(self.process, number)
            await self.process.signal_tree(number)

    def _tell_signal(self, process: SpawnedProcess, number: int) -> None:
        self._host.forks.signalled(self.id, number)
        self._host.journal.write(
            "child.signalled", child_id=self.id, pid=process.pid, signal=int(number)
        )

    def _report(self) -> None:
        journal, status = self._host.journal, self.status
        self._host.events.forget(self.id)
        if self.exit is not None:
            journal.write(
                "child.exited",
                child_id=self.id,
                code=self.exit.code,
                signal=self.exit.signal,
                utime_s=self.exit.utime_s,
                stime_s=self.exit.stime_s,
                maxrss_kib=self.exit.maxrss_kib,
                timed_out=self.timed_out,
            )
        reason = None if self.failure is None else self.failure.text
        journal.write("child.gone", child_id=self.id, status=status, failure=reason)
