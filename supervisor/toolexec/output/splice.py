r"""Moves output from pipe to file and socket within the kernel, without a copy.

    tool -> pipe -> splice(2) -> pipe of taken bytes -> splice(2) -> file of the log
                              \-> tee(2) -> pipe aside, framed -> splice(2) -> socket

1. A piece is taken from the tool's pipe first: splicing into a file would hold that
   pipe, and the tool, until the last page is copied.
2. A taken piece goes to the file alone: after a failure it is in one of the two. The
   log keeps all of it before another task runs.
3. A page in a socket is the pipe's and never written again; the file has a copy.
4. Its frame lies around it in the pipe aside: the reader wakes up once.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import termios
from typing import TYPE_CHECKING

from hostlib.linux.pipes import copy_pipe, open_pipe, resize_pipe

if TYPE_CHECKING:
    import socket

SPLICED_BYTES = 262_144
"""Most bytes of one move: the size of a unix socket's buffer."""

PIPE_BYTES = 524_288
"""Capacity of the tool's pipe: two pieces, so that the tool prints one while the other
is moved; the pipe aside has room for the frame, too."""

_FRAME_PAGES = 2
"""A line before and one after a piece, in a page each."""


def waiting_in(pipe: int) -> int:
    """Return the number of bytes in a pipe or a terminal."""
    found = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, found)
    return found[0]


class Tap:
    """The pipe of a tool with much output, with two more for taken pieces.

    Args:
        pipe: the tool's, non-blocking; the caller closes it.

    Attributes:
        piece_bytes: most bytes of a piece.

    Raises:
        OSError: no descriptors or pipe buffers are left, or the tool's output is a
            terminal.
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
        """Close the two pipes."""
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    def descriptors(self) -> tuple[int, ...]:
        """Return its descriptors of the host."""
        return self._fds

    def take(self, size: int) -> int:
        """Take the content of the tool's pipe; return its size, 0 at the end.

        Raises:
            BlockingIOError: it is empty.
            OSError: pages cannot be moved out of it.
        """
        return os.splice(self._pipe, self._to_be_kept, min(size, self.piece_bytes))

    def set_aside(self, size: int, before: bytes, after: bytes) -> bool:
        """Put the taken piece aside as well, with its frame.

        Returns:
            False if it does not fit; then call ``empty_aside``.
        """
        try:
            os.write(self._in, before)
            if copy_pipe(self._taken, self._in, size) != size:
                return False
            os.write(self._in, after)
        except OSError:  # less room than requested
            return False
        return True

    def keep(self, fd: int, size: int, offset: int) -> int:
        """Move taken bytes into a file; return their number.

        Raises:
            OSError: the file refused.
        """
        return os.splice(self._taken, fd, size, offset_dst=offset)

    def rest(self) -> bytes:
        """Return the taken bytes that were not kept."""
        return _empty(self._taken)

    def send(self, sock: socket.socket, size: int) -> int:
        """Move bytes from aside to a socket; return their number.

        Raises:
            BlockingIOError: the socket takes nothing now.
            OSError: its other end is gone.
        """
        return os.splice(self._out, sock.fileno(), size)

    def empty_aside(self) -> None:
        """Empty the pipe aside."""
        _empty(self._out)


def _empty(pipe: int) -> bytes:
    """Return the content of a pipe of this file."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(pipe, SPLICED_BYTES):
            parts.append(part)
    return b"".join(parts)
