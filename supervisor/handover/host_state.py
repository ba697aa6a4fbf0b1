"""The state of a host: taken down for the next program, and put together there.

Rules of this file.

1. Taking down is one call, without a checkpoint, before exec(2): what it says is so
   until then. Nothing in the host changes, so that it can go on if the exchange fails.
2. The launcher knows its children before it listens: an exit during the exchange was
   said to the socket, and is heard now.
3. A conversation is served when everything that it may ask for is there again.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from supervisor.children.child import Child
from supervisor.fsproxy.ports import Portable
from supervisor.handover.state import HostState
from supervisor.spawn.launchpad import wire
from vfs.handover import (
    Numbered,
    Numbering,
    counter_state,
    enter_counters,
    place_from,
    policy_from,
)

if TYPE_CHECKING:
    from supervisor.host import Host
    from supervisor.spawn.launcher import Launcher


def snapshot_host(host: Host) -> HostState:
    """Return the state of a host in which nothing moves (``exchange.busy``).

    Raises:
        HandoverError: a part of it cannot be handed over.
    """
    launcher = host.launcher
    launchpad_fd, launchpad_pidfd = launcher.descriptors()
    last_ident, records = launcher.snapshot()
    numbers = Numbering()
    numbers.fds |= {launchpad_fd, launchpad_pidfd}
    children = [child.snapshot(numbers) for child in host.children.values()]
    return HostState(
        generation=host.generation + 1,
        launchpad_pid=launcher.launchpad_pid,
        launchpad_pidfd=launchpad_pidfd,
        launchpad_fd=launchpad_fd,
        last_ident=last_ident,
        next_child=host.next_child,
        counters=counter_state(host.fs),
        records=records,
        places=numbers.places,
        policies=numbers.policies,
        children=children,
        fds=sorted(numbers.fds),
    )


async def restore_host(host: Host, state: HostState) -> list[Child]:
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
    host.next_child = state.next_child
    enter_counters(host.fs, state.counters)
    places = [place_from(place) for place in state.places]
    policies = [policy_from(policy, places) for policy in state.policies]
    numbered = Numbered(places, policies)
    children: list[Child] = []
    for left in state.children:
        child = Child.restore(host, left, numbered, host.children, host.tell_overdue)
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
