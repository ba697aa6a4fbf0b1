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

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

from hostlib.linux.pipes import Pipe, copy_pipe, open_pipe, resize_pipe

if TYPE_CHECKING:
    import socket

SPLICED_BYTES = 262_144
"""Most bytes of one move: the size of a unix socket's buffer."""

PIPE_BYTES = 524_288
"""Capacity of the tool's pipe: two pieces, so that the tool prints one while the other
is moved; the pipe aside has room for the frame, too."""

_FRAME_PAGES = 2
"""A line before and one after a piece, in a page each."""


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
        self._open: tuple[Pipe, ...] = ()
        resize_pipe(pipe, PIPE_BYTES)
        self._taken = self._open_pipe(SPLICED_BYTES)
        try:
            self._aside = self._open_pipe(PIPE_BYTES)
        except OSError:
            self.close()
            raise
        aside_bytes = fcntl.fcntl(self._aside.into, fcntl.F_GETPIPE_SZ)
        framed = aside_bytes - _FRAME_PAGES * os.sysconf("SC_PAGESIZE")
        if framed <= 0:
            self.close()
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        self.piece_bytes = min(SPLICED_BYTES, framed)

    def _open_pipe(self, size_bytes: int) -> Pipe:
        pipe = open_pipe(size_bytes)
        self._open += (pipe,)
        return pipe

    def close(self) -> None:
        """Close the two pipes."""
        pipes, self._open = self._open, ()
        for pipe in pipes:
            pipe.close()

    def descriptors(self) -> tuple[int, ...]:
        """Return its descriptors of the host."""
        return tuple(end for pipe in self._open for end in pipe)

    def take(self, size: int) -> int:
        """Take the content of the tool's pipe; return its size, 0 at the end.

        Raises:
            BlockingIOError: it is empty.
            OSError: pages cannot be moved out of it.
        """
        return os.splice(self._pipe, self._taken.into, min(size, self.piece_bytes))

    def set_aside(self, size: int, before: bytes, after: bytes) -> bool:
        """Put the taken piece aside as well, with its frame.

        Returns:
            False if it does not fit; then call ``empty_aside``.
        """
        try:
            os.write(self._aside.into, before)
            if copy_pipe(self._taken.out, self._aside.into, size) != size:
                return False
            os.write(self._aside.into, after)
        except OSError:  # less room than requested
            return False
        return True

    def keep(self, fd: int, size: int, offset: int) -> int:
        """Move taken bytes into a file; return their number.

        Raises:
            OSError: the file refused.
        """
        return os.splice(self._taken.out, fd, size, offset_dst=offset)

    def rest(self) -> bytes:
        """Return the taken bytes that were not kept."""
        return _empty(self._taken.out)

    def send(self, sock: socket.socket, size: int) -> int:
        """Move bytes from aside to a socket; return their number.

        Raises:
            BlockingIOError: the socket takes nothing now.
            OSError: its other end is gone.
        """
        return os.splice(self._aside.out, sock.fileno(), size)

    def empty_aside(self) -> None:
        """Empty the pipe aside."""
        _empty(self._aside.out)


def _empty(pipe: int) -> bytes:
    """Return the content of a pipe of this file."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(pipe, SPLICED_BYTES):
            parts.append(part)
    return b"".join(parts)
