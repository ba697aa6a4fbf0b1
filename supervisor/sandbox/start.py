"""Starts a child in its sandbox, and again without layers that are missing."""

# ruff: noqa: PTH110, PTH115, PTH118, PTH120 - what is asked for is text
from __future__ import annotations

import os
import resource
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from hostlib.messages import remedy
from hostlib.threads import in_thread
from supervisor.sandbox import ownership
from supervisor.sandbox.forecast import keeps_network
from supervisor.sandbox.groups import is_held
from supervisor.sandbox.links import LINKS
from supervisor.sandbox.orders import common_layers, layers_on_the_wire
from supervisor.sandbox.plan import (
    KEEP_NETWORK,
    OF_PATHS,
    SERVES_NETWORK,
    Plan,
    Walls,
    WantedWalls,
    is_of_the_machine,
    not_served,
)
from supervisor.sandbox.refusals import (
    ASK_DOCTOR,
    LEAVES_GROUPS,
    cpus_not_kept,
    failed_for_paths,
    internal_error,
    no_workspace,
)
from supervisor.spawn.launchpad.layers.fresh_root import HIDE, IF_POSSIBLE
from supervisor.spawn.request import SpawnError, SpawnRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    import trio

    from supervisor.sandbox.plan import Machine, Profile
    from supervisor.sandbox.shown_files import ShownMount
    from supervisor.spawn.launcher import Launcher
    from supervisor.spawn.launchpad.layers.fresh_root import Tree
    from supervisor.spawn.process import SpawnedProcess

PROCESSES, MEMORY = "limit of processes", "limit of memory of all its processes"
OWN_DIRECTORIES, LISTENER = "own directories", "listener on its loopback"
READ_ONLY = "read-only mount"
"""Parts that are no layers, and are reported missing all the same: limits; a way to
TMPDIR and to the sockets of services; a service's port in its net namespace; a
workspace that is to be read."""

NO_LAYERS = (PROCESSES, MEMORY, OWN_DIRECTORIES, LISTENER, READ_ONLY)

NO_MOUNTNS = "its profile has no layer 'mountns'"

HOLD = "hold of its groups"
"""Named in the report alone: the limits that miss it have warnings of their own."""
ADDRESSES = "judgement of addresses"
"""Named in the report alone: with `upstream` that proxy judges addresses (spec NET8)."""


_OF_THE_LISTENER = "listener"
"""The step in which a child makes that one."""


async def spawn(
    launcher: Launcher,
    machine: Machine,
    request: SpawnRequest,
    wanted: WantedWalls,
    *,
    share: trio.CapacityLimiter | None = None,
) -> tuple[SpawnedProcess, Walls]:
    """Start a child in as much as its profile asks for and this machine gives.

    Args:
        launcher: starts it.
        machine: the layers that this machine gives.
        request: its program.
        wanted: its walls.
        share: bounds the threads that look at what is a child's own; None for no bound.

    Raises:
        SpawnError: it cannot be started, or not in what is required.
        LaunchpadLost: no child can be started any more.

    Cancellation: as ``Launcher.spawn``.
    """
    if not wanted.profile.layers:
        return await _spawn_without_walls(launcher, request, wanted)
    plan = Plan(wanted.profile, wanted.network, machine)
    unheard: dict[str, str] = {}
    while True:
        attempt = await _attempt(plan, request, wanted, share)
        _check_mounts(plan, attempt, wanted)
        try:
            with _copies(wanted.files.mounts) as mounts:
                attempt = replace(
                    attempt, mounts=mounts, locks=wanted.locks, joined=wanted.joined
                )
                process = await launcher.spawn(attempt)
        except SpawnError as why:
            _forget_sent(attempt)
            # No wall: nothing is open without it.
            if why.stage == _OF_THE_LISTENER and not wanted.is_served:
                how = instead_of_listener(wanted.profile)
                unheard[LISTENER] = f"it cannot be made: {why.reason}; {how}"
                request = replace(request, listener=None)
                continue
            if not is_of_the_machine(why):
                if why.missing.startswith("/") and attempt.layers:
                    raise await in_thread(
                        _add_remedy, why, wanted, share=share
                    ) from None
                raise
            await _do_without(launcher, plan, attempt, why, wanted.files.paths)
        else:
            walls = _walls_of(plan, wanted, process)
            walls.missing.update(_unkept(attempt, wanted))
            walls.missing.update(unheard)
            walls.missing.update(_report_unreceived(attempt))
            return process, walls


