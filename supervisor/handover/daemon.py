"""What a daemon hands to its next program beside the host: names, logs, locks, sockets.

Kept children with their restarts, their pipes and directories; the lock and the control
socket.

Rules of this file.

1. A child goes on under the section that it was started by; what the next program finds
   in the configuration is made so afterwards, as by a reload.
2. Times are handed over as what is left or has passed: no two programs count alike.
3. What a child said and nobody has read yet is in its pipe, and stays there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from supervisor.children.specs import ChildOptions
from supervisor.config.child import ChildSection
from supervisor.kept_children.kept_child import FINAL, Kept
from supervisor.sandbox.scratch import Scratch, ScratchState
from supervisor.spawn.restarts import Phase
from vfs.errors import HandoverError
from vfs.handover import bytes_as_text, state_from, text_as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from supervisor.children.child import Child
    from supervisor.config.directories import Locks
    from supervisor.control.server import Orders
    from supervisor.handover.state import HostState
    from supervisor.kept_children.roster import Children


class RestartsState(msgspec.Struct):
    """See ``Restarts``; ages in seconds."""

    total: int
    in_a_row: int
    age_s: float
    recent_ages_s: list[float]


class KeptState(msgspec.Struct):
    """A kept child.

    Attributes:
        section, options: what it is, as plain values with bytes for text.
        output_fd, error_fd: its pipes; -1 for one that it has closed, and for stderr of a
            child that an older program started, which has one pipe for both.
        child_id: of its process; None between two.
        wait_s: until the restart that is due.
    """

    name: str
    section: Any
    options: Any
    phase: str
    reason: str | None
    status: int | None
    configured: bool
    restarts: RestartsState
    dropped_bytes: int
    child_id: str | None = None
    scratch: ScratchState | None = None
    output_fd: int = -1
    error_fd: int = -1
    wait_s: float = 0.0


class DaemonState(msgspec.Struct):
    """A daemon, beside its host.

    Attributes:
        listener_identity: what tells the control socket's file from others, if that is
            the host's own.
    """

    lock_fd: int
    state_lock_fd: int
    listener_fd: int
    listener_identity: tuple[int, int] | None
    kept: list[KeptState]


def left_of(state: HostState | None) -> DaemonState | None:
    """Return what the daemon before has left; None if none was.

    Raises:
        HandoverError: it is another program's.
    """
    if state is None:
        return None
    return state_from(state.more, DaemonState, "the daemon")


# Taking down


@dataclass(slots=True)
class DaemonSurroundings:
    """A daemon's parts around its host; see ``handover.Surroundings``.

    Attributes:
        children: the kept ones.
        orders: of the control socket.
        locks: of the directories.
        stopping: tells whether the daemon is about to end.
        variables: for the next program's environment.
    """

    children: Children
    orders: Orders
    locks: Locks
    stopping: Callable[[], bool]
    variables: dict[str, str]

    def busy(self) -> str | None:
        """Say what has to end before; None if nothing has."""
        if self.stopping():
            return "the daemon is stopping"
        if self.children._reloading.locked():
            return "the configuration is being reloaded"
        for kept in self.children:
            if not _is_at_rest(kept):
                return f"child {kept.name} is being started or cleaned up"
        return None

    def hand_over(self) -> tuple[dict[str, object], Collection[int]]:
        """Return its state as plain values, and its descriptors; change nothing."""
        if self.orders.listener is None:
            raise HandoverError("the control socket is not served yet")
        listener_fd, identity = self.orders.listener
        state = DaemonState(
            lock_fd=self.locks.runtime,
            state_lock_fd=self.locks.state,
            listener_fd=listener_fd,
            listener_identity=identity,
            kept=[_kept_state(kept) for kept in self.children],
        )
        fds = {*self.locks, listener_fd}
        for kept in state.kept:
            if kept.scratch is not None:
                fds |= {kept.scratch.fd, kept.output_fd, kept.error_fd} - {-1}
        return msgspec.to_builtins(state, builtin_types=(bytes,)), fds

    def environment(self) -> dict[str, str]:
        """Return what the next program finds in its environment beside the host's."""
        return self.variables


def _is_at_rest(kept: Kept) -> bool:
    if kept.settled.is_set():
        return True
    if kept.phase is Phase.BACKING_OFF:
        return kept._due_at > trio.current_time() and not kept._held
    child = kept.child
    return child is not None and not child.gone.is_set() and len(kept._held) == 2


