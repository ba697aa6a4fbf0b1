"""Programs that a project brings along: its own ``tsc``, its virtual environment.

The host may be root, and a project is the child's: names are looked up beneath the
project's directory and nowhere else.  Where a link leads out of it, it is the project's
program all the same: the tool, which sees what its child sees, is told what is there.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from vfs.policy import open_beneath

if TYPE_CHECKING:
    from collections.abc import Callable

TSC = "node_modules/.bin/tsc"
VENV = ".venv"

VENV_TOOLS = frozenset({"python", "python3", "pip", "pip3"})
"""Tools that a virtual environment replaces."""


def own_name(tool: str) -> str | None:
    """Return where a project has its own program for a tool, if projects do at all."""
    if tool == "tsc":
        return TSC
    return f"{VENV}/bin/{tool}" if tool in VENV_TOOLS else None


def of_its_own(tool: str, cwd_fd: int) -> tuple[str | None, bool]:
    """Return what a project has for a tool; it may wait for a file system.

    Args:
        tool: its name.
        cwd_fd: the project's directory.

    Returns:
        The path of its own program relative to that directory, None if it has none; and
        whether the tool is to run in the project's virtual environment.
    """
    program = own_name(tool)
    if program is not None and not _is_there(program, cwd_fd, _is_program):
        program = None
    has_venv = tool in VENV_TOOLS and _is_there(f"{VENV}/bin", cwd_fd, _is_directory)
    return program, has_venv


def _is_there(name: str, dir_fd: int, kind: Callable[[int], bool]) -> bool:
    """Tell whether a name is that of something, or leads out of the directory."""
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
