"""The door's socket: the connection of a program whose FD 3 is not the door.

Python's subprocess closes FD 3 in its children, and Node puts a channel of its own there.
Such a program connects to ``FSPROXY_SOCKET``.  ``_socket``: see ``vfs.client.waiting``.

Rules of this file.

1. A process has one such connection, as it has one FD 3: all its clients, and its forks,
   share it by turns.
2. The next client replaces an ended connection under the same number.
"""

from __future__ import annotations

import _socket
import os
from fcntl import F_DUPFD_CLOEXEC, F_GETSIG, fcntl

from protocol.door import DOOR_NAME
from vfs.client.turn import UNDER_WAY, client_errors

VARIABLE = "FSPROXY_SOCKET"

_SUN_PATH_BYTES = 107
"""Room for a path in unix(7)."""


class _Connection:
    """The connection of this process; -1 before the first."""

    __slots__ = ("fd", "identity")

    def __init__(self) -> None:
        self.fd = -1
        self.identity = (-1, -1)

    def is_usable(self, *, is_taken: bool) -> bool:
        """Return whether it can begin a request, or is in a request of this process."""
        if self.fd < 0:
            return False
        try:
            if _identity(self.fd) != self.identity:
                return False  # it was closed, and the number reused
            return is_taken or (
                fcntl(self.fd, F_GETSIG) != UNDER_WAY and not _has_ended(self.fd)
            )
        except OSError:
            return False

    def renew(self, path: str) -> None:
        """Connect again, under the same number."""
        fd = _connect(path)
        if self.fd >= 0 and _is_open_as(self.fd, self.identity):
            os.dup2(fd, self.fd, inheritable=False)
            os.close(fd)
            fd = self.fd
        self.fd, self.identity = fd, _identity(fd)


_OWN = _Connection()


def is_door(fd: int) -> bool:
    """Return whether a descriptor is a connection to a host or a relay."""
    try:
        sock = _socket.socket(fileno=fd)
    except (OSError, OverflowError):
        return False
    try:
        name = sock.getpeername()
    except OSError:
        return False
    finally:
        sock.detach()
    return isinstance(name, bytes) and name.startswith(DOOR_NAME)


def own_connection(path: str, *, is_taken: bool) -> int:
    """Return this process's connection by the socket; connect if there is none.

    Args:
        path: path of the socket.
        is_taken: a thread of this process is in the middle of a request.

    Raises:
        NotAChildError: no host listens there.
    """
    if not _OWN.is_usable(is_taken=is_taken):
        try:
            _OWN.renew(path)
        except OSError as why:
            text = f"descriptor 3 is not the host's, and {VARIABLE}={path!r}"
            raise client_errors().not_a_child(f"{text}: {why.strerror}") from None
    return _OWN.fd


def _connect(path: str) -> int:
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        if len(os.fsencode(path)) <= _SUN_PATH_BYTES:
            sock.connect(path)
        else:
            parent, _, name = path.rpartition("/")
            held = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{held}/{name}")
            finally:
                os.close(held)
        if sock.fileno() <= 2:  # the place of a closed standard stream
            return fcntl(sock.fileno(), F_DUPFD_CLOEXEC, 3)
        return sock.detach()
    finally:
        sock.close()


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _is_open_as(fd: int, identity: tuple[int, int]) -> bool:
    try:
        return _identity(fd) == identity
    except OSError:
        return False


def _has_ended(fd: int) -> bool:
    """Return whether the host has closed its end, and all its bytes were read."""
    sock = _socket.socket(fileno=fd)
    try:
        return not sock.recv(1, _socket.MSG_PEEK | _socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    finally:
        sock.detach()
