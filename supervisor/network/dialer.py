"""Connections to one of several addresses of a host, the next tried beside a slow one."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

import trio

from supervisor.network.sockets import close_socket, connect, keep_alive, send_at_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.network.hosts import Address

NEXT_AFTER_S = 0.25
"""After that long without an answer the next address is tried as well (RFC 8305)."""
MAX_TRIED = 8
"""Addresses that are tried of a host: each holds a descriptor meanwhile."""


async def dial(addresses: Sequence[Address], port: int) -> socket.socket:
    """Return a socket that is connected to one of some addresses; the caller's.

    Args:
        addresses: at least one, in the order to try them.
        port: of all of them.

    Raises:
        OSError: none can be reached; it says why of the first that failed.
    """
    race = _Race(port)
    try:
        async with trio.open_nursery() as nursery:
            for address in addresses[:MAX_TRIED]:
                has_failed = trio.Event()
                nursery.start_soon(race.run, address, has_failed, nursery.cancel_scope)
                with trio.move_on_after(NEXT_AFTER_S):
                    await has_failed.wait()
    except BaseException:
        if race.winner is not None:
            close_socket(race.winner)
        raise
    if race.winner is None:
        raise race.errors[0]
    return race.winner


class _Race:
    """Attempts to connect to a host, of which one wins.

    Attributes:
        winner: what is connected; None while nothing is.
        errors: of those that failed.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.winner: socket.socket | None = None
        self.errors: list[OSError] = []

    async def run(
        self, address: Address, has_failed: trio.Event, others: trio.CancelScope
    ) -> None:
        """Try one address."""
        try:
            sock = await _connected(address, self._port)
        except OSError as why:
            self.errors.append(why)
            has_failed.set()
            return
        if self.winner is None:
            self.winner = sock
            others.cancel()
        else:
            close_socket(sock)


async def _connected(address: Address, port: int) -> socket.socket:
    is_v6 = isinstance(address, IPv6Address)
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        send_at_once(sock)
        keep_alive(sock)
        await connect(sock, address, port)
    except BaseException:
        close_socket(sock)
        raise
    return sock
