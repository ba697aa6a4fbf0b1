"""The walls of one child: its files, its user, its groups, and the report on them.

A child's profile becomes ``WantedWalls``, with a user and groups of the host's; ``Walls`` are
what the child then runs in. Both outlive a hand-over as ``WallsState``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.children.child_state import WallsState
from supervisor.sandbox import refusals, start
from supervisor.sandbox.groups import Groups
from supervisor.sandbox.host_directories import resolver_locations
from supervisor.sandbox.plan import PROFILES, Walls, WantedWalls
from supervisor.sandbox.shown_files import ShownFiles

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from supervisor.children.child_workspaces import ChildWorkspaces
    from supervisor.parts import Parts
    from supervisor.sandbox.plan import Machine
    from supervisor.spec import ChildSpec


def take_wanted(
    host: Parts,
    child_id: str,
    spec: ChildSpec,
    workspaces: ChildWorkspaces | None,
    stack: AsyncExitStack,
) -> tuple[WantedWalls, Groups]:
    """Return the walls that a child is to run in, and its groups.

    Args:
        host: its host's parts.
        child_id: the child.
        spec: describes it.
        workspaces: its workspaces; None for none.
        stack: gives back its user and groups.

    Raises:
        SpawnError: its groups keep no bound that nothing else can keep.
    """
    wanted = _describe_wanted(host, spec)
    groups = Groups()
    if "uid" in spec.sandbox.layers and "uid" not in host.machine.lacking:
        wanted.user = user = _take_user(host.machine, workspaces)
        stack.callback(host.machine.give_user_back, user)
    if "cgroup" in spec.sandbox.layers:
        is_new = spec.fleet is not None
        groups = host.groups.take(child_id, spec.group_limits, is_new=is_new)
        stack.callback(host.give_groups_back, groups)
    wanted.bounds = groups.bounds(spec.group_limits)
    if wanted.bounds.is_needed and not groups.keeps_cpus:
        raise refusals.cpus_not_kept(wanted.bounds.why_none)
    return wanted, groups


def restore_wanted(
    host: Parts,
    spec: ChildSpec,
    left: WallsState,
    stack: AsyncExitStack,
) -> tuple[WantedWalls, Groups]:
    """Return the same as ``take_wanted`` for a child of the program before.

    Args:
        host: its host's parts.
        spec: describes it.
        left: its walls, as ``snapshot_walls`` returned them.
        stack: gives back its user and groups.
    """
    wanted = _describe_wanted(host, spec)
    groups = Groups.of_files(left.groups)
    wanted.user = left.user
    if left.user is not None:
        host.machine.keep_user(left.user)
        stack.callback(host.machine.give_user_back, left.user)
    if left.groups:
        wanted.bounds = groups.bounds(spec.group_limits)
        stack.callback(host.give_groups_back, groups)
    return wanted, groups


def snapshot_walls(walls: Walls, wanted: WantedWalls | None, init: int) -> WallsState:
    """Return what the next program takes over.

    Args:
        walls: those that the child runs in.
        wanted: those that it was to run in, with its user and groups; None for none.
        init: the init of its pid namespace; -1 for none.
    """
    return WallsState(
        profile=walls.profile,
        network=walls.network,
        applied=list(walls.applied),
        missing=dict(walls.missing),
        init=init,
        user=None if wanted is None else wanted.user,
        groups=[] if wanted is None else list(wanted.bounds.procs),
    )


def restore_walls(left: WallsState) -> Walls:
    """Return the walls that a child of the program before runs in."""
    return Walls(left.profile, left.network, tuple(left.applied), left.missing)


def report_walls(
    host: Parts, spec: ChildSpec, walls: Walls, fields: dict[str, object]
) -> None:
    """Log what a child that was started goes without.

    Args:
        host: its host's parts.
        spec: describes it.
        walls: those that it runs in.
        fields: identify it in a line of the log.
    """
    for text in start.shortfalls(walls, spec.sandbox):
        host.log.write("WARNING", f"Child {fields['child_id']} {text}", **fields)
    _tell_lost_layers(host, spec, walls)


def _describe_wanted(host: Parts, spec: ChildSpec) -> WantedWalls:
    """Return the walls that a child is to run in, as far as its description says."""
    others = dict.fromkeys(host.settings.written, False)
    hidden = host.apart.locations(spec.made_in) if spec.sandbox.layers else ()
    if spec.network_keys is not None:
        hidden += resolver_locations()
    files = ShownFiles(
        spec.cwd,
        own=spec.own_dirs,
        home=spec.kept_home or "",
        exposed=spec.expose,
        theirs={**others, **spec.written_dirs},
        hidden=hidden,
    )
    return WantedWalls(
        spec.sandbox,
        spec.network,
        files,
        is_served=spec.network_keys is not None,
        made_in=spec.made_in,
        has_command=True,
    )


def _take_user(machine: Machine, workspaces: ChildWorkspaces | None) -> int:
    """Take a user of its own, or the user of a child that shares a workspace."""
    if workspaces is not None:
        user = workspaces.user_of_sharers()
        if user is not None:
            machine.keep_user(user)
            return user
    return machine.take_user()


def _tell_lost_layers(host: Parts, spec: ChildSpec, walls: Walls) -> None:
    """Warn of each layer that the machine did not give, once for each policy.

    A child of ``run`` that is under no policy has its report alone.
    """
    if spec.policy is None and spec.name is None:
        return
    children = f"policy {spec.policy!r}" if spec.policy else "no policy"
    for layer, why in walls.lost.items():
        if (spec.policy, layer) not in host.machine.told:
            host.machine.told.add((spec.policy, layer))
            text = f"Children of {children} run without the sandbox layer {layer!r}"
            how = f"require it in [sandbox.{walls.profile}] to refuse them"
            if walls.profile in PROFILES:
                how = "name a profile that requires it to refuse them"
            host.log.write(
                "WARNING",
                f"{text}: {why}; {how}",
                layer=layer,
                policy=spec.policy,
                reason=why,
            )
