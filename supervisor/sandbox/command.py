"""The command ``sandhost`` in a child's fresh root, if the machine has none there."""

from __future__ import annotations

import os
import shlex
import sys
from functools import cache

from vfs.mounts import has_mounts_within

PLACE = "/usr/local/bin"
"""On everybody's PATH, and in no distribution's hands."""

_NAME = "sandhost"
_MOST_BYTES = 127
"""Of a ``#!`` line, for every kernel: execve(2)."""


def command_of() -> bytes:
    """Return the program; b"" where the place has one, or cannot have one.

    An overlay shows nothing of what is mounted in the place, so there it is left alone.
    """
    if os.path.lexists(f"{PLACE}/{_NAME}") or has_mounts_within(PLACE):
        return b""
    return _program()


@cache
def _program() -> bytes:
    packages = os.path.abspath(__file__).rpartition("/supervisor/")[0]  # noqa: PTH100 - text
    # Isolated: neither PYTHONPATH nor a directory of the child's names its modules.
    first = f"#!{sys.executable} -I"
    code = (
        f"import sys; sys.path.append({packages!r}); sys.argv[0] = {_NAME!r}\n"
        "from supervisor.__main__ import main\n"
        "main()\n"
    )
    if len(os.fsencode(first)) > _MOST_BYTES or " " in sys.executable:
        words = shlex.join([sys.executable, "-I", "-c", code])
        return os.fsencode(f'#!/bin/sh\nexec {words} "$@"\n')
    return os.fsencode(f"{first}\n{code}")
