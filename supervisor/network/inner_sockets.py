"""Sockets in a child's net namespace, which the host holds and serves (spec NET4).

`supervisor.network.service` asks for them before a child is spawned, and gives them to its
`ChildNetwork`, which closes them, when the child's process is there.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import msgspec

from hostlib.accounts import Account
from hostlib.linux.tcp import disconnect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence


class SocketsState(msgspec.Struct):
    """The state for a hand-over.

    Attributes:
        listeners: (port, descriptors).
        stock: also those in use; their connections are reset.
    """

    dns_datagram: int
    dns_stream: int
    proxy: int
    listeners: list[tuple[int, list[int]]]
    stock: list[int]
    has_v6: bool


@dataclass(slots=True)
class InnerSockets:
    """The host's non-blocking sockets in a child's net namespace.

    Attributes:
        dns_datagram: UDP, 127.0.0.1:53.
        dns_stream: TCP, 127.0.0.1:53, or 0.0.0.0:53 where a rule grants port 53.
        proxy: TCP, 127.0.0.1:3128, or 0.0.0.0:3128 where a rule grants port 3128.
        listeners: of each granted port the one on 0.0.0.0, then the one on :: (V6ONLY)
            if the namespace has v6. Of ports 53 and 3128 the first one is `dns_stream`
            or `proxy`: `getsockname` of what was accepted says which was meant.
        stock: TCP sockets, unbound, for what begins later.
        has_v6: whether the namespace has v6.
        make: makes one more of each family that is listed; None where that cannot be
            done.
        account: charged for as many descriptors as these are, in use or not.
    """

    dns_datagram: socket.socket
    dns_stream: socket.socket
    proxy: socket.socket
    listeners: dict[int, tuple[socket.socket, ...]]
    stock: list[socket.socket]
    has_v6: bool
    make: Callable[[Sequence[int]], Awaitable[list[socket.socket]]] | None = None
    account: Account[int] = field(default_factory=Account)

    @classmethod
    def restore(cls, state: SocketsState) -> Self:
        """Return what was handed over."""
        # A listener may be the host's own one as well.
        made: dict[int, socket.socket] = {}
        stock = [socket_of(fd) for fd in state.stock]
        for sock in stock:
            disconnect(sock)

        def one(fd: int) -> socket.socket:
            return made.get(fd) or made.setdefault(fd, socket_of(fd))

        return cls(
            one(state.dns_datagram),
            one(state.dns_stream),
            one(state.proxy),
            {port: tuple(map(one, fds)) for port, fds in state.listeners},
            stock,
            state.has_v6,
        )

    def snapshot(self, used: Iterable[int]) -> SocketsState:
        """Return what is handed over.

        Args:
            used: sockets that were taken from the stock, and go back to it.
        """
        return SocketsState(
            self.dns_datagram.fileno(),
            self.dns_stream.fileno(),
            self.proxy.fileno(),
            [
                (port, [sock.fileno() for sock in listeners])
                for port, listeners in self.listeners.items()
            ],
            [*(sock.fileno() for sock in self.stock), *used],
            self.has_v6,
        )

    @property
    def families(self) -> tuple[int, ...]:
        """The families of the namespace."""
        return (socket.AF_INET, *((socket.AF_INET6,) if self.has_v6 else ()))

    async def reserve(self, count: int, families: Iterable[int]) -> None:
        """Have so many sockets of some families in stock, until something is awaited.

        Raises:
            OSError: they cannot be made.
        """
        while missing := self._missing(count, families):
            if self.make is None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.stock += await self.make(missing)

    def _missing(self, count: int, families: Iterable[int]) -> list[int]:
        """Return the family of each socket that the stock lacks."""
        there = Counter(int(sock.family) for sock in self.stock)
        return [family for family in families for _ in range(there[family], count)]

    def take(self, family: int) -> socket.socket:
        """Return an unbound TCP socket of the namespace; the caller's.

        Raises:
            OSError: EMFILE, none of that family is left.
        """
        for place, sock in enumerate(self.stock):
            if sock.family == family:
                return self.stock.pop(place)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def discard(self, sock: socket.socket) -> None:
        """Close one that cannot be used again."""
        sock.close()
        self.account.record(-1)

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


def socket_of(fd: int) -> socket.socket:
    """Return the non-blocking socket that was handed over as a number."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock
