"""What a program names in its ``#!`` line, read by a host that may be root.

What it is: the interpreter of a script, and what env(1) is to look for.  What it is not:
what of that a child may see (``sandbox.paths``).

Rules of this file.

1. What is read is a regular file, and the one that was looked at: a name is opened
   without following a link and without opening what it names (O_PATH), and then by its
   descriptor.  A device is not opened, a FIFO or somebody's lease not waited for.
2. Only the system's own env(1) is taken for one, and only a bare name is looked for.
"""

# ruff: noqa: PTH100, PTH113, PTH118, PTH123 - descriptors, and texts
from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from supervisor.launchpad.kernel import open_exactly

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENV = frozenset({"/usr/bin/env", "/bin/env"})

_LINE_BYTES = 256
"""As much of a ``#!`` line as the kernel reads."""


def interpreter(path: str) -> str | None:
    """Return the program of a ``#!`` line; through env(1), what that starts here.

    Args:
        path: of the script, without links.
    """
    words = _first_line(path)
    if not words:
        return None
    name = _named(words)
    if name is not None:
        directories = os.environ.get("PATH", os.defpath).split(":")
        found = find(name, (os.path.abspath(each or ".") for each in directories))
        if found is not None:
            return found
    return words[0]


def name_in_env(path: str) -> str | None:
    """Return the bare name that a ``#!`` line has env(1) look for, None for others.

    Args:
        path: of the script, without links.
    """
    return _named(_first_line(path))


def find(name: str, directories: Iterable[str]) -> str | None:
    """Return the first program of that bare name in some directories."""
    for directory in directories:
        candidate = os.path.join(directory, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def _named(words: list[str]) -> str | None:
    if words and words[0] in _ENV:
        for word in words[1:]:
            if not word.startswith("-") and "=" not in word:
                return None if "/" in word or word in (".", "..") else word
    return None


def _first_line(path: str) -> list[str]:
    """Return the words of a ``#!`` line; none, where there is no such line."""
    try:
        line = _line(path)
    except OSError:
        return []
    if not line.startswith(b"#!"):
        return []
    return [os.fsdecode(word) for word in line[2:].split()]


def _line(path: str) -> bytes:
    found = open_exactly(os.fsencode(path))
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return b""
        # What was looked at, whatever stands under its name now.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(f"/proc/self/fd/{found}", flags), "rb") as file:
            return file.readline(_LINE_BYTES)
    finally:
        os.close(found)
