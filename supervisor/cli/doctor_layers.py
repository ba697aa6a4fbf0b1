"""The walls of a child on this machine, tried with a start.

Starts a child under the profile ``auto`` that does nothing, and makes a table of its
layers.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from supervisor.sandbox.plan import (
    AUTO,
    LAYERS,
    PROFILES,
    Machine,
    Walls,
    WantedWalls,
    make_profile,
)
from supervisor.spawn.request import SpawnError, SpawnRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from supervisor.spawn.launchpad.start import LaunchpadProcess
    from supervisor.spawn.process import SpawnedProcess

PRESENT, MISSING, UNKNOWN = "present", "missing", "unknown"
NOT_NEEDED = "not needed"


_AS_ROOT = make_profile(AUTO, LAYERS.keys() - {"uid"})
"""The layers of the table where ``auto`` starts no child for want of a user."""


def try_layers() -> tuple[Walls | None, str]:
    """Start a child with all layers that are available.

    Returns:
        Its walls; and why no child can be started under ``auto``, "" if one can. Where
        root has no user for it, the walls of a child without one.
    """
    import trio  # noqa: PLC0415 - the report on leaks needs none

    from supervisor.spawn.launchpad.start import start_launchpad  # noqa: PLC0415
    from supervisor.spawn.process import LaunchpadLost  # noqa: PLC0415

    try:
        launchpad = start_launchpad()
    except OSError as error:
        return None, f"cannot start the launchpad: {error.strerror}"
    try:
        return trio.run(_try, launchpad)
    except* (SpawnError, LaunchpadLost, OSError) as group:
        why = _first(group)
    return None, why


def rows(walls: Walls | None, why_none: str = "") -> list[dict[str, str]]:
    """Return the table: layer, state, detail and remedy."""
    found = []
    applied = dict(walls.applied) if walls is not None else {}
    missing = walls.missing if walls is not None else {}
    for layer, takes in LAYERS.items():
        if layer in applied:
            state, detail = PRESENT, applied[layer]
        elif layer in missing:
            state, detail = MISSING, missing[layer]
        elif walls is None:
            state, detail = UNKNOWN, why_none
        else:
            state, detail = NOT_NEEDED, "root makes namespaces without one"
        found.append({"layer": layer, "state": state, "detail": detail, "takes": takes})
    return found


async def _try(launchpad: LaunchpadProcess) -> tuple[Walls, str]:
    import trio  # noqa: PLC0415

    from hostlib.linux.cgroup_files import describe_bounds  # noqa: PLC0415
    from hostlib.user_values import Limits  # noqa: PLC0415
    from supervisor.sandbox import groups, start  # noqa: PLC0415
    from supervisor.sandbox.scratch import Scratch  # noqa: PLC0415
    from supervisor.sandbox.shown_files import ShownFiles  # noqa: PLC0415
    from supervisor.spawn.launcher import Launcher  # noqa: PLC0415

    scratch = Scratch(None)
    # Each bound is tried; a group that cannot be bounded is not used.
    limits = Limits(memory=1 << 40, processes=1 << 15, cpus=0.5)
    made = groups.make("doctor", limits)
    bounded = describe_bounds(made.made)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    cwd = os.open(scratch.tmp, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        async with trio.open_nursery() as nursery:
            launcher = Launcher(launchpad)
            await nursery.start(launcher.run)
            machine = Machine()
            files = ShownFiles(scratch.tmp, own=(scratch.tmp, scratch.run))
            wanted = WantedWalls(PROFILES["auto"], "none", files, made.bounds(Limits()))
            if "uid" not in machine.lacking:
                wanted.user = machine.take_user()
            argv = (sys.executable, "-I", "-S", "-c", "")
            fds = tuple((null, number) for number in range(3))
            request = SpawnRequest(sys.executable, argv, {}, cwd, fds)
            spawned = partial(start.spawn, launcher, machine, request, wanted)
            process, walls, refused = await _spawn_with_or_without_user(spawned, wanted)
            status = await process.wait_exit()
            await process.wait_swept()
            process.close()
            nursery.cancel_scope.cancel()
        if status.code != 0:
            raise OSError(f"a child under auto ended with {status}")
        walls.applied = tuple(
            (layer, f"{said}: {bounded}" if layer == "cgroup" else said)
            for layer, said in walls.applied
        )
        return walls, refused
    finally:
        os.close(null)
        os.close(cwd)
        made.remove()
        await scratch.remove()


async def _spawn_with_or_without_user(
    spawn: Callable[[], Awaitable[tuple[SpawnedProcess, Walls]]], wanted: WantedWalls
) -> tuple[SpawnedProcess, Walls, str]:
    """Start it; without a user if root has none for it, with the reason."""
    try:
        return *(await spawn()), ""
    except SpawnError as why:
        if why.stage != "uid":
            raise
        refused = why
    wanted.profile = _AS_ROOT
    process, walls = await spawn()
    walls.missing["uid"] = refused.reason
    return process, walls, refused.text


def _first(group: BaseExceptionGroup[BaseException]) -> str:
    why: BaseException = group
    while isinstance(why, BaseExceptionGroup):
        why = why.exceptions[0]
    return str(why)
