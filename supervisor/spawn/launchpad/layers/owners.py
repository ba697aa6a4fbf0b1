"""User namespaces that only say how a mount shows the owners of its files.

For a user that children become, a namespace in which root's files are that user's, held
by a descriptor of the launchpad.

Rule: made once for each user, for it takes a process to make one (about 1 ms); the host
gives a user to another child when the first is gone.
"""

from __future__ import annotations

import os

from hostlib.linux import namespaces

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
    ready_out, ready_in = os.pipe2(os.O_CLOEXEC)
    stay_out, stay_in = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(stay_in)
            namespaces.unshare(namespaces.NEW_USER)
            os.write(ready_in, b"+")
            os.read(stay_out, 1)
        except OSError as error:
            os._exit((error.errno or 1) & 127)
        finally:
            os._exit(0)
    for fd in (ready_in, stay_out):
        os.close(fd)
    fd = -1
    try:
        if os.read(ready_out, 1):
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{pid}/{name}", _swap(low, high).encode())
            fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_out)
        os.close(stay_in)
        _, status = os.waitpid(pid, 0)
    if fd < 0:
        raise OSError(os.waitstatus_to_exitcode(status), "no user namespace")
    return fd


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
