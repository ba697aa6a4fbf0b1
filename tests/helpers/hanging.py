"""Programs whose exec hangs, as on a dead disk, as long as a test wants.

    with hanging(where) as program:
        ...  # who executes it waits in execve(2), and can be killed there

By fanotify(7), which asks before a file is executed and is not answered. It takes root, and a
kernel with CONFIG_FANOTIFY_ACCESS_PERMISSIONS; elsewhere a test that needs it is skipped.
"""

import ctypes
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_libc = ctypes.CDLL(None, use_errno=True)

# <asm/unistd.h>, <linux/fanotify.h>
_INIT, _MARK = (300, 301) if platform.machine() == "x86_64" else (262, 263)
_CLOEXEC, _CLASS_CONTENT, _ADD, _OPEN_EXEC_PERM = 1, 4, 1, 0x40000
_AT_FDCWD = -100


@contextmanager
def hanging(where: Path, name: str = "hangs") -> Iterator[Path]:
    """Make a program in a directory; hold whoever executes it until the block is left."""
    program = where / name
    shutil.copy("/bin/true", program)
    group = _libc.syscall(_INIT, _CLOEXEC | _CLASS_CONTENT, os.O_RDONLY)
    if group < 0:
        pytest.skip(f"fanotify_init: {os.strerror(ctypes.get_errno())}")
    try:
        mask = ctypes.c_uint64(_OPEN_EXEC_PERM)
        path = os.fsencode(program)
        if _libc.syscall(_MARK, group, _ADD, mask, _AT_FDCWD, path) < 0:
            pytest.skip(f"fanotify_mark: {os.strerror(ctypes.get_errno())}")
        yield program
    finally:
        os.close(group)  # waiting calls may go on
