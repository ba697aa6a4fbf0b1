"""Starting a child in its sandbox: asking for layers, and again without what is lacking.

What it is: the one road from a profile to a process, for the host and for a relay.
What it is not: the rules of that (``sandbox``), nor the launchpad's messages.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.sandbox import Plan, Walls, layers_on_the_wire
from supervisor.spawn_request import SpawnError

if TYPE_CHECKING:
    from supervisor.launcher import Launcher, SpawnedProcess
    from supervisor.sandbox import Machine, Profile
    from supervisor.spawn_request import SpawnRequest


@dataclass(slots=True)
class Wanted:
    """What a child is to run in.

    Attributes:
        profile: the layers.
        network: ``none`` or ``host``.
        cwd: its working directory, as a path.
        own: directories of its own, to write.
        groups: files of its cgroups that take its pid; they are there.
        no_groups: why there is none, if one was wanted.
        user: a user that may be given to it, None for none.
    """

    profile: Profile
    network: str
    cwd: str
    own: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    no_groups: str = ""
    user: int | None = None


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
        layers = plan.wanted()
        if "cgroup" in layers and not wanted.groups:
            plan.leave(layers, "cgroup", wanted.no_groups)
        user = wanted.user if "uid" in layers else None
        if wanted.user is not None:
            give(wanted.own, os.geteuid() if user is None else user)
        asked = layers_on_the_wire(
            layers,
            executable=request.executable,
            cwd=wanted.cwd,
            own=wanted.own,
            network=wanted.network,
            user=user,
            groups=wanted.groups if "cgroup" in layers else (),
        )
        rlimits = request.rlimits
        if "rlimits" in layers:
            asked["rlimits"] = None
            rlimits = ((resource.RLIMIT_CORE, 0, 0), *rlimits)
        try:
            attempt = replace(request, layers=asked, rlimits=rlimits)
            process = await launcher.spawn(attempt)
        except SpawnError as why:
            if not plan.failed(why):
                raise
        else:
            walls = Walls(wanted.profile.name, wanted.network, process.applied)
            walls.missing = plan.missing
            return process, walls


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
