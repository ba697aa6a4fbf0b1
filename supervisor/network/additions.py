"""Additions to a running child's namespace: routes, and more sockets (NET12).

The launchpad makes them: from outside the host can bind and connect sockets of the
namespace, and make none.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hostlib.linux.net_namespace import (
    is_own_user_namespace,
    open_net_namespace,
    open_user_namespace,
)
from supervisor.network.addresses import POOL_V4, POOL_V6
from supervisor.network.pool import NAMESPACE_V4, NAMESPACE_V6
from supervisor.spawn.inner_pair import InnerListener

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.network.addresses import Network
    from supervisor.spawn.launcher import Launcher
    from supervisor.spawn.launchpad.layers.loopback import (
        LoopbackOrder,
        Networks,
        SocketOrder,
    )

V4, V6 = int(socket.AF_INET), int(socket.AF_INET6)

ADDRESSES: Networks = (
    (V4, NAMESPACE_V4.packed, POOL_V4.prefixlen),
    (V6, NAMESPACE_V6.packed, POOL_V6.prefixlen),
)
"""Those of each namespace, with the prefix that is local (spec NET4)."""


class Additions:
    """Adds to the namespace of one child.

    Args:
        inside: a socket of the namespace; the caller's, open as long as this is used.
    """

    def __init__(self, launcher: Launcher, inside: socket.socket) -> None:
        self._launcher = launcher
        self._inside = inside

    async def add_routes(self, networks: Iterable[Network]) -> None:
        """Make networks local in the namespace.

        Raises:
            OSError: it cannot be done.
        """
        await self._make((), ADDRESSES, routes_to(networks))

    async def make_sockets(self, families: Iterable[int]) -> list[socket.socket]:
        """Return unbound sockets of the namespace, non-blocking; the caller's.

        Raises:
            OSError: they cannot be made.
        """
        return await self._make(unbound(families), (), ())

    async def _make(self, *order: *LoopbackOrder) -> list[socket.socket]:
        came: list[socket.socket] = []
        with ExitStack() as stack:
            listener = InnerListener()
            stack.callback(listener.close)
            listener.add_sockets(order, lambda made, _: came.extend(made))
            net = open_net_namespace(self._inside.fileno())
            stack.callback(os.close, net)
            owner = open_user_namespace(net)
            stack.callback(os.close, owner)
            users = () if is_own_user_namespace(owner) else (owner,)
            await self._launcher.furnish(listener, net, users)
            listener.receive()
            listener.serve_received()
        return came


def routes_to(networks: Iterable[Network]) -> Networks:
    """Return the routes that a namespace needs for networks, as the launchpad is told."""
    return tuple(
        (
            V4 if network.version == 4 else V6,
            network.network_address.packed,
            network.prefixlen,
        )
        for network in networks
    )


def unbound(families: Iterable[int]) -> tuple[SocketOrder, ...]:
    """Return orders of TCP sockets that are bound to nothing, by their families."""
    return tuple((int(family), int(socket.SOCK_STREAM), "", 0) for family in families)
