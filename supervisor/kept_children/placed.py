"""A child that a fleet has placed here: its environment, and its walls."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from supervisor.children.specs import ChildOptions
    from supervisor.fleet.fence import FleetLife
    from supervisor.spawn.launcher import Launcher
    from supervisor.spec import ChildSpec

NODE = "SANDHOST_FLEET_NODE"
INCARNATION = "SANDHOST_FLEET_INCARNATION"

PID_NAMESPACE = "pidns"
"""The layer whose end takes all processes of a child along."""

_ALLOW = "choose another policy, or set [fleet] unfenced = true on this node"


class Placed(NamedTuple):
    """The place of a child in a fleet, and the launcher that starts it.

    Attributes:
        life: the child as the fleet knows it.
        launcher: of its node's session.
    """

    life: FleetLife
    launcher: Launcher

    def spec_of(self, spec: ChildSpec) -> ChildSpec:
        """Return the description of such a child, from that of one of this host.

        It finds its node and its incarnation (spec FL4).
        """
        incarnation = str(self.life.incarnation)
        env = {**spec.env, NODE: self.life.node, INCARNATION: incarnation}
        return replace(spec, env=env, fleet=self.life)


def fenced(options: ChildOptions) -> ChildOptions:
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
