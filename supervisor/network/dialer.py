"""Connections to one of several addresses, or through the host's own HTTP proxy.

The next address is tried beside a slow one (RFC 8305); a proxy gets CONNECT (spec NET8).
"""

from __future__ import annotations

import errno
import os
import re
import socket
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

import trio

from hostlib.readiness import wait_readable
from supervisor.network.hosts import format_host
from supervisor.network.sockets import (
    close_socket,
    connect,
    keep_alive,
    reset_at_exit,
    reset_socket,
    send_all,
    send_at_once,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.network.hosts import Address
    from supervisor.network.proxy_dialogue import ProxyTarget

NEXT_AFTER_S = 0.25
"""Time without an answer after which the next address is tried as well (RFC 8305)."""
MAX_TRIED = 8
"""Addresses that are tried of a host: each holds a descriptor meanwhile."""
MAX_HEAD_BYTES = 16_384
"""Bytes of the proxy's answer."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_ERRORS = {403: errno.EACCES, 407: errno.EACCES}
"""Status of a proxy's refusal -> errno; for others the host is unreachable."""


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


async def dial_through(
    proxy: Sequence[Address],
    proxy_port: int,
    target: ProxyTarget,
    held: set[socket.socket],
) -> socket.socket:
    """Return a socket that a proxy has connected to a host; the caller's.

    Args:
        proxy: its addresses.
        proxy_port: where it listens.
        target: is resolved by the proxy.
        held: as `dial` takes it.

    Raises:
        OSError: the proxy cannot be reached, or does not reach the host.
    """
    if not proxy:
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
    sock = await dial(proxy, proxy_port, held)
    try:
        where = f"{format_host(target.host)}:{target.port}"
        head = f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n"
        await send_all(sock, head.encode("ascii"))
        _check_status(await _read_head(sock))
    except BaseException:
        reset_socket(sock)
        raise
    return sock


async def _read_head(sock: socket.socket) -> bytes:
    """Read the head of an answer, and leave the server's bytes behind it unread."""
    head = bytearray()
    while len(head) <= MAX_HEAD_BYTES:
        await wait_readable(sock)
        seen = sock.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        if not seen:
            raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        end = (head + seen).find(b"\r\n\r\n")
        head += sock.recv(len(seen) if end < 0 else end + 4 - len(head))
        if end >= 0:
            return bytes(head)
    raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))


def _check_status(head: bytes) -> None:
    match = _STATUS.match(head)
    status = 0 if match is None else int(match[1])
    if not 200 <= status < 300:
        code = _ERRORS.get(status, errno.EHOSTUNREACH)
        raise OSError(code, os.strerror(code))
