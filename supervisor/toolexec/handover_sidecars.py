"""Sidecars, handed from one program of a host to the next: their processes go on.

Rules of this file.

1. A sidecar goes on if it is configured as it was; one that is configured otherwise by
   now is ended, as nobody takes its process, and started anew.
2. One that is between two starts is started at once by the next program.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from supervisor.scratch import Scratch, ScratchState
from supervisor.spawned import ProcessState  # noqa: TC001 - msgspec
from vfs.handover import state_from

if TYPE_CHECKING:
    from supervisor.parts import Parts
    from supervisor.spawned import SpawnedProcess
    from supervisor.toolexec.sidecars import Sidecar, Sidecars


class SidecarState(msgspec.Struct):
    """A sidecar with a process; ``section`` is its configuration as plain values."""

    section: Any
    generation: int
    process: ProcessState
    user: int | None


class SidecarsState(msgspec.Struct):
    """Those with a process, by name, and their directory."""

    state: ScratchState | None = None
    running: dict[str, SidecarState] = {}

    def scratch(self) -> Scratch | None:
        """Return their directory."""
        return None if self.state is None else Scratch.restore(self.state)

    def process_of(self, sidecar: Sidecar, host: Parts) -> SpawnedProcess | None:
        """Return the process of a sidecar that is what it was; None: start one."""
        left = self.running.get(sidecar.name)
        if left is None or left.section != msgspec.to_builtins(sidecar.section):
            return None
        del self.running[sidecar.name]
        sidecar.generation = left.generation
        if left.user is not None:
            host.machine.keep_user(left.user)
            sidecar.user = left.user
        return host.launcher.restore_process(left.process)

    def close_untaken(self) -> None:
        """Let go of the others; the host ends what nobody has taken."""
        while self.running:
            os.close(self.running.popitem()[1].process.pidfd)


def read(left: object) -> SidecarsState:
    """Return what was handed over.

    Raises:
        HandoverError: it is another program's.
    """
    if left is None:
        return SidecarsState()
    return state_from(left, SidecarsState, "the sidecars")


def busy(sidecars: Sidecars) -> str | None:
    """Say what has to end first."""
    for sidecar in sidecars.sidecars:
        if sidecar.is_moving:
            return f"sidecar {sidecar.name} is being started or ended"
        if sidecar.is_asking:
            return f"the engine of sidecar {sidecar.name} is being asked"
    return None


def hand_over(sidecars: Sidecars) -> tuple[object, set[int]]:
    """Return their state as plain values, and its descriptors."""
    left, fds = SidecarsState(), set()
    if sidecars.state is not None:
        left.state = sidecars.state.snapshot()
        fds.add(left.state.fd)
    for sidecar in sidecars.sidecars:
        if sidecar.process is not None:
            process = sidecar.process.snapshot()
            section = msgspec.to_builtins(sidecar.section)
            left.running[sidecar.name] = SidecarState(
                section, sidecar.generation, process, sidecar.user
            )
            fds.add(process.pidfd)
    return msgspec.to_builtins(left, builtin_types=(bytes,)), fds
