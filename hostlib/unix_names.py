"""Names of unix sockets: short ones for sun_path; sockets without a listener."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SUN_PATH_BYTES = 108


@contextlib.contextmanager
def short_name(path: str) -> Iterator[str]:
    """Yield a name of the socket that fits into sun_path, which has 108 bytes.

    Raises:
        OSError: its directory cannot be opened.
    """
    if len(os.fsencode(path)) < _SUN_PATH_BYTES:
        yield path
        return
    parent, name = os.path.split(path)
    fd = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def is_deaf(path: str) -> bool:
    """Return whether a path is a socket without a listener."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX) as line:
            line.setblocking(False)
            with short_name(path) as name:
                line.connect(name)
    except ConnectionRefusedError:
        return True
    except OSError:  # removed; or EAGAIN, EACCES: its owner may be alive
        return False
    return False
