"""Trying what profiles require, before any child is there: one start for each of them.

The part of the check of a configuration that takes a launchpad.

Rules of this file.

1. A process of a trial has nothing of any child's, and becomes no program: where every
   layer goes well, it is the program that fails.
2. What fails for want of something that may be there in a moment (memory, too many
   namespaces) says nothing of the machine: it is told as not tried, and refuses nothing.
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
from supervisor.config.sandbox import not_given
from supervisor.config.walls import requiring
from supervisor.sandbox import groups as sandbox_groups
from supervisor.sandbox import start
from supervisor.sandbox.plan import Machine, Wanted, is_of_the_machine
from supervisor.spawn.launcher import Launcher
from supervisor.spawn.process import LaunchpadLost
from supervisor.spawn.request import SpawnError, SpawnRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from supervisor.config.document import Config
    from supervisor.sandbox.plan import Profile
    from supervisor.spawn.launchpad.start import LaunchpadProcess

_NO_PROGRAM = "/"
"""A directory: nothing that could be executed, by any user."""

GROUPS_S = 1.0
"""How long what a trial has made is waited for to be empty."""

_numbers = itertools.count(1)
"""Of trials of this process: two reloads may be under way."""


class Findings(NamedTuple):
    """What came of trying all profiles of a configuration.

    Attributes:
        faults: what is required and cannot be had.
        untried: (key, why) of what could not be tried.
    """

    faults: tuple[Fault, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()


async def try_profiles(
    launcher: Launcher, machine: Machine, config: Config
) -> Findings:
    """Start something in each profile that requires a layer.

    Args:
        launcher: starts it.
        machine: what is known of it; what it lacks is noted there.
        config: checked.

    Raises:
        LaunchpadLost: no child can be started any more.
    """
    found: dict[tuple[str, str], SpawnError | None] = {}
    faults, untried = [], []
    async with _reserve() as reserve:
        for _, profile, network in requiring(config):
            asked = profile.name, network
            if asked not in found:
                found[asked] = await _try(launcher, machine, reserve, profile, network)
    for key, profile, network in requiring(config):
        why = found[profile.name, network]
        if why is not None and is_of_the_machine(why):
            is_required = why.stage in profile.required
            text = not_given(why.stage, why.reason) if is_required else why.text
            faults.append(Fault(key, text))
        elif why is not None:
            text = f"what it requires could not be tried: {why.stage}: {why.reason}"
            untried.append((key, text))
    return Findings(tuple(faults), tuple(untried))


@asynccontextmanager
async def _reserve() -> AsyncIterator[sandbox_groups.Reserve]:
    """Have what makes groups, and removes them."""
    reserve = sandbox_groups.Reserve()
    try:
        yield reserve
        # Who failed to become a program may still be on its way out of its groups.
        with trio.move_on_after(GROUPS_S):
            while not reserve.tidy():  # noqa: ASYNC110 - the kernel tells nobody
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
    """Put a profile's layers on a process; return what failed that it requires."""
    try:
        await _start(launcher, machine, reserve, profile, network)
    except SpawnError as why:
        return None if why.stage == "exec" else why
    except OSError as why:  # no descriptor, say (rule 2)
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
    """Start what can only fail; what it had is given back.

    Raises:
        SpawnError: always.
        OSError: something of the host's cannot be had for it.
    """
    with ExitStack() as stack:
        groups = reserve.take(f"trial-{next(_numbers)}", Limits())
        stack.callback(reserve.give_back, groups)
        wanted = Wanted(profile, network, "/")
        wanted.groups, wanted.no_groups = groups.procs(), groups.why_not
        if "uid" not in machine.lacking:
            wanted.user = machine.take_user()
            stack.callback(machine.give_user_back, wanted.user)
        top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, top)
        request = SpawnRequest(_NO_PROGRAM, ("-",), {}, top, ())
        process, _ = await start.spawn(launcher, machine, request, wanted)
        process.close()


def try_alone(launchpad: LaunchpadProcess, config: Config) -> Findings:
    """Try the profiles of a configuration where there is no host.

    Args:
        launchpad: for this alone; it has ended afterwards.
        config: checked.
    """
    try:
        return trio.run(_try_alone, launchpad, config)
    except* (LaunchpadLost, OSError) as group:
        why = group.exceptions[0]
    text = f"what it requires could not be tried: {why}"
    return Findings(untried=tuple((key, text) for key, *_ in requiring(config)))


async def _try_alone(launchpad: LaunchpadProcess, config: Config) -> Findings:
    async with trio.open_nursery() as nursery:
        launcher = Launcher(launchpad)
        await nursery.start(launcher.run)
        found = await try_profiles(launcher, Machine(), config)
        nursery.cancel_scope.cancel()
    return found
