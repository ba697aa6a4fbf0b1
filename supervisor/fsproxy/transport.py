"""Small questions and orders to the kernel about one client's descriptors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
import termios
from typing import TYPE_CHECKING, Self

import msgspec

from hostlib.linux.pipes import bytes_waiting

if TYPE_CHECKING:
    from vfs.clients import OpenFile

_PROBE_STEP_BYTES = 128 * 1024
"""Distance of the probes for data in memory: the kernel reads ahead in such steps."""

PIECE_BYTES = 1024 * 1024
"""The piece of a file that one call sends: 0.2 ms, for which all others wait. In less a
large file takes more turns, and beside a flood each of them takes a slice of the
pump's."""

DEEP_BYTES = 1024 * 1024
"""How much a socket may hold for a client that READs large pieces: Linux doubles it.

It bounds what a client that reads slowly pins: pages of files, not copies."""

_ZEROS = bytes(65_536)

_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of sendfile for a file that the kernel cannot send by itself (sendfile(2))."""


def bytes_unread(fd: int) -> int:
    """Return how many sent bytes the peer has not read, at least (TIOCOUTQ)."""
    count = bytearray(4)
    try:
        fcntl.ioctl(fd, termios.TIOCOUTQ, count)
    except OSError:
        return bytes_waiting(fd)  # a pipe tells the same at both ends
    return int.from_bytes(count, sys.byteorder)


class TransferState(msgspec.Struct):
    """The rest of a READ on its way from a file; see ``FileTransfer``."""

    fileno: int
    head: bytes
    at: int
    left: int


class FileTransfer:
    """A READ on its way from a file to a client without passing this process.

    Args:
        write_fd: the client's non-blocking descriptor.
        file: the open file; its offset has moved already.
        state: the parts of the reply that are to be sent.

    Attributes:
        is_done: the reply is out.
    """

    __slots__ = ("_at", "_fd", "_file", "_head", "_left", "_to", "is_done")

    def __init__(self, write_fd: int, file: OpenFile, state: TransferState) -> None:
        self._to = write_fd
        self._file = file
        self._fd = file.handle.fd
        self._head = state.head
        self._at = state.at
        self._left = state.left
        self.is_done = False

    @classmethod
    def begin(cls, write_fd: int, file: OpenFile, size: int) -> Self:
        """Return the transfer of a file's next bytes; its offset moves at once."""
        state = TransferState(file.fileno, b"OK %d\n" % size, file.offset, size)
        file.offset += size
        return cls(write_fd, file, state)

    def snapshot(self) -> TransferState:
        """Return what is left of it."""
        return TransferState(self._file.fileno, self._head, self._at, self._left)

    @property
    def left(self) -> int:
        """How many bytes are not sent yet, those of the reply's line included."""
        return len(self._head) + self._left

    def is_in_memory(self) -> bool:
        """Return whether the kernel holds the data, by probing a byte of each stretch."""
        probe = [bytearray(1)]
        try:
            for at in range(self._at, self._at + self._left, _PROBE_STEP_BYTES):
                os.preadv(self._fd, probe, at, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            # Most file systems in memory do not know the flag; they need no probe
            # either. `load` will find faults elsewhere.
            return self._file.handle.mount.in_memory
        return True

    def give_up(self) -> None:
        """Take the READ back, before any of it was sent."""
        self._file.offset = self._at

    def load(self) -> None:
        """Make the kernel hold the data (for a worker thread).

        Raises:
            OSError: the disk failed.
        """
        at, left = self._at, self._left
        while left > 0:
            got = len(os.pread(self._fd, min(left, 1 << 20), at))
            if not got:
                return
            at += got
            left -= got

    def push(self) -> bool:
        """Send what fits; tell whether anything did.

        Raises:
            OSError: the client is gone.
        """
        try:
            if self._head:
                self._head = self._head[os.write(self._to, self._head) :]
                if self._head:
                    return True
            try:
                size = min(self._left, PIECE_BYTES)
                sent = os.sendfile(self._to, self._fd, self._at, size)
            except OSError as why:
                if why.errno not in _NO_SENDFILE:
                    raise
                sent = self._copy()
            if not sent:
                # The file shrank after its size was promised: the promise holds (R1).
                sent = os.write(self._to, _ZEROS[: self._left])
        except BlockingIOError:
            return False
        self._at += sent
        self._left -= sent
        self.is_done = not self._left
        return True

    def _copy(self) -> int:
        """Send a piece through this process; return its size, 0 at the file's end."""
        piece = os.pread(self._fd, min(self._left, len(_ZEROS)), self._at)
        return os.write(self._to, piece) if piece else 0


def deepen(fd: int) -> None:
    """Let a socket or pipe hold a whole large reply, as far as allowed (tcp(7)).

    A reply that fits is sent in one call.  One that does not makes the two ends take
    turns, and a turn costs 20 us where the child is in a scheduling group of its own.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, DEEP_BYTES)
            return
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, DEEP_BYTES)


def revoke(fd: int) -> None:
    """Shut a socket down for every process that still holds its other end (S2)."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:  # a pipe
        return
    with contextlib.suppress(OSError):  # the peer is gone already
        sock.shutdown(socket.SHUT_RDWR)
    sock.detach()
