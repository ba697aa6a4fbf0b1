"""Whoever stands by, as the host holds it: a child that the host itself gives its order.

What it is: the order as system calls, written for the address where they will stand, and
sent with their descriptors by the line of one that waits for them. What it is not: starting
anybody, which is ``supervisor/launchpad/standby.py``; waiting for the exec, which is the
launcher's.

Rules:
 1. Who has got its order is no different from a child whose exec is under way: its line
    ends with that. One that died before it took its order has done nothing of it: its line
    ends with ECONNRESET, and the order is another's.
 2. A line that nobody uses any more is closed, and its child ends.
"""

from __future__ import annotations

import _socket
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from supervisor.launchpad import calls, wire
from supervisor.launchpad.order import Order
from supervisor.launchpad.standby import FIRST_RECEIVED, ORDER_BYTES
from supervisor.spawned import Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.spawn_request import SpawnRequest

    Applied = tuple[tuple[str, str], ...]

_FLAGS = _socket.MSG_DONTWAIT | _socket.MSG_NOSIGNAL
_SEQPACKET = _socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0
_DESCRIPTORS = 2

_STAYS_S = 0.005
"""How long a child has run that is no short one: another is to stand by in its place."""

_ENOUGH = 2
"""Children without walls before one is to stand by for the next: `run` has one."""


@dataclass(slots=True)
class Waiting:
    """A child that waits for its order; its descriptors are its own, the host's are here.

    Attributes:
        ident: the launchpad's number for it.
        pid: names the process only together with `create_time`.
        create_time: clock ticks since boot.
        address: where its order is to stand.
        pidfd: its own.
        line: by which the order goes to it.
    """

    ident: int
    pid: int
    create_time: int
    address: int
    pidfd: int
    line: _socket.socket

    def close(self) -> None:
        """Let it end."""
        os.close(self.pidfd)
        self.line.close()

    def give(
        self, made: bytes, sources: tuple[int, ...], applied: Applied
    ) -> Record | None:
        """Send it an order; None if it cannot be sent, and another is to be asked.

        Returns:
            What is known of it now: all but how its exec ends. Its descriptors are there.
        """
        rights = struct.pack(f"{len(sources)}i", *sources)
        control = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)
        try:
            self.line.sendmsg((made,), (control,), _FLAGS)
        except OSError:
            self.close()
            return None
        born = (self.pid, self.create_time, applied, -1, self.pidfd)
        record = Record(born=born, report=[self.line.detach()])
        record.started.set()
        return record


KNOWN_ORDERS = 16
"""Orders that are remembered, for what a child runs it runs again; with one more all are
forgotten."""

_KNOWN_BYTES = 4096
"""Longest one that is remembered, and that only for `_KNOWN_ADDRESSES`: 0.6 MiB in all,
with what they are known by."""

_KNOWN_ADDRESSES = 4


class KnownOrder:
    """An order, whatever descriptors it comes with, for whoever stands by.

    Attributes:
        applied: what its program runs in.
    """

    __slots__ = ("_made", "_order", "_shape", "applied")

    def __init__(self, request: SpawnRequest, shapes: calls.Shapes) -> None:
        body: tuple[Any, ...] = request.body()
        self._order = Order(body[-1])
        count = len(request.sources)
        self._order.fill(body, list(range(FIRST_RECEIVED, FIRST_RECEIVED + count)))
        self._shape = shapes.of(self._order)
        self._made: dict[int, bytes] = {}
        self.applied = calls.applied(self._order)

    def calls(self, address: int) -> bytes:
        """Return its calls, as they are to stand at an address."""
        made = self._made.get(address)
        if made is None:
            made = self._shape.calls(self._order, address)
            if len(self._made) >= _KNOWN_ADDRESSES:
                self._made.clear()
            self._made[address] = made
        return made


