"""Starting a child in its sandbox: asking for layers, and again without what is lacking.

What it is: the one road from a profile to a process, for the host and for a relay.
What it is not: the rules of that (``sandbox``), nor the launchpad's messages.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.sandbox import Plan, Walls, Wanted, layers_on_the_wire
from supervisor.spawn_request import SpawnError

if TYPE_CHECKING:
    from supervisor.launcher import Launcher
    from supervisor.sandbox import Machine
    from supervisor.spawn_request import SpawnRequest
    from supervisor.spawned import SpawnedProcess


async def spawn(
    launcher: Launcher, machine: Machine, request: SpawnRequest, wanted: Wanted
) -> tuple[SpawnedProcess, Walls]:
    """Start a child in as much as its profile asks for and this machine gives.

    Raises:
        SpawnError: it cannot be started, or not in what is required.
        LaunchpadLost: no child can be started any more.

    Cancellation: as ``Launcher.spawn``.
    """
    if not wanted.profile.layers:
        process = await launcher.spawn(request)
        return process, Walls(wanted.profile.name, "host", process.applied)
    plan = Plan(wanted.profile, wanted.network, machine)
    while True:
        try:
            process = await launcher.spawn(_attempt(plan, request, wanted))
        except SpawnError as why:
            if not plan.failed(why):
                raise
        else:
            return process, _walls_of(plan, wanted, process)


def _walls_of(plan: Plan, wanted: Wanted, process: SpawnedProcess) -> Walls:
    """Say what a child runs in; its network is none only if something keeps it so."""
    walls = Walls(wanted.profile.name, wanted.network, process.applied, plan.missing)
    if (
        wanted.network == "none"
        and not {"netns", "seccomp"} & dict(walls.applied).keys()
    ):
        walls.network = "host"
        walls.missing["network"] = "takes the layer netns or the layer seccomp"
    return walls


def _attempt(plan: Plan, request: SpawnRequest, wanted: Wanted) -> SpawnRequest:
    """Return a request with what is thought to be had at the moment."""
    layers = plan.wanted()
    if not wanted.groups:
        plan.leave(layers, "cgroup", wanted.no_groups)
    if wanted.user is None:
        plan.leave(layers, "uid", "a nested child has its parent's user")
    else:
        give(wanted.own, wanted.user if "uid" in layers else os.geteuid())
    rlimits = request.rlimits
    if "rlimits" in layers:
        rlimits = ((resource.RLIMIT_CORE, 0, 0), *rlimits)
    asked = layers_on_the_wire(layers, wanted, request.executable)
    return replace(request, layers=asked, rlimits=rlimits)


def give(directories: tuple[str, ...], user: int) -> None:
    """Make directories, and what is in them, a user's own.

    Raises:
        OSError: a directory is gone, or this process is not root.
    """
    for top in directories:
        os.chown(top, user, user)
        for where, inner, files in os.walk(top):
            for name in (*inner, *files):
                with contextlib.suppress(FileNotFoundError):
                    os.lchown(Path(where, name), user, user)
