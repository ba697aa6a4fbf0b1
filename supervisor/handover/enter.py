"""Puts a host together from what the program before took down.

The launchpad's hand, the counters, children with their conversations, each of which
goes on where it was.

Rules of this file.

1. The launcher knows its children before it listens: an exit during the exchange was
   said to the socket, and is heard now.
2. A child that is handed over owns what a started one owns and gives it back in the same
   order; only the way to it differs.
3. A conversation is served when everything that it may ask for is there again.
"""

from __future__ import annotations

import _socket
import signal
import socket
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from supervisor.children.child import WORKSPACE_LOCK, Child
from supervisor.children.lifecycle import State
from supervisor.fsproxy.door_socket import DoorSocket
from supervisor.fsproxy.ports import Portable
from supervisor.handover.session import take_up
from supervisor.handover.state import bytes_as_text
from supervisor.sandbox.groups import Groups
from supervisor.sandbox.plan import Walls
from supervisor.spawn.ends import Ends
from supervisor.spawn.launchpad import wire
from supervisor.spawn.process import SpawnedProcess
from supervisor.spec import ChildSpec
from vfs.errors import HandoverError
from vfs.handover import (
    client_from,
    enter_client,
    enter_counters,
    enter_file,
    ledger_from,
    place_from,
    policy_from,
)
from vfs.policy import Policy, close_places

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from supervisor.fsproxy.session import Session
    from supervisor.handover.state import ChildState, HostState, SessionState
    from supervisor.host import Host
    from supervisor.spawn.launcher import Launcher
    from vfs.policy import Place


async def enter(host: Host, state: HostState) -> list[Child]:
    """Put children and tables into a fresh host, and serve them.

    Args:
        host: its launcher was given the same state; its services are there.
        state: what was taken down.

    Returns:
        The children; one whose process ended meanwhile may be gone already.

    Raises:
        HandoverError: it cannot be; the host had better end.
    """
    if host.nursery is None:
        raise RuntimeError("the host is not open")
    host.generation = state.generation
    # What was handed over is not what the process held before it was a host.
    for fd in state.fds:
        host.baseline.descriptors.pop(fd, None)
    host._child_ids = count(state.next_child)
    enter_counters(host.fs, state.counters)
    places = [place_from(place) for place in state.places]
    policies = [policy_from(policy, places) for policy in state.policies]
    children: list[Child] = []
    for left in state.children:
        child = EnteredChild(host, left, places, policies)
        children.append(child)
        await host.begin(child)
    for service in host.services:
        if isinstance(service, Portable):
            await service.all_entered()
    await _end_untaken(host.launcher)
    files = sorted(host.fs.tables.files.items())
    host.fs.tables.files.clear()
    host.fs.tables.files.update(files)
    host.journal.write(
        "host.replaced", generation=state.generation, children=len(state.children)
    )
    host.log.write(
        "INFO",
        f"Replaced: {len(state.children)} children go on",
        generation=state.generation,
        children=len(state.children),
    )
    return children


async def _end_untaken(launcher: Launcher) -> None:
    """End the processes that nobody has taken: of a service that is not here any more."""
    for ident, record in launcher.handed_over.items():
        if not (record.abandoned or record.exited.is_set()):
            await launcher.send((wire.SIGNAL, ident, int(signal.SIGKILL)))
    launcher.handed_over.clear()


def spec_from(plain: dict[bytes, Any]) -> ChildSpec:
    """Return the description that was taken down as plain values.

    Raises:
        HandoverError: this program knows no such child.
    """
    try:
        return msgspec.convert(bytes_as_text(plain), ChildSpec)
    except msgspec.ValidationError as why:
        raise HandoverError(f"a child of another kind: {why}") from None