async def _spawn_without_walls(
    launcher: Launcher, request: SpawnRequest, wanted: WantedWalls
) -> tuple[SpawnedProcess, Walls]:
    if wanted.is_served:
        raise not_served("netns", "sandbox 'none' makes no namespaces")
    _stay_root(wanted)
    process = await launcher.spawn(request)
    walls = Walls(wanted.profile.name, "host", process.applied)
    walls.missing.update(_unkept(request, wanted))
    return process, walls


def _forget_sent(attempt: SpawnRequest) -> None:
    """Close what a child has sent that did not start."""
    for sent in (attempt.listener, attempt.sends):
        if sent is not None:
            sent.close_received()


def _add_remedy(error: SpawnError, wanted: WantedWalls) -> SpawnError:
    """Say what to expose, where the host has what a program does not find."""
    path = error.missing
    for _ in range(LINKS):  # of a workspace, what the child has made is a link as well
        try:
            target = os.readlink(wanted.files.shown(path))
        except OSError:
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))
    if wanted.files.mount_of(path) is not None or not os.path.exists(path):
        return error
    prefix, kind = os.path.split(os.path.dirname(path))
    what = prefix if kind == "bin" and prefix != "/" else path
    text = f"{error.text}; show it by --expose {what!r}"
    return SpawnError(error.errno, error.stage, text, error.reason)


def _check_mounts(plan: Plan, attempt: SpawnRequest, wanted: WantedWalls) -> None:
    """Refuse a start in which a child would not see what it is to work in.

    Raises:
        SpawnError: it has mounts of the host's, and no layer in which they are shown; or
            it could write to what it is to read.
    """
    if "mountns" in attempt.layers:
        return
    why = plan.missing.get("mountns", NO_MOUNTNS)
    files = wanted.files
    if files.mounts:
        is_own = files.mounts[0].fd < 0  # else the host is root, and mounts each mode
        how = "use the mode 'direct' or 'read-only'" if is_own else ASK_DOCTOR
        raise no_workspace(files.mounts[0].path, why, how)
    if files.unwritten and "landlock" not in attempt.layers:
        text = f"no layer keeps it read-only ({why})"
        raise no_workspace(files.unwritten[0], text, "use the mode 'direct'")


@contextmanager
def _copies(mounts: Iterable[ShownMount]) -> Iterator[tuple[int, ...]]:
    """Give a copy of each mount, which one child can attach in its namespace."""
    with ExitStack() as stack:
        copies = []
        for mount in mounts:
            if mount.fd < 0:
                continue
            copies.append(mount.copy())
            stack.callback(os.close, copies[-1])
        yield tuple(copies)


def _stay_root(wanted: WantedWalls) -> None:
    """Let a child that has no user of its own through what its directories lie in."""
    if wanted.made_in < 0:
        ownership.take_parents_from_keeper(wanted.files.own)
    else:
        ownership.take_from_keeper(wanted.made_in)


async def _do_without(
    launcher: Launcher,
    plan: Plan,
    attempt: SpawnRequest,
    why: SpawnError,
    paths: tuple[str, ...],
) -> None:
    """Record what failed, for the next attempt.

    Raises:
        SpawnError: there is none: it is required, or nothing that can be left out.
        LaunchpadLost: no child can be started any more.
    """
    fault = why
    if why.stage in OF_PATHS:
        fault = await _neutral_fault(launcher, attempt)
    if fault.stage == "exec":
        raise failed_for_paths(why, paths)
    if not plan.failed(fault):
        raise why


async def _neutral_fault(launcher: Launcher, attempt: SpawnRequest) -> SpawnError:
    """Return the failure of the same layers on a process without the child's files.

    The one that failed for the child may have failed for what it did to its own
    directories, which says nothing of the machine. Nothing is run: where every layer
    goes well, it is the program that fails.

    Raises:
        LaunchpadLost: no child can be started any more.
    """
    top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        request = SpawnRequest(
            executable="/",  # a directory
            argv=("-",),
            env={},
            cwd_fd=top,
            fds=(),
            layers=common_layers(attempt.layers),
        )
        process = await launcher.spawn(request)
    except SpawnError as why:
        return why
    finally:
        os.close(top)
    process.close()
    raise AssertionError("a directory was executed")


