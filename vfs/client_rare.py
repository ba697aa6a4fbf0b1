"""What few requests need: waiting on non-blocking descriptors, and receiving one.

``_socket`` is what ``socket`` is made of, without the enumerations that take ten times
as long to import.
"""

import _socket
import os
import select
from fcntl import F_DUPFD_CLOEXEC, fcntl


def wait(fd: int, *, writable: bool) -> None:
    """Wait for a descriptor that somebody who shares it made non-blocking."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT if writable else select.POLLIN)
    poll.poll()


def receive_passed(fd: int, size: int, passed: list[int]) -> bytes:
    """Receive bytes and the descriptor that comes with them (spec N4).

    Args:
        fd: a socket.
        size: most bytes.
        passed: takes the descriptor, close-on-exec.  There is room for one: the kernel
            closes what else was sent.
    """
    while True:
        try:
            return receive_passed_nowait(fd, size, passed)
        except BlockingIOError:
            wait(fd, writable=False)


def receive_passed_nowait(fd: int, size: int, passed: list[int]) -> bytes:
    """Do the same, once.

    Raises:
        BlockingIOError: the socket is non-blocking and nothing has come.
    """
    sock = _socket.socket(fileno=fd)
    try:
        data, control, _, _ = sock.recvmsg(
            size, _socket.CMSG_LEN(4), _socket.MSG_CMSG_CLOEXEC
        )
    finally:
        sock.detach()
    for level, kind, payload in control:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            passed.extend(map(above_stdio, memoryview(payload).cast("i")))
    return data


def above_stdio(fd: int) -> int:
    """Return the descriptor, moved if it took the place of a closed standard stream.

    Else a program that was started without standard output would print into it.
    """
    if fd > 2:
        return fd
    try:
        return fcntl(fd, F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)
