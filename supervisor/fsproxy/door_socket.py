"""A child's door as a socket, for programs that were started without FD 3.

A listener in the child's own directory.

Rules of this file.

1. Connecting is ATTACH (spec N4): the same rights, accounts and bounds.
2. The directory is the child's alone, and the name in it is random: a nested child,
   which has Landlock and no mount namespace, can reach the directory and not list it.
   Lists of sockets have another name, that of the bind (proc(5), net/unix).
"""

from __future__ import annotations

import _socket
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.spec import ChildSpec

VARIABLE = "FSPROXY_SOCKET"
"""The variable with its path."""

BACKLOG = 64
"""Connections that may wait: as many as a child may have clients."""

_RANDOM_BYTES = 6
"""12 characters: 13 fit into a path that a client can use (ADR 38). Trying 2**48 names
takes years at one a microsecond."""

_BOUND_NAME = ".door"
_MODE = 0o600
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class DoorSocket:
    """The socket to which one child's programs connect.

    Args:
        spec: that of the child; it has a ``run_dir``.
        name: in that directory.
        listener: non-blocking; owned.
    """

    def __init__(self, spec: ChildSpec, name: str, listener: _socket.socket) -> None:
        self._spec = spec
        self.listener = listener
        self.name = name

    @property
    def path(self) -> str:
        """Its path in the child's view."""
        return f"{self._spec.run_dir}/{self.name}"

    @property
    def fd(self) -> int:
        """The listener's descriptor; -1 once it is closed."""
        return self.listener.fileno()

    def close(self) -> None:
        """Refuse new connections, and remove the name."""
        if self.fd < 0:
            return
        self.listener.close()
        # The child may have removed it from its own directory.
        with suppress(OSError), self._spec.run_dir_held() as held:
            os.unlink(self.name, dir_fd=held)


def has_door_socket(spec: ChildSpec) -> bool:
    """Return whether a child gets a socket: it has a place for it and may use it."""
    return spec.run_dir is not None and spec.sandbox.unix_sockets


def open_door_socket(spec: ChildSpec) -> DoorSocket:
    """Listen in a child's own directory.

    Raises:
        OSError: no descriptor is left for it, or the directory is gone.
    """
    name = os.urandom(_RANDOM_BYTES).hex()
    kind = _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
    listener = _socket.socket(_socket.AF_UNIX, kind)
    try:
        os.fchmod(listener.fileno(), _MODE)  # its file gets it: unix(7)
        with spec.run_dir_held() as held:
            # By the directory's descriptor: its path may be too long for sun_path.
            listener.bind(f"/proc/self/fd/{held}/{_BOUND_NAME}")
            os.rename(_BOUND_NAME, name, src_dir_fd=held, dst_dir_fd=held)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return DoorSocket(spec, name, listener)


def peer_pid(sock: socket.socket) -> int | None:
    """Return the process that connected; None if this host has no number for it."""
    size = _CREDENTIALS.size
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = _CREDENTIALS.unpack(said)[0]
    return pid or None
