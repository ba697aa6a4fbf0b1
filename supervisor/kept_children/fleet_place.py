"""A child that a fleet has placed here: environment, workspace, limits, walls."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hostlib.user_values import parse_limits
from supervisor.workspace.section import uses_of
from supervisor.workspace.use import WorkspaceUse

if TYPE_CHECKING:
    from supervisor.children.specs import ChildOptions
    from supervisor.config.document import Config
    from supervisor.fleet.fence import FleetLife
    from supervisor.fleet.messages import Program
    from supervisor.spawn.launcher import Launcher
    from supervisor.spec import ChildSpec
    from supervisor.workspace.use import Drop

NODE = "SANDHOST_FLEET_NODE"
INCARNATION = "SANDHOST_FLEET_INCARNATION"

PID_NAMESPACE = "pidns"
"""The layer whose end takes all processes of a child along."""

_ALLOW = "choose another policy, or set [fleet] unfenced = true on this node"


class FleetPlace(NamedTuple):
    """The place of a child in a fleet, and the launcher that starts it.

    Attributes:
        life: the child as the fleet knows it.
        launcher: of its node's session.
        program: as it was ordered.
        workspaces: over bases that have come to this node.
    """

    life: FleetLife
    launcher: Launcher
    program: Program
    workspaces: tuple[WorkspaceUse, ...] = ()

    def spec_of(self, spec: ChildSpec) -> ChildSpec:
        """Return the description of such a child, from that of one of this host.

        It finds its node and its incarnation (spec FL4).
        """
        incarnation = str(self.life.incarnation)
        env = {**spec.env, NODE: self.life.node, INCARNATION: incarnation}
        return replace(spec, env=env, fleet=self.life)

    def options_of(
        self, name: str, options: ChildOptions, config: Config, state_dir: str
    ) -> ChildOptions:
        """Return options with the workspace and the limits that were ordered.

        Args:
            name: of the child, and of its workspace.
            options: of its policy.
            config: of the node.
            state_dir: has the node's workspaces.

        Raises:
            ValueError: the node has no such workspace, or no such limit.
        """
        program = self.program
        given = parse_limits([f"{key}={text}" for key, text in program.limits.items()])
        set_before = options.limits._asdict()
        tighter = {
            name: limit if set_before[name] is None else min(limit, set_before[name])
            for name, limit in given._asdict().items()
            if limit is not None
        }
        options = replace(options, limits=options.limits._replace(**tighter))
        uses = self.workspaces
        if program.workspace is not None:
            use = _use_of(program.workspace, config, state_dir)
            uses = (replace(use, name=name), *uses)
        drop: Drop = "unchanged" if program.keeps_workspace else "always"
        own = tuple(replace(use, drop=drop) for use in uses)
        return replace(options, workspaces=(*own, *options.workspaces))


def _use_of(workspace: str, config: Config, state_dir: str) -> WorkspaceUse:
    if workspace.startswith("/"):
        return WorkspaceUse(workspace, workspace, "review", state_dir)
    if workspace not in config.workspace:
        raise ValueError(
            f"there is no workspace {workspace!r} on this node; give the path of a"
            f" directory, or add [workspace.{workspace}] to its configuration"
        )
    (use,) = uses_of((workspace,), config.workspace, state_dir)
    if use.mode != "review":
        raise ValueError(
            f"workspace {workspace!r} has the mode {use.mode!r}; name one with the mode"
            " 'review'"
        )
    return use


def fence_options(options: ChildOptions) -> ChildOptions:
    """Return options whose child ends with its lease for sure (spec FL6, FL9).

    Where the machine gives no pid namespace, the child is not started.

    Raises:
        ValueError: the policy rules that out.
    """
    profile = options.sandbox
    if not profile.layers:
        raise ValueError(f"a child of a fleet needs a sandbox; {_ALLOW}")
    if PID_NAMESPACE not in profile.layers:
        raise ValueError(
            f"sandbox {profile.name!r} has no pid namespace, so processes of the child"
            f" could outlive its lease; {_ALLOW}"
        )
    if options.network == "host":
        raise ValueError(
            f'network = "host" would reach the ports of the fleet; {_ALLOW}'
        )
    required = profile.required | {PID_NAMESPACE}
    return replace(options, sandbox=replace(profile, required=required))
