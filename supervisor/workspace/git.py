"""git(1) compares and merges texts: numbered copies in a directory of their own.

No name, attribute file or configuration of a workspace or of the operator reaches it.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from supervisor.workspace.directory import WorkspaceError


class NoGitError(WorkspaceError):
    """Text cannot be compared or merged, because git(1) is not installed."""


def find_git(work: str, instead: str) -> str:
    """Return where git is.

    Args:
        work: the work that needs it.
        instead: the remedy without it.

    Raises:
        NoGitError: it is not installed.
    """
    git = shutil.which("git")
    if git is None:
        text = f"cannot {work}: git is not installed; install it, or {instead}"
        raise NoGitError(text)
    return git


def run_git(
    git: str, words: list[str], top: str, timeout_s: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command of git.

    Raises:
        TimeoutError: it took longer, and was ended.
    """
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": top,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": os.path.dirname(top),
        "GIT_ATTR_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    try:
        return subprocess.run(
            [git, *words], cwd=top, env=env, capture_output=True, timeout=timeout_s, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"git {words[0]} took more than {timeout_s} s") from None
