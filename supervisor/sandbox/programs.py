"""Files that a program needs beside it, read by a host that may be root.

The interpreter of a script, what env(1) is to look for, what a package manager has
spread wider than ``bin`` and ``lib``.

Rules of this file.

1. Only a regular file is read, and only the one that was looked at: a name is opened
   without following a link and without opening what it names (O_PATH), and then by its
   descriptor. A device is not opened, a FIFO or somebody's lease not waited for.
2. Only the system's own env(1) is taken for one, and only a bare name is looked for.
"""

# ruff: noqa: PTH100, PTH113, PTH118, PTH123 - descriptors, and texts
from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from hostlib.linux.syscalls import open_exactly

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENV = frozenset({"/usr/bin/env", "/bin/env"})

_LINE_BYTES = 256
"""As much of a ``#!`` line as the kernel reads."""

_SETTINGS_BYTES = 4096
"""A ``pyvenv.cfg`` has some 200."""

_MODULES = "/node_modules/"


def interpreter(path: str) -> str | None:
    """Return the program of a ``#!`` line; through env(1), what that starts here.

    Args:
        path: of the script, without links.
    """
    words = _first_line(path)
    if not words:
        return None
    name = _find_named(words)
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
    return _find_named(_first_line(path))


def find(name: str, directories: Iterable[str]) -> str | None:
    """Return the first program of that bare name in some directories."""
    for directory in directories:
        candidate = os.path.join(directory, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def modules_around(program: str) -> str:
    """Return the ``node_modules`` that a program of npm's lies in; "" for none.

    It is the outermost one: packages look for each other in all above them.
    """
    prefix, found, _ = program.partition(_MODULES)
    return f"{prefix}{_MODULES[:-1]}" if found else ""


def base_of_venv(prefix: str) -> str:
    """Return the directory of the Python that a venv was made from; "" if it is none.

    Args:
        prefix: of the venv, without links.
    """
    try:
        text = _beginning(f"{prefix}/pyvenv.cfg").decode()
    except (OSError, UnicodeDecodeError):
        return ""
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home" and value.strip().startswith("/"):
            return value.strip()
    return ""


def _find_named(words: list[str]) -> str | None:
    if words and words[0] in _ENV:
        for word in words[1:]:
            if not word.startswith("-") and "=" not in word:
                return None if "/" in word or word in (".", "..") else word
    return None


def _first_line(path: str) -> list[str]:
    """Return the words of a ``#!`` line; none, where there is no such line."""
    try:
        line = _beginning(path, _LINE_BYTES).partition(b"\n")[0]
    except OSError:
        return []
    if not line.startswith(b"#!"):
        return []
    return [os.fsdecode(word) for word in line[2:].split()]


def _beginning(path: str, size: int = _SETTINGS_BYTES) -> bytes:
    """Return how a regular file begins; nothing of another one (rule 1)."""
    found = open_exactly(os.fsencode(path))
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return b""
        # The file that was looked at, whatever stands under its name now.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(f"/proc/self/fd/{found}", flags), "rb") as file:
            return file.read(size)
    finally:
        os.close(found)
