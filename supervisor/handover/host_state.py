"""Takes the snapshot of a host for the next program, and restores it there.

Rules of this file.

1. The snapshot is one call without a checkpoint, right before exec(2), and changes
   nothing: the host goes on if the exchange fails.
2. The launcher knows its children before it listens: an exit during the exchange is
   read from the socket afterwards.
3. A conversation is served when all that it may ask for is restored.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from supervisor.children.child import Child
from supervisor.fsproxy.ports import Portable
from supervisor.handover.state import HostState
from supervisor.spawn.launchpad import wire
from vfs.handover import NumberedObjects, Numbering

if TYPE_CHECKING:
    from supervisor.host import Host
    from supervisor.spawn.launcher import Launcher


def snapshot_host(host: Host) -> HostState:
    """Return the state of a host at rest (``exchange.busy``).

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
        counters=host.fs.tables.snapshot(),
        records=records,
        places=numbers.places,
        policies=numbers.policies,
        children=children,
        fds=sorted(numbers.fds),
    )


async def restore_host(host: Host, state: HostState) -> list[Child]:
    """Restore children and tables in a fresh host, and serve the children.

    Args:
        host: its launcher got the same state; its services are open.
        state: of the program before.

    Returns:
        The children; one whose process ended meanwhile may be gone already.

    Raises:
        HandoverError: it cannot be restored; the host should end.
    """
    if host.nursery is None:
        raise RuntimeError("the host is not open")
    host.generation = state.generation
    # Handed-over descriptors are no part of the process's baseline.
    for fd in state.fds:
        host.baseline.descriptors.pop(fd, None)
    host.next_child = state.next_child
    host.fs.tables.restore(state.counters)
    numbered = NumberedObjects.restore(state.places, state.policies)
    children: list[Child] = []
    for left in state.children:
        child = Child.restore(host, left, numbered, host.children, host.on_overdue)
        children.append(child)
        await host.begin(child)
    for service in host.services:
        if isinstance(service, Portable):
            await service.restore_rest()
    await _end_untaken(host.launcher)
    host.fs.tables.sort_files()
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
    """End processes that no part has taken: those of a service that is gone."""
    for ident, record in launcher.handed_over.items():
        if not (record.abandoned or record.exited.is_set()):
            await launcher.send((wire.SIGNAL, ident, int(signal.SIGKILL)))
    launcher.handed_over.clear()
