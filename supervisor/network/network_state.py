"""The hand-over of children's networks to the next program of a host.

1. A descriptor is its number, as everywhere in a hand-over.
2. Rules are their texts, those changed live included. A part of a network keeps the
   network that it is a part of, or it would open more than before.
3. Connections have no form. They are reset by exec(2) itself (`sockets.reset_at_exit`),
   so that a hand-over that fails has ended none.
"""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network

import msgspec

from supervisor.network.inner_sockets import SocketsState  # noqa: TC001 - msgspec looks
from supervisor.network.notices import NoticesState  # noqa: TC001 - msgspec looks
from supervisor.network.rule import Rule, parse_rule
from supervisor.network.traffic import TrafficState  # noqa: TC001 - msgspec looks
from supervisor.network.used_rules import LearnedState  # noqa: TC001 - msgspec looks


class RuleState(msgspec.Struct):
    """A rule as written, and the network that it was cut from."""

    text: str
    cut_from: str | None = None


class ChildNetworkState(msgspec.Struct):
    """The network of one child; without arguments that of a child that begins.

    Attributes:
        rules: in force; None for those of its settings.
        routes: networks that the namespace has a route to.
        names: of the pool, in the order of their addresses.
        closed_ports: those whose listeners refuse connections.
        published: (port of the child, descriptor of the host's listener); None for those
            of its settings, which are opened.
        net_bytes: used of its limit.
        open: connections that end with the program before.
    """

    rules: list[RuleState] | None = None
    routes: list[str] = []
    names: list[str] = []
    closed_ports: list[int] = []
    published: list[tuple[int, int]] | None = None
    traffic: TrafficState | None = None
    notices: NoticesState | None = None
    learned: LearnedState | None = None
    net_bytes: int = 0
    open: int = 0


class NetworkState(msgspec.Struct):
    """The networks of all children, and their sockets, by the child's id."""

    children: dict[str, tuple[SocketsState, ChildNetworkState]] = {}


def snapshot_rule(rule: Rule) -> RuleState:
    """Return what is handed over of a rule."""
    return RuleState(
        rule.written, None if rule.cut_from is None else str(rule.cut_from)
    )


def restore_rule(state: RuleState) -> Rule:
    """Return the rule that was handed over."""
    origin = None if state.cut_from is None else ip_network(state.cut_from)
    return replace(parse_rule(state.text), cut_from=origin)
