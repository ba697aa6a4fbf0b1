"""Sockets in a child's net namespace, which the host holds and serves (spec NET4).

`supervisor.network.service` asks for them before a child is spawned, and gives them to its
`ChildNetwork`, which closes them, when the child's process is there.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator


@dataclass(slots=True)
class InnerSockets:
    """What the host holds of a child's net namespace; all of it non-blocking.

    Attributes:
        dns_datagram: UDP, 127.0.0.1:53.
        dns_stream: TCP, 127.0.0.1:53, or 0.0.0.0:53 where a rule grants port 53.
        proxy: TCP, 127.0.0.1:3128, or 0.0.0.0:3128 where a rule grants port 3128.
        listeners: of each granted port the one on 0.0.0.0, then the one on :: (V6ONLY)
            if the namespace has v6. Of ports 53 and 3128 the first one is `dns_stream`
            or `proxy`: `getsockname` of what was accepted says which was meant.
        stock: TCP sockets, unbound, for what begins later: v4 and v6 in turn, or v4.
        has_v6: whether the namespace has v6.
    """

    dns_datagram: socket.socket
    dns_stream: socket.socket
    proxy: socket.socket
    listeners: dict[int, tuple[socket.socket, ...]]
    stock: list[socket.socket]
    has_v6: bool

    def take(self, family: int) -> socket.socket:
        """Return an unbound TCP socket of the namespace; the caller's.

        Args:
            family: AF_INET or AF_INET6.

        Raises:
            OSError: EMFILE, none of that family is left.
        """
        for place, sock in enumerate(self.stock):
            if sock.family == family:
                return self.stock.pop(place)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def close(self) -> None:
        """Close all of them."""
        for sock in self._all():
            sock.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return the numbers of those that are open."""
        numbers = (sock.fileno() for sock in self._all())
        return tuple(dict.fromkeys(number for number in numbers if number >= 0))

    def _all(self) -> Iterator[socket.socket]:
        yield from (self.dns_datagram, self.dns_stream, self.proxy, *self.stock)
        for listeners in self.listeners.values():
            yield from listeners
