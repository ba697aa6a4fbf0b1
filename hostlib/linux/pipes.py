"""Pipes for splice(2) and tee(2), larger than the default if the kernel allows it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
import termios
from typing import NamedTuple

_tee = ctypes.CDLL(None, use_errno=True).tee
_tee.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
_tee.restype = ctypes.c_ssize_t


class Pipe(NamedTuple):
    """Both ends of a pipe, non-blocking; the holder closes them."""

    out: int
    into: int

    def close(self) -> None:
        """Close both ends."""
        os.close(self.out)
        os.close(self.into)


def open_pipe(size_bytes: int | None = None) -> Pipe:
    """Return a new pipe.

    Args:
        size_bytes: the wanted capacity; None for the default.

    Raises:
        OSError: there are no descriptors.
    """
    pipe = Pipe(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
    if size_bytes is not None:
        resize_pipe(pipe.into, size_bytes)
    return pipe


def resize_pipe(pipe: int, size_bytes: int) -> None:
    """Change a pipe's capacity, if the kernel allows it."""
    with contextlib.suppress(OSError):  # EPERM: the user's share of pipe memory is used
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size_bytes)


def bytes_waiting(fd: int) -> int:
    """Return how many bytes can be read from a pipe, socket or terminal (FIONREAD)."""
    count = bytearray(4)
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)


def copy_pipe(source: int, target: int, size_bytes: int) -> int:
    """Copy what a pipe holds into another, by tee(2); return the number of bytes.

    Raises:
        OSError: nothing could be copied.
    """
    count: int = _tee(source, target, size_bytes, 0)
    if count < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return count
