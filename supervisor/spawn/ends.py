"""The two ends of a child's door: one for the child, one for the host."""

from __future__ import annotations

import _socket
import contextlib
import os
import socket

from hostlib.readiness import wait_writable
from protocol.door import DOOR_NAME


class Ends:
    """Both ends of a child's door (spec T1): a socketpair, or two pipes.

    With pipes a socketpair on FD 5 carries the descriptors of ATTACH (spec N4).

    Attributes:
        env: the variables that tell the child its descriptors.
        side: the host's end of that socketpair.
    """

    def __init__(
        self,
        transport: str | None,
        dialect: int = 2,
        side: socket.socket | None = None,
    ) -> None:
        self._child: list[int] = []
        self._host: tuple[int, ...] = ()
        self.side = side
        self.env: dict[str, str] = {}
        if transport is None:
            return
        numbers = "3,4,5" if transport == "pipes" else "3"
        self.env = {"FSPROXY_FD": numbers, "FSPROXY_VERSION": str(dialect)}
        if transport == "pipes":
            replies_out, replies_in = os.pipe2(os.O_CLOEXEC)
            self._child.append(replies_out)
            requests_out, requests_in = os.pipe2(os.O_CLOEXEC)
            self._child.append(requests_in)
            side, theirs = socket.socketpair()
            name_end(side)
            self._child.append(theirs.detach())
            self.side = side
            self._host = (requests_out, replies_in)
        else:
            # Not `socket.socketpair`, which asks each for its name.
            door, childs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
            name_end(door)
            self._child.append(childs.detach())
            self._host = (door.detach(),)
        for fd in self._host:
            os.set_blocking(fd, False)

    @classmethod
    def handed_over(cls, side: socket.socket | None) -> Ends:
        """Return what is left of them when the child runs and its session has its own.

        Args:
            side: the host's end of the socketpair beside two pipes.
        """
        return cls(None, side=side)

    def close(self) -> None:
        """Close the descriptors that no child or service took over."""
        self.close_child_ends()
        for fd in self._host:
            os.close(fd)
        if self.side is not None:
            self.side.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of both ends that this still owns, and the side socket."""
        side = -1 if self.side is None else self.side.fileno()
        return (*self._child, *self._host, *((side,) if side >= 0 else ()))

    def host_fds(self) -> tuple[int, int]:
        """Hand the host's (read, write) descriptors to a session, which owns them."""
        fds, self._host = self._host, ()
        return fds[0], fds[-1]

    def child_fds(self) -> tuple[tuple[int, int], ...]:
        """Return (descriptor, number in the child) pairs."""
        return tuple((fd, 3 + index) for index, fd in enumerate(self._child))

    def close_child_ends(self) -> None:
        """Close the host's copies of the child's end, or EOF never comes (spec T2)."""
        while self._child:
            os.close(self._child.pop())


def name_end(sock: _socket.socket) -> None:
    """Name the host's end of a door, which identifies the other (``DOOR_NAME``)."""
    with contextlib.suppress(OSError):  # a kernel without abstract names
        sock.bind(DOOR_NAME + os.urandom(8).hex().encode())


async def send_fds(sock: socket.socket, data: bytes, fds: list[int]) -> int:
    """Send bytes with descriptors on the first; return how many bytes were taken.

    Raises:
        OSError: the other end is gone.
    """
    while True:
        try:
            return socket.send_fds(sock, [data], fds, socket.MSG_DONTWAIT)
        except BlockingIOError:
            await wait_writable(sock)
