"""What the next program of a host takes over of its children's networks.

1. A descriptor is its number, as everywhere in a hand-over.
2. Rules are their texts: what was changed live is among them.
3. Connections have no form. They are reset by exec(2) itself (`sockets.reset_at_exit`),
   so that a hand-over that fails has ended none.
"""

from __future__ import annotations

import msgspec

from supervisor.network.inner_sockets import SocketsState  # noqa: TC001 - msgspec looks
from supervisor.network.learned import LearnedState  # noqa: TC001 - msgspec looks
from supervisor.network.notices import NoticesState  # noqa: TC001 - msgspec looks
from supervisor.network.traffic import TrafficState  # noqa: TC001 - msgspec looks


class ChildNetworkState(msgspec.Struct):
    """The network of one child; without arguments that of a child that begins.

    Attributes:
        rules: in force, as written; None for those of its settings.
        routes: networks that the namespace has a route to.
        names: of the pool, in the order of their addresses.
        closed_ports: those whose listeners refuse connections.
        published: (port of the child, descriptor of the host's listener); None for those
            of its settings, which are opened.
        net_bytes: used of its limit.
        open: connections that end with the program before.
    """

    rules: list[str] | None = None
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
