"""Pipes through which splice(2) moves bytes, larger than the usual ones where allowed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import NamedTuple


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
        size_bytes: that it should hold; None for the usual size.

    Raises:
        OSError: there are no descriptors.
    """
    pipe = Pipe(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
    if size_bytes is not None:
        resize_pipe(pipe.into, size_bytes)
    return pipe


def resize_pipe(pipe: int, size_bytes: int) -> None:
    """Make a pipe hold more; it keeps its size where that is refused."""
    with contextlib.suppress(OSError):  # EPERM: the user's share of pipes is used
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size_bytes)