class EnteredChild(Child):
    """A child whose process runs already.

    Args:
        host: whose child it is from now on.
        left: what was taken down.
        places: all places, by their numbers.
        policies: all policies, as above.
    """

    def __init__(
        self,
        host: Host,
        left: ChildState,
        places: list[Place],
        policies: list[Policy],
    ) -> None:
        spec = spec_from(left.spec)
        super().__init__(host, left.id, spec, host.children, host.tell_overdue)
        self.timed_out = left.timed_out
        self._left = left
        self._all_places = places
        self._policies = policies
        self._to_go_on: list[tuple[Session, SessionState]] = []

    async def _start(self, stack: AsyncExitStack) -> None:
        left, host = self._left, self._host
        self._hold_again(stack)
        self.places = tuple(self._all_places[number] for number in left.places)
        stack.callback(close_places, self.places)
        side = socket.socket(fileno=left.side_fd) if left.side_fd >= 0 else None
        pairs = self._ends = Ends.handed_over(side)
        self._side = side
        stack.callback(pairs.close)
        self._nursery = await self._open_nursery(stack)
        self.session = self._enter_session(left.session, None)
        born = (left.pid, left.create_time, *self._enter_walls(stack), left.pidfd)
        stack.push_async_callback(self._wait_swept)
        if left.door_fd >= 0:
            listener = _socket.socket(fileno=left.door_fd)
            door = DoorSocket(self.spec, left.door_name, listener)
            self._hold_door_socket(door, stack)
        for service in host.services:
            if isinstance(service, Portable):
                await service.child_entered(self, stack)
        record = host.launcher.handed_over.pop(left.ident)
        self.process = SpawnedProcess(host.launcher, left.ident, record, born)
        stack.callback(self.process.close)
        self._watch_forks(stack)

    def _hold_again(self, stack: AsyncExitStack) -> None:
        """Hold what the program before held, to be given back in the same order."""
        held = self._left.held
        for fd in self._locks():
            self._held[fd] = WORKSPACE_LOCK
            stack.callback(self._unlock, fd)
        for use in self.spec.workspaces:
            if use.mode == "review":
                stack.push_async_callback(self._close_workspace, use)
        for fd, word in held.items():
            if word != WORKSPACE_LOCK:
                self._hold(stack, fd, word)
        if self.spec.audit:
            for index, use in enumerate(self.spec.workspaces):
                self._add_audit(stack, index, use)
        self._set_aside(stack, held.values())

    def _locks(self) -> tuple[int, ...]:
        held = self._left.held.items()
        return tuple(fd for fd, word in held if word == WORKSPACE_LOCK)

    def _enter_walls(
        self, stack: AsyncExitStack
    ) -> tuple[tuple[tuple[str, str], ...], int]:
        """Take over what it runs in; return (layers with their details, init)."""
        left, machine = self._left.walls, self._host.machine
        if left is None:
            return (), -1
        applied = tuple(left.applied)
        self.walls = Walls(left.profile, left.network, applied, left.missing)
        self.wanted = self._described()
        self.wanted.groups = tuple(left.groups)
        self.wanted.user = left.user
        self.wanted.locks = self._locks()
        self.wanted.readable = self.spec.readable(self.places)
        if self.spec.workspaces:
            from supervisor.workspace.view import show_again  # noqa: PLC0415 - with one

            show_again(self.wanted, self.spec, self._left.held)
        if left.user is not None:
            machine.keep_user(left.user)
            stack.callback(machine.give_user_back, left.user)
        if left.groups:
            self._groups = Groups.of_files(left.groups)
            # Of those the program before has told.
            self.look_at_groups()
            self._refused_before = self._refused_by_groups
            limits = self.spec.group_limits
            self.wanted.processes = self._groups.kept_processes(limits)
            if self._groups.keep_memory(limits):
                self.wanted.kept_memory = limits.memory
            stack.callback(self._host.give_groups_back, self._groups)
        return applied, left.init

    def _enter_session(self, left: SessionState, parent: Session | None) -> Session:
        host, is_over = self._host, left.closed is not None
        above = None if parent is None else parent.client
        ledger = ledger_from(left.client, None if above is None else above.ledger)
        policy = Policy(()) if is_over else self._policies[left.client.policy]
        client = client_from(left.client, policy, ledger, above)
        session = host.open_session(
            client, (left.read_fd, left.write_fd), left.dialect, self.session_closed
        )
        session.on_attach = self._attach
        session.parent = parent
        session.narrowed_places = tuple(self._all_places[n] for n in left.owns)
        if left.closed is not None:
            session.be_over(left.closed)
            return session
        enter_client(host.fs, client)
        host.fs.hold(client, len(session.narrowed_places))
        for file in left.files:
            place = None if file.place is None else self._all_places[file.place]
            enter_file(host.fs, client, file, place)
        if self._nursery is None:
            raise RuntimeError("a child without a nursery has no clients")
        self._nursery.start_soon(session.run)
        self._to_go_on.append((session, left))
        session.nested = [self._enter_session(one, session) for one in left.nested]
        return session

    async def _live(self) -> None:
        left = self._left
        self.state = State(left.state)
        self._grace_s = left.grace_s
        if self.state is State.STOPPING:
            self._is_stopped = True
        for session, was in self._to_go_on:
            take_up(session, was)
            if was.carried is not None:
                self._carry_on(session, *was.carried)
        self._to_go_on.clear()
        self.begun.set()
        if left.timeout_s is not None and not self.timed_out:
            self._timeout_at = trio.current_time() + left.timeout_s
        await self._live_on()

    def _carry_on(self, session: Session, fd: int, reply: bytes) -> None:
        """Go on handing a client the descriptor that its ATTACH has made."""

        async def carry() -> None:
            carried = socket.socket(fileno=fd)
            with self.carrying(carried):
                await self._send_descriptor(session, reply, carried)

        session.start(carry)
