"""Waits on non-blocking descriptors, and receives descriptors; rarely needed.

``_socket`` is ``socket`` without its enums, which take ten times as long to import.
"""

from __future__ import annotations

import _socket
import os
import select
from fcntl import F_DUPFD_CLOEXEC, fcntl

from vfs.client.turn import client_errors

TYPE_CHECKING = False  # see vfs.client.connection
if TYPE_CHECKING:
    from collections.abc import Iterable

NO_ROOM = -1
"""Stands for a received descriptor for which this process had no number left."""


def wait(fd: int, *, writable: bool) -> None:
    """Wait for a descriptor that another user of it has made non-blocking."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT if writable else select.POLLIN)
    poll.poll()


def receive_passed(fd: int, size: int, passed: list[int]) -> bytes:
    """Receive bytes and the descriptor that comes with them (spec N4).

    Args:
        fd: a socket.
        size: most bytes.
        passed: a list for the descriptor, close-on-exec, or ``NO_ROOM``.  The kernel
            closes any further ones.
    """
    while True:
        try:
            return receive_passed_nowait(fd, size, passed)
        except BlockingIOError:
            wait(fd, writable=False)


def receive_passed_nowait(fd: int, size: int, passed: list[int]) -> bytes:
    """Receive as ``receive_passed``, without waiting on a non-blocking socket.

    Raises:
        BlockingIOError: nothing has come.
    """
    sock = _socket.socket(fileno=fd)
    try:
        data, control, flags, _ = sock.recvmsg(
            size, _socket.CMSG_LEN(4), _socket.MSG_CMSG_CLOEXEC
        )
    finally:
        sock.detach()
    passed.extend(passed_descriptors(control, flags))
    return data


def passed_descriptors(
    control: Iterable[tuple[int, int, bytes]], flags: int
) -> list[int]:
    """Return the descriptors that came with a message, or ``NO_ROOM`` for one.

    Args:
        control: from recvmsg(2), with room for one descriptor.
        flags: from recvmsg(2).
    """
    found: list[int] = []
    for level, kind, payload in control:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            found.extend(map(_above_stdio, memoryview(payload).cast("i")))
    # MSG_CTRUNC although there was room: the kernel had no number for it (unix(7)).
    return found or [NO_ROOM] if flags & _socket.MSG_CTRUNC else found


def check_passed(passed: list[int]) -> tuple[int, ...]:
    """Return the descriptors that came with the reply to an ATTACH.

    Raises:
        FsProxyError: ``EMFILE``: this process had no number left for one.
    """
    if NO_ROOM in passed:
        raise client_errors().no_descriptor_left()
    return tuple(passed)


def _above_stdio(fd: int) -> int:
    """Return a descriptor above 2, moved if needed.

    A program that was started without standard output would print into it.
    """
    if fd > 2:
        return fd
    try:
        return fcntl(fd, F_DUPFD_CLOEXEC, 3)
    except OSError:
        return NO_ROOM
    finally:
        os.close(fd)
