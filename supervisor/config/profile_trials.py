"""Trials of the layers that profiles require: one start for each profile.

The part of checking a configuration that needs a launchpad.

Rules of this file.

1. The process of a trial has nothing of a child and becomes no program: if every layer
   succeeds, the exec fails.
2. A failure for want of a temporary resource (memory, too many namespaces) says nothing
   of the machine: it is reported as not tried, and refuses nothing.
"""

from __future__ import annotations

import errno
import itertools
import os
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import trio

from hostlib.user_values import Limits
from supervisor.config.read import Fault
from supervisor.config.sandbox import unavailable_phrase
from supervisor.config.walls import find_required_profiles
from supervisor.sandbox import groups as sandbox_groups
from supervisor.sandbox import start
from supervisor.sandbox.plan import Machine, WantedWalls, is_of_the_machine
from supervisor.sandbox.shown_files import ShownFiles
from supervisor.spawn.launcher import Launcher
from supervisor.spawn.process import LaunchpadLost
from supervisor.spawn.request import SpawnError, SpawnRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from supervisor.config.document import Config
    from supervisor.sandbox.plan import Profile
    from supervisor.spawn.launchpad.start import LaunchpadProcess

_NO_PROGRAM = "/"
"""A directory: it cannot be executed by any user."""

GROUPS_S = 1.0
"""Longest wait until the groups of a trial are empty."""

_numbers = itertools.count(1)
"""Number of trials in this process: two reloads may run at the same time."""


class Findings(NamedTuple):
    """The results of trying all profiles of a configuration.

    Attributes:
        faults: required layers that are not available.
        untried: (key, reason) of those that could not be tried.
    """

    faults: tuple[Fault, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()


async def try_profiles(
    launcher: Launcher, machine: Machine, config: Config
) -> Findings:
    """Start a process in each profile that requires a layer.

    Args:
        launcher: starts them.
        machine: records the layers that are lacking.
        config: checked.

    Raises:
        LaunchpadLost: no child can be started any more.
    """
    found: dict[tuple[str, str], SpawnError | None] = {}
    faults, untried = [], []
    async with _reserve() as reserve:
        for _, profile, network in find_required_profiles(config):
            asked = profile.name, network
            if asked not in found:
                found[asked] = await _try(launcher, machine, reserve, profile, network)
    for key, profile, network in find_required_profiles(config):
        why = found[profile.name, network]
        if why is not None and is_of_the_machine(why):
            is_required = why.stage in profile.required
            text = (
                unavailable_phrase(why.stage, why.reason) if is_required else why.text
            )
            faults.append(Fault(key, text))
        elif why is not None:
            text = f"what it requires could not be tried: {why.stage}: {why.reason}"
            untried.append((key, text))
    return Findings(tuple(faults), tuple(untried))


@asynccontextmanager
async def _reserve() -> AsyncIterator[sandbox_groups.Reserve]:
    """Yield the maker of groups, and remove the groups afterwards."""
    reserve = sandbox_groups.Reserve()
    try:
        yield reserve
        # A process that failed to exec may still be in its groups.
        with trio.move_on_after(GROUPS_S):
            while not reserve.tidy():  # noqa: ASYNC110 - the kernel has no event for it
                await trio.sleep(0.005)
    finally:
        reserve.close()


async def _try(
    launcher: Launcher,
    machine: Machine,
    reserve: sandbox_groups.Reserve,
    profile: Profile,
    network: str,
) -> SpawnError | None:
    """Put a profile's layers on a process; return the failure of a required one."""
    try:
        await _start(launcher, machine, reserve, profile, network)
    except SpawnError as why:
        return None if why.stage == "exec" else why
    except OSError as why:  # no descriptor, for example (rule 2)
        reason = why.strerror or str(why)
        return SpawnError(why.errno or errno.EIO, "request", reason, reason)
    raise AssertionError("a directory was executed")


async def _start(
    launcher: Launcher,
    machine: Machine,
    reserve: sandbox_groups.Reserve,
    profile: Profile,
    network: str,
) -> None:
    """Start a process that can only fail, and give its resources back.

    Raises:
        SpawnError: always.
        OSError: a resource of the host is missing.
    """
    with ExitStack() as stack:
        groups = reserve.take(f"trial-{next(_numbers)}", Limits())
        stack.callback(reserve.give_back, groups)
        wanted = WantedWalls(profile, network, ShownFiles("/"), groups.bounds(Limits()))
        if "uid" not in machine.lacking:
            wanted.user = machine.take_user()
            stack.callback(machine.give_user_back, wanted.user)
        top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, top)
        request = SpawnRequest(_NO_PROGRAM, ("-",), {}, top, ())
        process, _ = await start.spawn(launcher, machine, request, wanted)
        process.close()


def try_alone(launchpad: LaunchpadProcess, config: Config) -> Findings:
    """Try the profiles of a configuration without a host.

    Args:
        launchpad: used for this only; it has ended afterwards.
        config: checked.
    """
    try:
        return trio.run(_try_alone, launchpad, config)
    except* (LaunchpadLost, OSError) as group:
        why = group.exceptions[0]
    text = f"what it requires could not be tried: {why}"
    return Findings(
        untried=tuple((key, text) for key, *_ in find_required_profiles(config))
    )


async def _try_alone(launchpad: LaunchpadProcess, config: Config) -> Findings:
    async with trio.open_nursery() as nursery:
        launcher = Launcher(launchpad)
        await nursery.start(launcher.run)
        found = await try_profiles(launcher, Machine(), config)
        nursery.cancel_scope.cancel()
    return found
