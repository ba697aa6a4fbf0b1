"""What a child without walls does before it is its program, as a list of system calls.

What it is: the calls, their form in memory, and which of them has failed. What it is not:
starting anybody, which is ``launchpad.vfork``; whoever makes the list runs `LISTING` there.

Rules:
 1. The first calls are the same for all and need no order; the others are an order's, and
    are made by who has it: the launchpad, or the host itself (``supervisor.standby``).
 2. A list ends with the exec, or with the first call that fails. Beside each call stands
    what it returned, 0 before that.
 3. Limits come late: a small RLIMIT_NOFILE must bind the program, not what prepares it.
 4. Whose calls they are does not matter for what they mean: what is reported as applied
    was done by calls that have succeeded.
"""

from __future__ import annotations

# `signal` imports `enum`: 4 ms of a start that takes 9.
import _signal  # type: ignore[import-not-found]
import ctypes
import struct
from itertools import accumulate

from supervisor.launchpad.kernel import (
    CLOSE_RANGE_CLOEXEC,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NAME,
    PR_SET_PDEATHSIG,
    SIGNAL_SET,
    SYS_CLOSE_RANGE,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.launchpad.order import Order

    Call = tuple[int, ...]

PLAIN_LAYERS = frozenset({"rlimits"})
"""The layers that need nothing but system calls which are known beforehand."""

CALL_BYTES = 64
"""A call: its number, six arguments, and room for what it returns."""

LAST_FD = 0xFFFFFFFF

# <asm/unistd.h> of x86-64.
_RT_SIGPROCMASK, _DUP2, _RECVMSG, _EXECVE, _FCHDIR, _UMASK = 14, 33, 47, 59, 81, 95
_SETSID, _PRCTL, _EXIT_GROUP, _PRLIMIT64 = 112, 157, 231, 302
# <linux/socket.h>
_MSG_CMSG_CLOEXEC = 0x40000000

_STAGES = {
    _RT_SIGPROCMASK: "signals",
    _SETSID: "session",
    _FCHDIR: "cwd",
    _UMASK: "umask",
    SYS_CLOSE_RANGE: "descriptors",
    _DUP2: "descriptors",
    _PRLIMIT64: "rlimit",
    _RECVMSG: "order",
    _EXECVE: "exec",
}
_PRCTL_STAGES = {
    PR_SET_CHILD_SUBREAPER: "subreaper",
    PR_SET_PDEATHSIG: "pdeathsig",
    PR_SET_NAME: "fork",
}
"""Which row of ``launchpad.child.STEPS`` a call does, by its number or its option."""

_CALL = struct.Struct("7Qq")
_DONE = struct.Struct("2Q40xq")
_LAST = frozenset({_EXECVE, _EXIT_GROUP})
_WORDS = 8
_RLIMIT = struct.Struct("2Q")
_POINTER_BYTES = 8
_UNSIGNED = 0xFFFFFFFFFFFFFFFF

_NO_SIGNALS = ctypes.create_string_buffer(SIGNAL_SET.pack(0))


def packed(*call: int) -> bytes:
    """Return a call as it stands in memory."""
    return _CALL.pack(*call, *(0,) * (_WORDS - len(call)))


def _first() -> Iterator[bytes]:
    nobody = ctypes.addressof(_NO_SIGNALS)
    yield packed(_RT_SIGPROCMASK, _signal.SIG_SETMASK, nobody, 0, SIGNAL_SET.size)
    yield packed(_SETSID)
    yield packed(_PRCTL, PR_SET_CHILD_SUBREAPER, 1)
    # If the launchpad died before this, the host ends what is left beneath it.
    yield packed(_PRCTL, PR_SET_PDEATHSIG, int(_signal.SIGKILL))


FIRST = b"".join(_first())
"""What everybody begins with, in the launchpad's memory."""

LEAVE = packed(_EXIT_GROUP, 0)
"""Ends who has nothing more to do."""


def keep(fds: tuple[int, ...], free: int) -> bytes:
    """Return the calls that close all but the standard descriptors and `fds`.

    And those that take the numbers below `free`, so that what is received has others.

    Args:
        fds: in ascending order, from `free` on.
        free: the number that what is received first has; there is room from here to the
            first of `fds`.
    """
    calls, begin = [], 3
    for fd in (*fds, LAST_FD + 1):
        if begin < fd:
            calls.append(packed(SYS_CLOSE_RANGE, begin, fd - 1, 0))
        begin = fd + 1
    # What an order puts in its place must not take the place of what is to follow.
    calls += [packed(_DUP2, 0, number) for number in range(3, free)]
    return b"".join(calls)


def name(address: int) -> bytes:
    """Return the call that names the process for ps(1); 15 bytes and a 0 stand there."""
    return packed(_PRCTL, PR_SET_NAME, address)


def receive(line: int, message: int) -> bytes:
    """Return the call that waits for one message: struct msghdr stands at `message`."""
    return packed(_RECVMSG, line, message, _MSG_CMSG_CLOEXEC)


class Shape:
    """What is the same for orders with the same descriptors and umask.

    Args:
        order: complete, and of `PLAIN_LAYERS` at most.
    """

    __slots__ = ("_calls", "_count")

    def __init__(self, order: Order) -> None:
        calls = [packed(_FCHDIR, order.cwd_fd)]
        if order.umask is not None:
            calls.append(packed(_UMASK, order.umask))
        calls.append(packed(SYS_CLOSE_RANGE, 0, LAST_FD, CLOSE_RANGE_CLOEXEC))
        for source, target in zip(order.sources, order.targets, strict=True):
            calls.append(packed(_DUP2, source, target))
        self._calls = b"".join(calls)
        self._count = len(calls)

    def calls(self, order: Order, address: int) -> bytes:
        """Return the calls of an order, and all that they point at behind them.

        Args:
            order: of this shape.
            address: where these bytes will stand.
        """
        limits = order.rlimits
        at = address + CALL_BYTES * (self._count + len(limits) + 1)
        made, values = [self._calls], []
        for which, soft, hard in limits:
            made.append(packed(_PRLIMIT64, 0, which, at))
            values.append(_RLIMIT.pack(soft & _UNSIGNED, hard & _UNSIGNED))
            at += _RLIMIT.size
        argv = order.argv
        env = [key + b"=" + value for key, value in order.env.items()]
        texts = (*argv, *env, order.executable)
        lists = struct.Struct(f"{len(texts) + 1}Q")  # each ends with a 0
        places = tuple(
            accumulate((len(text) + 1 for text in texts), initial=at + lists.size)
        )
        count = len(argv)
        environ = at + _POINTER_BYTES * (count + 1)
        made.append(packed(_EXECVE, places[-2], at, environ))
        pointers = lists.pack(*places[:count], 0, *places[count:-2], 0)
        return b"".join((*made, *values, pointers, b"\0".join(texts), b"\0"))


_KNOWN = 64
"""Shapes that are remembered. Received descriptors have the same numbers each time, but
for those who start beside others."""


class Shapes:
    """The shapes of orders that came of late."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Shape] = {}

    def of(self, order: Order) -> Shape:
        """Return the shape of an order, which most often another one has had."""
        key = (order.cwd_fd, order.umask, order.targets, *order.sources)
        shape = self._known.get(key)
        if shape is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            shape = self._known[key] = Shape(order)
        return shape


def applied(order: Order) -> tuple[tuple[str, str], ...]:
    """Return (layer, detail) of what a program runs in, if each of its calls goes well."""
    return (
        ("session", "own"),
        *order.limits_said(len(order.rlimits)),
        order.fds_said(),
    )


def fault(memory: ctypes.Array[ctypes.c_char], start: int) -> tuple[int, str] | None:
    """Return the errno and the stage of the call that failed; None if none did.

    Args:
        memory: whose process has become its program, or has ended.
        start: of the first call.
    """
    while True:
        number, first, result = _DONE.unpack_from(memory, start)
        if result < 0:
            return -result, _STAGES.get(number) or _PRCTL_STAGES.get(first, "fork")
        if number in _LAST:
            return None
        start += CALL_BYTES
