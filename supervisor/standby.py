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


class Offers:
    """Whoever stands by for orders of this host."""

    def __init__(self) -> None:
        self._asked = 0
        self._enough = _ENOUGH
        self._offers: _socket.socket | None = None
        self._waiting: Waiting | None = None  # was looked at, and not used
        self._shapes = calls.Shapes()
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

    def take(
        self, body: tuple[Any, ...], sources: tuple[int, ...]
    ) -> tuple[int, Record] | None:
        """Give an order to one that stands by.

        Args:
            body: of a SPAWN of ``launchpad.wire``.
            sources: the descriptors that go with it.

        Returns:
            Its number, and its record as that of one whose exec is under way; None if
            nobody stands by for such an order.
        """
        if self._offers is None or not _is_for_standby(body):
            return None
        order = Order(body[-1])
        received = range(FIRST_RECEIVED, FIRST_RECEIVED + len(sources))
        order.fill(body, list(received))
        shape = self._shapes.of(order)
        while waiting := self._waiting or self._next():
            made = shape.calls(order, waiting.address)
            if len(made) > ORDER_BYTES:
                self._waiting = waiting
                break
            self._waiting = None
            record = waiting.give(made, sources, calls.applied(order))
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


def _is_for_standby(body: tuple[Any, ...]) -> bool:
    *_, targets, _, _, layers = body
    return (
        layers.keys() <= calls.PLAIN_LAYERS and max(targets, default=0) < FIRST_RECEIVED
    )
