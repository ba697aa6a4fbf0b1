"""Programs of a project: its own ``tsc``, its virtual environment.

The host may be root, and a project is the child's: names are looked up beneath the
project's directory only. A link that leads out of it still counts as the project's
program: the tool, with its child's view, follows it.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from hostlib.linux.resolve import open_beneath

if TYPE_CHECKING:
    from collections.abc import Callable

TSC = "node_modules/.bin/tsc"
VENV = ".venv"

VENV_TOOLS = frozenset({"python", "python3", "pip", "pip3"})
"""Tools that a virtual environment replaces."""


def own_name(tool: str) -> str | None:
    """Return the path of a project's own program for a tool, if projects have one."""
    if tool == "tsc":
        return TSC
    return f"{VENV}/bin/{tool}" if tool in VENV_TOOLS else None


def find_own_program(tool: str, cwd_fd: int) -> tuple[str | None, bool]:
    """Return a project's program for a tool; it may wait for a file system.

    Args:
        tool: its name.
        cwd_fd: the project's directory.

    Returns:
        The path of its own program relative to that directory, None if it has none; and
        whether the tool runs in the project's virtual environment.
    """
    program = own_name(tool)
    if program is not None and not _is_there(program, cwd_fd, _is_program):
        program = None
    has_venv = tool in VENV_TOOLS and _is_there(f"{VENV}/bin", cwd_fd, _is_directory)
    return program, has_venv


def _is_there(name: str, dir_fd: int, kind: Callable[[int], bool]) -> bool:
    """Return whether a name exists, or leads out of the directory."""
    try:
        fd = open_beneath(dir_fd, os.fsencode(name), os.O_PATH)
    except OSError as why:
        return why.errno == errno.EXDEV
    try:
        return kind(fd)
    finally:
        os.close(fd)


def _is_program(fd: int) -> bool:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    return os.access(f"/proc/self/fd/{fd}", os.X_OK)


def _is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)
