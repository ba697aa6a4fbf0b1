"""Somebody who exchanges what two names mean, as fast as the kernel lets it."""

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RENAME_EXCHANGE = 2
AT_FDCWD = -100

SWAP = """
    import ctypes, os, sys
    renameat2 = ctypes.CDLL(None).renameat2
    one, other = map(os.fsencode, sys.argv[1:])
    os.write(1, b"+")
    while renameat2(-100, one, -100, other, 2) == 0:
        pass
"""


@contextmanager
def swapped(one: Path, other: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Exchange two entries again and again, in a process of its own."""
    program = [sys.executable, "-I", "-S", "-c", textwrap.dedent(SWAP)]
    command = [*program, str(one), str(other)]
    # No host, it has no key of one in its environment.
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={}) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"+"
        yield process
        assert process.poll() is None, "the swapper ended early"
        process.kill()


def can_exchange(one: Path, other: Path) -> str:
    """Exchange two entries and change them back; why that is not possible, or ''."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return "this C library has no renameat2"
    names = os.fsencode(one), os.fsencode(other)
    for _ in range(2):
        if call(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) != 0:
            return f"no exchange here: {os.strerror(ctypes.get_errno())}"
    return ""
