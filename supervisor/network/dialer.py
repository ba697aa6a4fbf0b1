"""Connections to one of several addresses; the next is tried beside a slow one."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

import trio

from supervisor.network.sockets import (
    close_socket,
    connect,
    keep_alive,
    reset_at_exit,
    send_at_once,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.network.hosts import Address

NEXT_AFTER_S = 0.25
"""After that long without an answer the next address is tried as well (RFC 8305)."""
MAX_TRIED = 8
"""Addresses that are tried of a host: each holds a descriptor meanwhile."""


async def dial(
    addresses: Sequence[Address], port: int, held: set[socket.socket]
) -> socket.socket:
    """Return a socket that is connected to one of some addresses; the caller's.

    Args:
        addresses: at least one, in the order to try them.
        port: of all of them.
        held: gets every open socket; at the end only the returned one is in it.

    Raises:
        OSError: none can be reached; it says why of the first that failed.
    """
    race = _Race(port, held)
    if len(addresses) == 1:
        return await race.connect(addresses[0])
    try:
        async with trio.open_nursery() as nursery:
            for address in addresses[:MAX_TRIED]:
                has_failed = trio.Event()
                nursery.start_soon(race.run, address, has_failed, nursery.cancel_scope)
                with trio.move_on_after(NEXT_AFTER_S):
                    await has_failed.wait()
    except BaseException:
        if race.winner is not None:
            race.close(race.winner)
        raise
    if race.winner is None:
        raise race.errors[0]
    return race.winner


class _Race:
    """Attempts to connect to a host, of which one wins.

    Attributes:
        winner: the connected socket; None before one is.
        errors: of those that failed.
    """

    def __init__(self, port: int, held: set[socket.socket]) -> None:
        self._port = port
        self._held = held
        self.winner: socket.socket | None = None
        self.errors: list[OSError] = []

    async def run(
        self, address: Address, has_failed: trio.Event, others: trio.CancelScope
    ) -> None:
        """Try one address."""
        try:
            sock = await self.connect(address)
        except OSError as why:
            self.errors.append(why)
            has_failed.set()
            return
        if self.winner is None:
            self.winner = sock
            others.cancel()
        else:
            self.close(sock)

    def close(self, sock: socket.socket) -> None:
        """Close sockets that lost, or that are not wanted any more."""
        self._held.discard(sock)
        close_socket(sock)

    async def connect(self, address: Address) -> socket.socket:
        """Return a socket that is connected to one address."""
        is_v6 = isinstance(address, IPv6Address)
        family = socket.AF_INET6 if is_v6 else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._held.add(sock)
        try:
            send_at_once(sock)
            keep_alive(sock)
            reset_at_exit(sock)
            await connect(sock, address, self._port)
        except BaseException:
            self.close(sock)
            raise
        return sock
