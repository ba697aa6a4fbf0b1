"""A child that stands by: it has made its first calls, and waits for an order's.

What it is: the start of one, and what an order may be for it. What it is not: a child in
walls, which waits forked (``launchpad.stock``); giving it its order, which is the host's
(``supervisor.standby``).

Rules:
 1. Its order does not come from the launchpad: the host sends the rest of its calls, and
    what they point at, to straight behind those it has made. The launchpad does not hear
    of that, and so does not wake up where the program is about to run. It hears of it with
    the next child without walls that it starts, or when it is told, or by the death.
    It tells the end of each, whether it ever had an order or not.
 2. Whoever stands by holds two descriptors beside the standard ones: the line by which
    its order comes, and the pipe that ends with its exec. What it receives has the
    numbers from `FIRST_RECEIVED` on; smaller ones are an order's targets, and until then
    nothing but copies of the null device.
 3. A line that is closed without an order lets it end.
 4. One at a time: it is made when nobody waits for the launchpad.

Why so: ADR 75.
"""

from __future__ import annotations

import _socket
import ctypes
import fcntl
import os
import struct

from supervisor.launchpad import calls, life, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from supervisor.launchpad.family import Child
    from supervisor.launchpad.vfork import CallList, Starter

FIRST_RECEIVED = 16
"""The number that the first descriptor of an order has; the next ones follow."""

MOST_RECEIVED = 1 + FIRST_RECEIVED
"""Descriptors that an order may have: the working directory, and one a target."""

_FIRST_KEPT = FIRST_RECEIVED + MOST_RECEIVED

ORDER_BYTES = 24_576
"""Calls and texts that an order may have."""

_NAME = ctypes.create_string_buffer(b"sandhost-stock")

# struct iovec, struct msghdr, and a control message with `MOST_RECEIVED` descriptors, of
# 64-bit machines.
_IOVEC = struct.Struct("2Q")
_HEADER = struct.Struct("QI4xQQQQi4x")
_RESULT_BYTES = 8
_RIGHTS_BYTES = 16 + 4 * MOST_RECEIVED


class Standby:
    """Who stands by, and where the host hears of that.

    Attributes:
        child: it, until it is known to be its program, or to have ended.
    """

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self._offers: _socket.socket | None = None
        self.child: Child | None = None
        self._last_ident = 0

    def begin(self, offers: int) -> None:
        """Let somebody stand by from now on.

        Args:
            offers: where the host looks for whom it can give an order; this one's now.
        """
        self.end()
        self._offers = _socket.socket(
            _socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, offers
        )

    def end(self) -> None:
        """Let nobody stand by any more; who does so has ended, or will when it is told."""
        if self._offers is not None:
            self._offers.close()
            self._offers = None

    @property
    def is_wanted(self) -> bool:
        """Whether somebody is to be started who stands by."""
        return self._offers is not None and self.child is None

    def make(self) -> Child | None:
        """Start a child that stands by; None if this machine lets nobody do so.

        Raises:
            OSError: there is no process or descriptor to be had.
        """
        try:
            self.child = child = stand_by(self._starter)
        except OSError:
            self.end()
            raise
        if child is None:
            self.end()
            return None
        self._last_ident -= 1
        child.ident = self._last_ident
        return child

    def tell(self, child: Child) -> None:
        """Tell the host of it, when it looks for one."""
        facts = (child.ident, child.pid, child.create_time, child.orders_at)
        fds = child.taken()
        try:
            if self._offers is not None:
                wire.send_message(self._offers, facts, fds)
        except OSError:  # nobody looks there (any more); the child ends by that
            self.end()
        finally:
            for fd in fds:
                os.close(fd)

    def is_over(self, child: Child) -> None:
        """Take note that a child is its program, or has ended."""
        if child is not self.child:
            return
        self.child = None
        # What the last of its own calls has returned: the size of its order.
        received = ctypes.c_int64.from_address(child.orders_at - _RESULT_BYTES)
        if child.failure is not None and received.value <= 0:
            self.end()  # a filter: the next one would fail as well


def stand_by(starter: Starter) -> Child | None:
    """Start a child that stands by.

    Returns:
        Its `exec_end` is the host's end of its line, its `orders_at` is where an order is
        to stand; None if this machine lets nobody begin so.

    Raises:
        OSError: there is no process or descriptor to be had.
    """
    ours, pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    used, line, child = [pipe], -1, None
    try:
        host, waiting = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        host.setblocking(False)
        line = host.detach()
        used.append(waiting.detach())
        # Out of the way of what is received; the numbers are the same over there. What
        # was closed last ends first: who hears the line end finds that the pipe has.
        for fd in (used[1], pipe):
            used += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_KEPT)]
        *_, kept_line, kept_pipe = used
        made, orders_at = _calls(starter, kept_line, kept_pipe)
        child = starter.begin(life.STANDING_BY, made, ours)
        if child is not None:
            child.exec_end, child.orders_at = line, orders_at
    finally:
        for fd in used:
            os.close(fd)
        if child is None:
            os.close(ours)
            if line >= 0:
                os.close(line)
    return child


def _calls(starter: Starter, line: int, pipe: int) -> tuple[CallList, int]:
    """Return the calls of one that stands by, and where its order is to stand."""
    made = starter.new_list(line)
    first = calls.FIRST + calls.name(ctypes.addressof(_NAME))
    first += calls.keep(tuple(sorted((line, pipe))), FIRST_RECEIVED)
    # Behind the order, so that where that stands depends on the first calls alone.
    room = len(first) + calls.CALL_BYTES
    orders_at = made.address + room
    at = made.address + room + ORDER_BYTES
    vector = at + _HEADER.size
    rights = vector + _IOVEC.size
    header = _HEADER.pack(0, 0, vector, 1, rights, _RIGHTS_BYTES, 0)
    made.write(0, first + calls.receive(line, at) + calls.LEAVE)
    made.write(room + ORDER_BYTES, header + _IOVEC.pack(orders_at, ORDER_BYTES))
    return made, orders_at
