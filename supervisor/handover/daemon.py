"""A daemon's part of the hand-over: kept children, logs, locks, sockets.

Kept children with their restarts, pipes and directories; the locks and the control
socket. Unread output of a child stays in its pipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hostlib.handover import HandoverError, state_from
from supervisor.kept_children.kept_state import KeptChildState  # noqa: TC001 - msgspec looks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from supervisor.config.directories import Locks
    from supervisor.control.server import Orders
    from supervisor.handover.state import HostState
    from supervisor.kept_children.roster import Children


class DaemonState(msgspec.Struct):
    """The state of a daemon beside its host.

    Attributes:
        listener_identity: identifies the control socket's file, if the host made it.
    """

    lock_fd: int
    state_lock_fd: int
    listener_fd: int
    listener_identity: tuple[int, int] | None
    kept: list[KeptChildState]


def daemon_state(state: HostState | None) -> DaemonState | None:
    """Return the state of the daemon before; None without one.

    Raises:
        HandoverError: another program has written it.
    """
    if state is None:
        return None
    return state_from(state.more, DaemonState, "the daemon")


# Snapshot


@dataclass(slots=True)
class DaemonSurroundings:
    """A daemon's parts around its host, which are handed over with it.

    Attributes:
        children: the kept ones.
        orders: of the control socket.
        locks: of the directories.
        stopping: returns whether the daemon is about to end.
        variables: for the next program's environment.
    """

    children: Children
    orders: Orders
    locks: Locks
    stopping: Callable[[], bool]
    variables: dict[str, str]

    def busy(self) -> str | None:
        """Return what must end first; None if the daemon is at rest."""
        if self.stopping():
            return "the daemon is stopping"
        if self.children.is_reloading:
            return "the configuration is being reloaded"
        for kept in self.children:
            if not kept.is_at_rest:
                return f"child {kept.name} is being started or cleaned up"
        return None

    def snapshot(self) -> tuple[dict[str, object], Collection[int]]:
        """Return its state as plain values, and its descriptors; changes nothing."""
        if self.orders.listener is None:
            raise HandoverError("the control socket is not served yet")
        listener_fd, identity = self.orders.listener
        state = DaemonState(
            lock_fd=self.locks.runtime,
            state_lock_fd=self.locks.state,
            listener_fd=listener_fd,
            listener_identity=identity,
            kept=[kept.snapshot() for kept in self.children],
        )
        fds = {*self.locks, listener_fd}
        for kept in state.kept:
            fds |= kept.descriptors()
        return msgspec.to_builtins(state, builtin_types=(bytes,)), fds
