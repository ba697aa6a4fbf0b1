"""Starting a tool's process: in all that its child runs in, or as the host runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from supervisor.sandbox import walled

if TYPE_CHECKING:
    from supervisor.spawn_request import SpawnRequest
    from supervisor.spawned import SpawnedProcess
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.routes import SpawnPlan


async def launch(
    owner: ChildExecutions, plan: SpawnPlan, request: SpawnRequest
) -> SpawnedProcess:
    """Start what a plan says, for one child.

    Args:
        owner: the executions of that child.
        plan: what is to be started.
        request: the same, for the launcher.

    Raises:
        SpawnError: it did not start.
        LaunchpadLost: nothing can be started any more.
    """
    host, child = owner.host, owner.child
    wanted = child.wanted
    if not plan.is_walled or wanted is None:
        return await host.launcher.spawn(request)
    # No less than the child has: what cannot be had here refuses the start, and
    # says nothing of the machine, for the workspace may be on any file system.
    kept: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    if child.spec.workspaces:
        from supervisor.workspace.view import unmounted  # noqa: PLC0415 - with one

        kept, programs = unmounted(child.spec, wanted)
    layers = frozenset(name for name, _ in child.walls.applied)
    wanted = replace(
        wanted,
        profile=replace(wanted.profile, layers=layers, required=layers),
        cwd=plan.cwd,
        own=(),
        shared=plan.shared,
        kept=(*plan.kept, *kept),
        programs=(*plan.programs, *programs),
        # Where they are now: a tool may have moved what they lie in.
        hidden=host.apart.locations(child.spec.made_in),
    )
    process, _ = await walled.spawn(host.launcher, host.machine, request, wanted)
    return process
