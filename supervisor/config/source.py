"""The bytes of a configuration: a file's, or those of an open pipe.

``--config <(generate)`` is such a pipe: the shell writes ``/dev/fd/63`` for it. It can be
read once only, so a daemon that reloads cannot use it.

1. Reads are bounded: no devices or sockets, at most ``MOST_BYTES``, and a pipe at most
   ``PIPE_S``.
2. A FIFO is never opened: its other end may stay closed for ever.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

MOST_BYTES = 16 * 1024 * 1024
"""Longest file: room for a line of each of 100,000 children, the most that a host
has."""

PIPE_S = 60.0
"""Longest wait for a pipe: its writer may have to ask for a secret first."""

_ONE_WAIT_S = 1.0
"""Longest single poll(2): Python shows a signal that came just before it only after
it, and Ctrl-C shall end the wait."""

_NOTHING = os.makedev(1, 3)
"""/dev/null, which many users write for an empty file (null(4))."""

_KINDS = {
    stat.S_IFIFO: "it is a pipe",
    stat.S_IFSOCK: "it is a socket",
    stat.S_IFDIR: "it is a directory",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
}


def read_source(path: str, *, once: bool) -> bytes:
    """Return the bytes of a configuration.

    Args:
        path: a file, ``/dev/null``, or an open descriptor of a pipe.
        once: whether it is not read again later.

    Raises:
        OSError: it cannot be read; ``strerror`` has the reason.
    """
    status = os.stat(path)  # noqa: PTH116 - a str, as the faults show it
    is_pipe = stat.S_ISFIFO(status.st_mode) and _is_open_already(path)
    if is_pipe and not once:
        why = (
            "it is a pipe, and this is read again at each reload; write the"
            " configuration into a file"
        )
        raise OSError(errno.EINVAL, why)
    if not (is_pipe or stat.S_ISREG(status.st_mode) or status.st_rdev == _NOTHING):
        what = _KINDS[stat.S_IFMT(status.st_mode)]
        why = f"{what} and no file; write the configuration into one"
        raise OSError(errno.EINVAL, why)
    # Without waiting, should it be a FIFO by now.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    with os.fdopen(os.open(path, flags), "rb", buffering=0) as file:
        text = _all_of(file.fileno()) if is_pipe else file.read(MOST_BYTES + 1) or b""
    if len(text) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES} bytes")
    return text


def _is_open_already(path: str) -> bool:
    """Return whether a name stands for an unnamed pipe that is open in this process."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opens no FIFO: open(2)
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("pipe:")
    finally:
        os.close(fd)


def _all_of(fd: int) -> bytes:
    """Return the bytes of a pipe, at most one more than a configuration may have."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + PIPE_S
    text = bytearray()
    while len(text) <= MOST_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            why = f"it is a pipe that has not ended within {PIPE_S:g} s"
            raise OSError(errno.ETIMEDOUT, why)
        if not poll.poll(min(left_s, _ONE_WAIT_S) * 1000):
            continue
        try:
            piece = os.read(fd, MOST_BYTES + 1 - len(text))
        except BlockingIOError:  # another process reads it, too
            continue
        if not piece:
            break
        text += piece
    if not text:
        # The writer has probably failed; an empty configuration would have no limits.
        why = "it is a pipe that brought nothing; write /dev/null for no configuration"
        raise OSError(errno.ENODATA, why)
    return bytes(text)
