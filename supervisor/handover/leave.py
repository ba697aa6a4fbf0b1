"""Takes a host's state down, for the program that follows.

Reading; nothing in the host changes, so that it can go on if the exchange fails.

Rules of this file.

1. One call, without a checkpoint, before exec(2): what it says is so until then.
2. Objects that others refer to (places, policies) are numbered; each place is owned by
   one child or session, and others only name it.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from supervisor.children.clients import ATTACHING
from supervisor.handover.session import note_work
from supervisor.handover.state import (
    ChildState,
    HostState,
    RecordState,
    SessionState,
    WallsState,
    text_as_bytes,
)
from vfs.errors import HandoverError
from vfs.handover import (
    PlaceState,
    PolicyState,
    client_state,
    counter_state,
    file_state,
    place_state,
    policy_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.children.child import Child
    from supervisor.fsproxy.session import Session
    from supervisor.host import Host
    from supervisor.spawn.process import SpawnedProcess
    from vfs.policy import Place, Policy

NO_POLICY = -1
"""Of a conversation that is over, while its process goes on."""

T = TypeVar("T")
S = TypeVar("S")


def leave(host: Host) -> HostState:
    """Return the state of a host in which nothing moves (``handover.busy``).

    Raises:
        HandoverError: a part of it cannot be handed over.
    """
    return _Leaving(host).state()


class _Leaving:
    """One host's leave."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._fds: set[int] = set()
        self._places: dict[int, int] = {}  # number by id; policies keep them alive
        self._place_states: list[PlaceState] = []
        self._policies: dict[int, int] = {}
        self._policy_states: list[PolicyState] = []

    def state(self) -> HostState:
        host = self._host
        launcher = host.launcher
        launchpad_fd, launchpad_pidfd = launcher.descriptors()
        self._fds |= {launchpad_fd, launchpad_pidfd}
        children = [self._child(child) for child in host.children.values()]
        return HostState(
            generation=host.generation + 1,
            launchpad_pid=launcher.launchpad_pid,
            launchpad_pidfd=launchpad_pidfd,
            launchpad_fd=launchpad_fd,
            last_ident=launcher._last_ident,
            next_child=next(host._child_ids),
            counters=counter_state(host.fs),
            records=[
                RecordState(
                    ident,
                    record.abandoned,
                    None if record.status is None else astuple(record.status),
                )
                for ident, record in launcher._records.items()
            ],
            places=self._place_states,
            policies=self._policy_states,
            children=children,
            fds=sorted(self._fds),
        )

    def _child(self, child: Child) -> ChildState:
        process, session = child.process, child.session
        if process is None or session is None:
            raise HandoverError(f"{child.id} has no process")
        now = trio.current_time()
        side_fd = -1 if child._side is None else child._side.fileno()
        limited = child.spec.timeout_s is not None
        # What an ATTACH carries belongs to the conversation that it was asked on.
        held = {fd: word for fd, word in child._held.items() if word != ATTACHING}
        self._fds |= {*process.descriptors(), *held}
        if side_fd >= 0:
            self._fds.add(side_fd)
        places = [self._owned(place) for place in child.places]
        door = child._door_socket
        door_fd = -1 if door is None else door.fd
        if door_fd >= 0:
            self._fds.add(door_fd)
        return ChildState(
            id=child.id,
            spec=_plain(child.spec),
            state=child.state.value,
            timed_out=child.timed_out,
            timeout_s=max(0.0, child._timeout_at - now) if limited else None,
            grace_s=max(0.0, min(child._grace_s, child._killed_at - now)),
            ident=process._ident,
            pid=process.pid,
            create_time=process.create_time,
            pidfd=process._pidfd,
            places=places,
            session=self._session(session),
            side_fd=side_fd,
            held=held,
            walls=_walls(child, process),
            door_fd=door_fd,
            door_name="" if door is None else door.name,
        )

    def _session(self, session: Session) -> SessionState:
        client, is_over = session.client, session.is_over
        places = () if is_over else session.narrowed_places  # closed by then
        owns = [self._owned(place) for place in places]
        policy = NO_POLICY if is_over else self._policy(client.policy)
        state = SessionState(
            client=client_state(client, policy),
            dialect=session.dialect,
            read_fd=session.read_fd,
            write_fd=session.write_fd,
            zero_copy=session.outbound.zero_copy,
            is_deep=session.outbound.is_deep,
            requests=session.requests,
            files=[],
            nested=[self._session(nested) for nested in session.nested],
            owns=owns,
            bytes_in=session.bytes_in,
            bytes_out=session.bytes_out,
            errors=session.errors,
            closed=session.why_closed if is_over else None,
        )
        if is_over:
            return state
        for file in client.files.values():
            place = None if file.place is None else self._place(file.place)
            taken = file_state(file, place)
            self._fds.update(taken.descriptors())
            state.files.append(taken)
        note_work(session, state)
        self._fds |= {session.read_fd, session.write_fd}
        if state.body is not None and state.body.spool >= 0:
            self._fds.add(state.body.spool)
        if state.carried is not None:
            self._fds.add(state.carried[0])
        return state

    def _owned(self, place: Place) -> int:
        """Number a place whose owner is handed over, with its descriptor."""
        self._fds.update(place.backend.descriptors())
        return self._place(place)

    def _place(self, place: Place) -> int:
        return _number(self._places, self._place_states, place, place_state)

    def _policy(self, policy: Policy) -> int:
        def take(policy: Policy) -> PolicyState:
            places = [self._place(place) for place in policy.places]
            root = None if policy.root is None else self._place(policy.root)
            return policy_state(policy, places, root)

        return _number(self._policies, self._policy_states, policy, take)


def _number(
    numbers: dict[int, int], states: list[S], thing: T, take: Callable[[T], S]
) -> int:
    """Return the number of an object, which is taken down when it is met first."""
    number = numbers.get(id(thing))
    if number is None:
        state = take(thing)
        number = numbers[id(thing)] = len(states)
        states.append(state)
    return number


def _walls(child: Child, process: SpawnedProcess) -> WallsState:
    walls, wanted = child.walls, child.wanted
    return WallsState(
        profile=walls.profile,
        network=walls.network,
        applied=list(walls.applied),
        missing=dict(walls.missing),
        init=process.init,
        user=None if wanted is None else wanted.user,
        groups=[] if wanted is None else list(wanted.groups),
    )


def _plain(spec: object) -> dict[bytes, object]:
    """Return a description of a child as plain values with bytes for text."""
    try:
        plain = text_as_bytes(msgspec.to_builtins(spec))
    except TypeError as why:
        raise HandoverError(f"cannot hand a child over: {why}") from None
    if not isinstance(plain, dict):
        raise HandoverError("cannot hand a child over: its description is no record")
    return plain