class KnownOrders:
    """Orders that came of late, as calls."""

    def __init__(self) -> None:
        self._shapes = calls.Shapes()
        self._known: dict[tuple[object, ...], KnownOrder] = {}

    def of(self, request: SpawnRequest, address: int) -> tuple[bytes, Applied]:
        """Return the calls of an order, and what its program runs in.

        Args:
            request: it.
            address: where its calls are to stand.

        Raises:
            SpawnError: as ``SpawnRequest.body``.
        """
        key = (
            request.executable,
            request.argv,
            *request.env.items(),
            *[target for _, target in request.fds],
            request.rlimits,
            request.umask,
            "rlimits" in request.layers,
        )
        known = self._known.get(key)
        if known is not None:
            return known.calls(address), known.applied
        known = KnownOrder(request, self._shapes)
        made = known.calls(address)
        if len(made) <= _KNOWN_BYTES:
            if len(self._known) >= KNOWN_ORDERS:
                self._known.clear()
            self._known[key] = known
        return made, known.applied


class Offers:
    """Whoever stands by for orders of this host."""

    def __init__(self) -> None:
        self._asked = 0
        self._enough = _ENOUGH
        self._offers: _socket.socket | None = None
        self._waiting: Waiting | None = None  # was looked at, and not used
        self._orders = KnownOrders()
        self._staying = 0
        self._stays = trio.Event()

    def asked(self) -> _socket.socket | None:
        """Take note of a child without walls for which nobody stood by.

        Returns:
            If somebody is to stand by from now on, what tells the launchpad so.
        """
        self._asked += 1
        if self._offers is not None or self._asked < self._enough:
            return None
        self._offers, theirs = _socket.socketpair(
            _socket.AF_UNIX, _socket.SOCK_SEQPACKET
        )
        return theirs

    def will_stay(self, ident: int) -> None:
        """Take note of a child that is its program, and not about to end."""
        if ident < 0:
            self._staying = ident
            self._stays.set()

    async def has_stayed(self) -> int:
        """Wait until a child that stood by has run for a while; return its number."""
        await self._stays.wait()
        # Not at once: it has something to do, and the host for it.
        await trio.sleep(_STAYS_S)
        self._stays = trio.Event()
        return self._staying

    def close(self) -> None:
        """Let nobody stand by any more."""
        if self._offers is not None:
            self._offers.close()
            self._offers = None
            self._asked = 0
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def descriptors(self) -> Iterator[int]:
        """Yield what this holds of the host's descriptors."""
        if self._offers is not None:
            yield self._offers.fileno()
        if self._waiting is not None:
            yield self._waiting.pidfd
            yield self._waiting.line.fileno()

    def take(self, request: SpawnRequest) -> tuple[int, Record] | None:
        """Give an order to one that stands by.

        Returns:
            Its number, and its record as that of one whose exec is under way; None if
            nobody stands by for such an order.

        Raises:
            SpawnError: as ``SpawnRequest.body``.
        """
        if self._offers is None or not _is_for_standby(request):
            return None
        while waiting := self._waiting or self._next():
            self._waiting = waiting
            made, applied = self._orders.of(request, waiting.address)
            if len(made) > ORDER_BYTES:
                break
            self._waiting = None
            record = waiting.give(made, request.sources, applied)
            if record is not None:
                return waiting.ident, record
        return None

    def _next(self) -> Waiting | None:
        """Look for one that stands by."""
        if self._offers is None:
            return None
        try:
            received = wire.receive_message(self._offers)
        except BlockingIOError:
            return None
        if received is None:  # the launchpad has nobody to offer any more
            self._enough *= 2  # it may never have: do not ask it all the time
            self.close()
            return None
        told, fds = received
        if len(fds) < _DESCRIPTORS:  # this process may open no more
            for fd in fds:
                os.close(fd)
            return None
        pidfd, line = fds
        ident, pid, create_time, address = told
        sock = _socket.socket(*_SEQPACKET, line)
        return Waiting(ident, pid, create_time, address, pidfd, sock)


def _is_for_standby(request: SpawnRequest) -> bool:
    return (
        request.layers.keys() <= calls.PLAIN_LAYERS
        and request.listener is None
        and max((target for _, target in request.fds), default=0) < FIRST_RECEIVED
    )
