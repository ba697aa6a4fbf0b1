r"""Output moved from pipe to file and socket within the kernel, its pages not copied.

    tool -> pipe -> splice(2) -> pipe of what is taken -> splice(2) -> file of the log
                                        \-> tee(2) -> pipe aside, framed -> splice(2) -> socket

The calls, and the pipes that they take.

Rules of this file.

1. A piece is taken from the tool's pipe before anything is done with it: that moves
   references to its pages, while the mover of a piece into a file has the pipe for itself
   until the last page is copied, and the tool cannot print.
2. A taken piece goes to the file alone, so after a failure it is still in the one or
   the other. It does not stay there: the log takes all of it before anybody else has a
   turn.
3. A page that waits in a socket is the tool's pipe's and is never written again; the file
   has a copy.
4. The frame of a piece lies around it in the pipe aside: the reader is woken up once.

Sources: tee(2), splice(2).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import termios
from typing import TYPE_CHECKING

from hostlib.linux.pipes import open_pipe, resize_pipe

if TYPE_CHECKING:
    import socket

SPLICED_BYTES = 262_144
"""Most that is moved at once: what a unix socket takes in one go."""

PIPE_BYTES = 524_288
"""The capacity of the tool's pipe: two pieces, so that the tool prints one while the
other is moved; and the pipe aside, for what frames a piece takes room too."""

_FRAME_PAGES = 2
"""A piece has a line before it and one after it, in a page each."""

_libc = ctypes.CDLL(None)
_libc.tee.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
_libc.tee.restype = ctypes.c_ssize_t


def waiting_in(pipe: int) -> int:
    """Return how many bytes a pipe or a terminal holds."""
    found = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, found)
    return found[0]


class Tap:
    """The pipe of a tool that prints much, with two more for what is taken from it.

    Args:
        pipe: the tool's, non-blocking; the caller's to close.

    Attributes:
        piece_bytes: most that is taken at once.

    Raises:
        OSError: no descriptors, no pipes that hold anything, or the tool's is none (a
            terminal).
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._fds: tuple[int, ...] = ()
        resize_pipe(pipe, PIPE_BYTES)
        self._taken, self._to_be_kept = self._open_pipe()
        try:
            self._out, self._in = self._open_pipe()
        except OSError:
            self.close()
            raise
        resize_pipe(self._to_be_kept, SPLICED_BYTES)
        resize_pipe(self._in, PIPE_BYTES)
        aside = fcntl.fcntl(self._in, fcntl.F_GETPIPE_SZ)
        framed = aside - _FRAME_PAGES * os.sysconf("SC_PAGESIZE")
        if framed <= 0:
            self.close()
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        self.piece_bytes = min(SPLICED_BYTES, framed)

    def _open_pipe(self) -> tuple[int, int]:
        pipe = open_pipe()
        self._fds += pipe
        return pipe

    def close(self) -> None:
        """Close the pipes that are not the tool's."""
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return self._fds

    def take(self, size: int) -> int:
        """Take what the tool's pipe holds; return how much, 0 at the end.

        Raises:
            BlockingIOError: there is nothing yet.
            OSError: pages cannot be moved out of it.
        """
        return os.splice(self._pipe, self._to_be_kept, min(size, self.piece_bytes))

    def set_aside(self, size: int, before: bytes, after: bytes) -> bool:
        """Put what was taken aside too, framed.

        Returns:
            False if it does not fit; ``forget_aside`` then.
        """
        try:
            os.write(self._in, before)
            if _libc.tee(self._taken, self._in, size, 0) != size:
                return False
            os.write(self._in, after)
        except OSError:  # there is less room than there was asked for
            return False
        return True

    def keep(self, fd: int, size: int, offset: int) -> int:
        """Move what was taken into a file; return how much.

        Raises:
            OSError: the file refused.
        """
        return os.splice(self._taken, fd, size, offset_dst=offset)

    def rest(self) -> bytes:
        """Return what was taken and could not be kept."""
        return _emptied(self._taken)

    def send(self, sock: socket.socket, size: int) -> int:
        """Move what was put aside to a socket; return how many bytes.

        Raises:
            BlockingIOError: the socket takes nothing at the moment.
            OSError: its other end is gone.
        """
        return os.splice(self._out, sock.fileno(), size)

    def forget_aside(self) -> None:
        """Empty the pipe aside."""
        _emptied(self._out)


def _emptied(pipe: int) -> bytes:
    """Return all that a pipe of this file holds."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(pipe, SPLICED_BYTES):
            parts.append(part)
    return b"".join(parts)
