"""Connections through the HTTP proxy that the host itself has to use (spec NET8)."""

from __future__ import annotations

import errno
import os
import re
import socket
from typing import TYPE_CHECKING

from hostlib.readiness import wait_readable
from supervisor.network.dialer import dial
from supervisor.network.hosts import format_host
from supervisor.network.sockets import reset_socket, send_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.network.hosts import Address
    from supervisor.network.proxy_dialogue import Asked

MAX_HEAD_BYTES = 16_384
"""Bytes of the proxy's answer."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_ERRORS = {403: errno.EACCES, 407: errno.EACCES}
"""Status of a proxy's refusal -> errno; for others the host is unreachable."""


async def dial_through(
    proxy: Sequence[Address], proxy_port: int, target: Asked, held: set[socket.socket]
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
    """Read the head of an answer; what follows it is the host's, and stays unread."""
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
