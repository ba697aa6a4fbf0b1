"""User namespaces that only say how a mount shows the owners of its files.

For a user that children become, a namespace in which root's files are that user's, held
by a descriptor of the launchpad.

Rule: made once for each user, for it takes a process to make one (about 1 ms); the host
gives a user to another child when the first is gone.
"""

from __future__ import annotations

import _socket
import os

from hostlib.linux import namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_HIGHEST = 0xFFFFFFFE  # of user numbers; the last one means "none"

_held: dict[tuple[int, int], int] = {}


def owners_of(uid: int, owner: int = 0) -> int:
    """Return a descriptor of the namespace that shows an owner's files as a user's.

    The two numbers change places, all others stay as they are.

    Args:
        uid: the user's number.
        owner: the other one, root's if nothing is said.

    Raises:
        OSError: this machine lets nobody make one.
    """
    pair = (min(uid, owner), max(uid, owner))
    if pair not in _held:
        _held[pair] = _make(*pair)
    return _held[pair]


def _make(low: int, high: int) -> int:
    """Return a descriptor of a new namespace in which two numbers change places."""
    ours, theirs = _socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        _live_in_namespace(ours, theirs)
    theirs.close()
    fd = -1
    try:
        if ours.recv(1):
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{pid}/{name}", _swap(low, high).encode())
            fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        ours.close()
        _, status = os.waitpid(pid, 0)
    if fd < 0:
        raise OSError(os.waitstatus_to_exitcode(status), "no user namespace")
    return fd


def _live_in_namespace(parents: _socket.socket, own: _socket.socket) -> NoReturn:
    """Enter a new user namespace, tell so, and end when the parent closes its end."""
    try:
        parents.close()
        namespaces.unshare(namespaces.NEW_USER)
        own.send(b"+")
        own.recv(1)
    except OSError as error:
        os._exit((error.errno or 1) & 127)
    finally:
        os._exit(0)


def _swap(low: int, high: int) -> str:
    """Return the map in which two numbers change places (user_namespaces(7))."""
    if low == high:
        return f"0 0 {_HIGHEST + 1}"
    rows = (
        (0, 0, low),
        (low, high, 1),
        (low + 1, low + 1, high - low - 1),
        (high, low, 1),
        (high + 1, high + 1, _HIGHEST - high),
    )
    return "\n".join(f"{a} {b} {count}" for a, b, count in rows if count > 0)


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