def _walls_of(plan: Plan, wanted: WantedWalls, process: SpawnedProcess) -> Walls:
    """Say what a child runs in; its network is none only if something keeps it so."""
    walls = Walls(wanted.profile.name, wanted.network, process.applied, plan.missing)
    layers = dict(walls.applied).keys()
    if "cgroup" in layers and not is_held(layers):
        walls.missing[HOLD] = LEAVES_GROUPS
    if wanted.network == "none" and not KEEP_NETWORK & layers:
        walls.network = "host"
        walls.missing["network"] = "takes the layer netns or the layer seccomp"
    return walls


def shortfalls(walls: Walls, profile: Profile) -> Iterator[str]:
    """Yield remarks about a child's walls beside its report, in half a sentence.

    That its network is the host's is told of its policy where it was foreseen.
    """
    for what in NO_LAYERS:
        if why := walls.missing.get(what):
            yield f"goes without its {what}: {why}"
    asked = sorted(KEEP_NETWORK & walls.missing.keys())
    if "network" in walls.missing and asked and keeps_network(profile):
        why = ", ".join(f"{layer}: {walls.missing[layer]}" for layer in asked)
        how = "require a layer that keeps it from that, or set network = 'host'"
        yield f"has the host's network ({why}); {how}"


def _unkept(request: SpawnRequest, wanted: WantedWalls) -> dict[str, str]:
    """Return the limits and read-only paths that are not kept, with reasons."""
    limits = {which for which, *_ in request.rlimits}
    is_root = os.geteuid() == 0 and "uid" not in request.layers
    is_kept = wanted.bounds.processes is not None and _groups_keep(request.layers)
    is_left = "cgroup" in request.layers and not is_held(request.layers)
    end = f", and {LEAVES_GROUPS}; add such layers" if is_left else ""
    unkept = {}
    if resource.RLIMIT_NPROC in limits and is_root and not is_kept:
        why = "the kernel does not count the processes of root"
        unkept[PROCESSES] = f"{why}{end}"
    if resource.RLIMIT_AS in limits and is_left:
        unkept[MEMORY] = f"each process has its own alone{end}"
    if wanted.files.unwritten and "mountns" not in request.layers:
        why = (
            "Landlock keeps content and names, not modes, times, owners and attributes"
        )
        unkept[READ_ONLY] = f"{why} ({wanted.files.unwritten[0]})"
    return unkept


def _groups_keep(layers: Collection[str]) -> bool:
    """Tell whether groups bound a child in these layers, which cannot leave them."""
    return "cgroup" in layers and is_held(layers)


def instead_of_listener(profile: Profile) -> str:
    """Say what to do for a child that goes without a service's port on its loopback."""
    if profile.unix_sockets:
        return "use the service's socket by path"
    return "the service is out of reach; require netns, or set network = 'host'"


def _report_unreceived(request: SpawnRequest) -> dict[str, str]:
    """Take in the listener that a child has made; say why, if that cannot be."""
    if request.listener is not None:
        try:
            request.listener.receive()
        except OSError as why:
            return {LISTENER: f"this host cannot take it: {why.strerror}{remedy(why)}"}
    return {}


def _report_unreachable(
    asked: dict[str, object], wanted: WantedWalls
) -> dict[str, str]:
    """Say of a child's own directories that it has no way to them, if that is so.

    Args:
        asked: the order for the launchpad.
        wanted: whose directories.
    """
    if wanted.user is None or not {"uid", "mountns"} <= asked.keys():
        return {}
    trees = cast("tuple[object, tuple[Tree, ...]]", asked["mountns"])[1]
    for own in wanted.files.own:
        with suppress(OSError):  # it is gone, which is told by what needs it
            closed = _closed(wanted.user, own, trees)
            if closed:
                text = f"{own} lies beneath {closed}, which only its owner may enter"
                return {OWN_DIRECTORIES: text}
    return {}


def _closed(user: int, own: str, trees: tuple[Tree, ...]) -> str:
    """Return why a user cannot reach its directory in a fresh root; "" if it can.

    All may pass there, but where it lies in a copy of the host's.

    Raises:
        OSError: something is gone.
    """
    name, here = os.fsencode(own), own
    for path, kind, what in reversed(trees):  # outer ones come first
        if not name.startswith(path + b"/"):
            continue
        top = os.fsdecode(path)
        if kind != HIDE:
            mapped = what is True or what == IF_POSSIBLE
            closed = ownership.find_closed_parent(user, here, top, mapped=mapped)
            if closed:
                return closed
        here = top
    return ""