def _kept_state(kept: Kept) -> KeptState:
    restarts = kept.restarts
    now = restarts._clock()
    state = KeptState(
        name=kept.name,
        section=text_as_bytes(msgspec.to_builtins(kept.section)),
        options=text_as_bytes(msgspec.to_builtins(kept.options)),
        phase=kept.phase.value,
        reason=kept.reason,
        status=kept.status,
        configured=kept.configured,
        restarts=RestartsState(
            restarts.total,
            restarts._in_a_row,
            now - restarts._started,
            [now - then for then in restarts._recent],
        ),
        dropped_bytes=kept.log.segments.dropped_bytes,
    )
    if kept.settled.is_set():
        return state
    if kept.child is None:
        state.wait_s = max(0.0, kept._due_at - now)
        return state
    state.child_id = kept.child.id
    for held in kept._held:
        if isinstance(held, Scratch):
            state.scratch = held.snapshot()
        else:
            state.output_fd, state.error_fd = held.fds
    return state


# Putting together


def take_over(
    children: Children, left: Iterable[KeptState], entered: Iterable[Child]
) -> None:
    """Put kept children back, each with its process or its next restart.

    Args:
        children: of the next daemon; has none yet.
        left: what was taken down.
        entered: the host's children, from ``handover_enter.enter``.

    Raises:
        HandoverError: this program has no such children.
    """
    by_id = {child.id: child for child in entered}
    for state in left:
        section, options = _plan_of(state)
        child = None if state.child_id is None else by_id[state.child_id]
        kept = EnteredKept(children, state, section, options, child)
        children._kept[kept.name] = kept
        if not kept.settled.is_set():
            children._nursery.start_soon(children._run, kept, [])


def _plan_of(state: KeptState) -> tuple[ChildSection, ChildOptions]:
    try:
        return (
            msgspec.convert(bytes_as_text(state.section), ChildSection),
            msgspec.convert(bytes_as_text(state.options), ChildOptions),
        )
    except msgspec.ValidationError as why:
        text = f"cannot take child {state.name} over: {why}"
        raise HandoverError(text) from None


class EnteredKept(Kept):
    """A kept child that the program before has kept.

    Args:
        children: keeps it from now on.
        left: what was taken down.
        section: what it is.
        options: what it is.
        child: its process now; None between two.
    """

    def __init__(
        self,
        children: Children,
        left: KeptState,
        section: ChildSection,
        options: ChildOptions,
        child: Child | None,
    ) -> None:
        log = children.open_log(left.name, section)
        host, shared = children._host, children._shared
        super().__init__(host, left.name, section, options, log, shared)
        self.phase = Phase(left.phase)
        self.reason = left.reason
        self.status = left.status
        self.configured = left.configured
        self.log.segments.dropped_bytes = left.dropped_bytes
        self.begun.set()
        if self.phase not in FINAL:
            self.settled = trio.Event()
        # Known before its task begins: who asks it to end meanwhile finds it.
        self.child = child
        self._left: KeptState | None = left
        self._scratch = None if left.scratch is None else Scratch.restore(left.scratch)
        restarts, now = self.restarts, self.restarts._clock()
        restarts.total = left.restarts.total
        restarts._in_a_row = left.restarts.in_a_row
        restarts._started = now - left.restarts.age_s
        restarts._recent = deque(now - age for age in left.restarts.recent_ages_s)

    async def run(self, after: Iterable[Kept]) -> None:
        """Own it from where it was to its last end."""
        left, self._left = self._left, None
        if left is None or left.phase in {phase.value for phase in FINAL}:
            await super().run(after)
            return
        try:
            if self.child is not None:
                comes_back = await self._comes_back(
                    await self._end_of(left, self.child)
                )
            else:
                comes_back = await self._wait(left.wait_s)
            if comes_back:
                await self._rounds()
        finally:
            self.begun.set()
            self.ended.set()
            self.settled.set()

    async def _end_of(self, left: KeptState, child: Child) -> int:
        """Wait for the end of the process that runs."""
        if self._scratch is None:
            raise HandoverError(f"child {self.name} has no directories")
        pipes = self._capturing(left.output_fd, left.error_fd)
        async with self._holding(self._scratch), pipes:
            return await self._live(child)
