r"""Output moved from pipe to file and socket within the kernel, its pages not copied.

    tool -> pipe -> splice(2) -> file of the log
               \-> tee(2) -> pipe aside, framed -> splice(2) -> socket of the live reader

What it is: the calls, and the second pipe that they take.  What it is not: who gets what
and how much of it; that is the log's affair (``outputlog``).

Rules of this file.

1. What the tool's pipe holds is taken from it by the file alone, so whatever fails is
   still in the one or the other.
2. A page that waits in a socket is the tool's pipe's and is never written again; the file
   has a copy.
3. What goes around a piece lies around it in the pipe aside: the reader is woken up once.

Sources: tee(2), splice(2).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

SPLICED_BYTES = 262_144
"""Most that is moved at once: what a unix socket takes in one go."""

PIPE_BYTES = 524_288
"""What both pipes are made to hold: two pieces, so that the tool prints one while the
other is moved."""

_libc = ctypes.CDLL(None)
_libc.tee.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
_libc.tee.restype = ctypes.c_ssize_t


def waiting_in(pipe: int) -> int:
    """Return how many bytes a pipe or a terminal holds."""
    found = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, found)
    return found[0]


class Tap:
    """The pipe of a tool that prints much, with one aside of it.

    Args:
        pipe: the tool's, non-blocking; the caller's to close.

    Raises:
        OSError: no descriptors, or the pipe is none (a terminal).
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._out, self._in = -1, -1
        with contextlib.suppress(OSError):  # EPERM: the user's share of pipes is used
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # what frames a piece takes room too
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, 2 * size)

    def close(self) -> None:
        """Close the pipe aside."""
        for fd in self.descriptors():
            os.close(fd)
        self._out = self._in = -1

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return () if self._out < 0 else (self._out, self._in)

    def waiting(self) -> int:
        """Return how many bytes the tool's pipe holds."""
        return waiting_in(self._pipe)

    def set_aside(self, size: int, before: bytes, after: bytes) -> bool:
        """Put a piece that waits in the tool's pipe aside too, framed.

        Returns:
            False if it does not fit; ``forget_aside`` then.
        """
        try:
            os.write(self._in, before)
            if _libc.tee(self._pipe, self._in, size, 0) != size:
                return False
            os.write(self._in, after)
        except OSError:  # there is less room than there was asked for
            return False
        return True

    def keep(self, fd: int, size: int, offset: int) -> int:
        """Move what the tool's pipe holds into a file; return how much, 0 at the end.

        Raises:
            BlockingIOError: there is nothing yet.
            OSError: the file refused.
        """
        return os.splice(self._pipe, fd, size, offset_dst=offset)

    def send(self, sock: socket.socket, size: int) -> int:
        """Move what was put aside to a socket; return how many bytes.

        Raises:
            BlockingIOError: the socket takes nothing at the moment.
            OSError: its other end is gone.
        """
        return os.splice(self._out, sock.fileno(), size)

    def forget_aside(self) -> None:
        """Empty the pipe aside."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._out, SPLICED_BYTES):
                pass