async def _attempt(
    plan: Plan,
    request: SpawnRequest,
    wanted: WantedWalls,
    share: trio.CapacityLimiter | None,
) -> SpawnRequest:
    """Return a request for the layers that this machine seems to give at the moment.

    Raises:
        SpawnError: a required layer is missing.
        OSError: a directory of its own is gone.
    """
    layers = plan.wanted()
    _check_served(plan, layers, wanted)
    if not wanted.bounds.procs:
        plan.leave(layers, "cgroup", wanted.bounds.why_none)
    if wanted.user is None:
        plan.leave(layers, "uid", "it was given no user")
    is_kept = _groups_keep(layers)
    if wanted.bounds.is_needed and not is_kept:
        leaves = "cgroup" in layers
        raise cpus_not_kept(plan.missing.get("cgroup", ""), leaves=leaves)
    rlimits = request.rlimits
    if is_kept:
        rlimits = tuple(_report_groups(rlimits, wanted))
    if "rlimits" in layers:
        rlimits = ((resource.RLIMIT_CORE, 0, 0), *rlimits)
    # It looks at what may be anywhere, and at what the child has made.
    home = request.env.get("HOME", "/")
    ask = partial(_give_and_ask, layers, wanted, request.executable, home)
    asked, lost = await in_thread(ask, share=share)
    plan.missing.update(lost)
    listener = request.listener if "netns" in layers else None
    return replace(request, layers=asked, rlimits=rlimits, listener=listener)


def _check_served(plan: Plan, layers: Collection[str], wanted: WantedWalls) -> None:
    """Refuse a start in which a network by name would not be kept (spec NET9).

    Raises:
        SpawnError: a layer that it takes is not there.
    """
    for layer in SERVES_NETWORK if wanted.is_served else ():
        if layer not in layers:
            why = plan.missing.get(layer, f"profile {wanted.profile.name!r} lacks it")
            raise not_served(layer, why)


def _give_and_ask(
    layers: set[str], wanted: WantedWalls, executable: str, home: str
) -> tuple[dict[str, object], dict[str, str]]:
    """Give a child its own directories; return as ``request_layers``."""
    if wanted.user is not None:
        user = wanted.user if "uid" in layers else os.geteuid()
        ownership.give(wanted.files.own, user)
    if "uid" not in layers:
        _stay_root(wanted)
    return request_layers(layers, wanted, executable, home)


def request_layers(
    layers: set[str], wanted: WantedWalls, executable: str, home: str
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the layers for the launchpad, and those that a child cannot have.

    Every fault is this start's failure.

    Raises:
        SpawnError: it cannot be found out.
    """
    try:
        asked = layers_on_the_wire(layers, wanted, executable, home)
        return asked, _report_unreachable(asked, wanted)
    except (SpawnError, OSError):
        raise
    except Exception as why:
        raise internal_error(why) from why


def _report_groups(
    rlimits: Iterable[tuple[int, int, int]], wanted: WantedWalls
) -> Iterator[tuple[int, int, int]]:
    """Yield the limits of each process that are left beside those of its groups."""
    for limit in rlimits:
        # Programs reserve addresses that they never use (V8, Go, the JVM).
        which, soft, _ = limit
        kept = wanted.bounds.memory_bytes
        is_kept = kept is not None and not 0 <= soft < kept
        if not (is_kept and which == resource.RLIMIT_AS):
            yield report_group(limit, wanted.bounds.processes)


def report_group(limit: tuple[int, int, int], kept: int | None) -> tuple[int, int, int]:
    """Return a limit of processes twice as high where a group keeps that number.

    So the group refuses a fork, and counts it (``sandbox.fork_watch``): RLIMIT_NPROC counts
    forks under way too, and each process may be in one. A limit lower than the group's
    stays as it is: only RLIMIT_NPROC keeps it.
    """
    which, soft, hard = limit
    if which != resource.RLIMIT_NPROC or kept is None or soft != kept:
        return limit
    # The launchpad has the same, and raises it only with CAP_SYS_RESOURCE.
    _, most = resource.getrlimit(which)
    twice = (
        2 * kept if most == resource.RLIM_INFINITY else max(kept, min(2 * kept, most))
    )
    return which, twice, max(twice, hard)
