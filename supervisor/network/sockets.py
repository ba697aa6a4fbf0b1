"""Plain non-blocking TCP sockets for Trio, and their two ways to end.

A connection that ends by an error is reset: its peer must not take what it has for the
whole (spec NET6). So is one that this process leaves open when it ends or becomes another
program: only `close_socket` ends a connection well.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from ipaddress import ip_address
from typing import TYPE_CHECKING

import trio

from hostlib.readiness import wait_readable, wait_writable

if TYPE_CHECKING:
    from supervisor.network.hosts import Address

_NO_LINGER, _LINGER = struct.pack("ii", 1, 0), bytes(8)
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 4),
)
"""A peer that is gone is noticed after two minutes; address translators forget later."""


def close_socket(sock: socket.socket) -> None:
    """Close a connection after the sent bytes have arrived."""
    if sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
        _close(sock)


def reset_socket(sock: socket.socket) -> None:
    """Close a connection by RST: its peer sees an error."""
    if sock.fileno() >= 0:
        reset_at_exit(sock)
        _close(sock)


def reset_at_exit(sock: socket.socket) -> None:
    """Have a connection reset by whatever closes it, but for `close_socket`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _close(sock: socket.socket) -> None:
    trio.lowlevel.notify_closing(sock)
    sock.close()


def send_at_once(sock: socket.socket) -> None:
    """Set small writes to be sent at once (TCP_NODELAY); the sender gathers them."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel ask whether the peer is still there."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def own_end(sock: socket.socket) -> tuple[Address, int]:
    """Return the address and the port that a connection came to."""
    address, port = sock.getsockname()[:2]
    return ip_address(address.partition("%")[0]), port


async def connect(sock: socket.socket, address: Address, port: int) -> None:
    """Connect a socket.

    Raises:
        OSError: the peer cannot be reached.
    """
    code = sock.connect_ex((str(address), port))
    if code == errno.EINPROGRESS:
        await wait_writable(sock)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    else:
        await trio.lowlevel.checkpoint()
    if code:
        raise OSError(code, os.strerror(code))


async def receive(sock: socket.socket, most_bytes: int) -> bytes:
    """Return what comes next; empty at the end.

    Raises:
        OSError: the connection is broken.
    """
    while True:
        await wait_readable(sock)
        try:
            return sock.recv(most_bytes)
        except BlockingIOError:
            continue


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send all of some bytes.

    Raises:
        OSError: the connection is broken.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            await wait_writable(sock)
    await trio.lowlevel.checkpoint()
