"""Programs that a project brings along: its own ``tsc``, its virtual environment."""

from __future__ import annotations

import os
import stat

TSC = "node_modules/.bin/tsc"
VENV = ".venv"

VENV_TOOLS = frozenset({"python", "python3", "pip", "pip3"})
"""Tools that a virtual environment replaces."""


def own_name(tool: str) -> str | None:
    """Return where a project has its own program for a tool, if projects do at all."""
    if tool == "tsc":
        return TSC
    return f"{VENV}/bin/{tool}" if tool in VENV_TOOLS else None


def own_program(tool: str, cwd_fd: int) -> str | None:
    """Return the project's own program for a tool, if the project has one.

    Args:
        tool: its name.
        cwd_fd: the project's directory.

    Returns:
        Its path relative to that directory.
    """
    program = own_name(tool)
    if program is None or is_directory(program, cwd_fd):
        return None
    return program if os.access(program, os.X_OK, dir_fd=cwd_fd) else None


def has_venv(tool: str, cwd_fd: int) -> bool:
    """Tell whether a tool is to run in the project's virtual environment."""
    return tool in VENV_TOOLS and is_directory(f"{VENV}/bin", cwd_fd)


def is_directory(name: str, dir_fd: int) -> bool:
    """Tell whether a name is that of a directory."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=dir_fd).st_mode)
    except OSError:
        return False
