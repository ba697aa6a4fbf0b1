"""Paths that the operator shows a child by name: ``--expose``, and grants to read.

Which of them are refused, and why.

Rules of this file.

1. A path that is exposed is read and executed, a grant to read is read: both by the
   child's own system calls, and never written.
2. A path that cannot be exposed refuses the start.  A grant to read of such a path is
   left to FD 3, which reads it as before.
"""

# ruff: noqa: PTH115 - what is asked for is text
from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from hostlib.paths import usual_state_dir
from supervisor.spawn.request import SpawnError
from vfs.mounts import other_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from supervisor.sandbox.shown_files import ShownFiles

_OF_THE_MACHINE = ("/proc", "/sys", "/dev", "/run")
"""Files of the kernel and running services: of the child, another, or none."""

_OF_A_FRESH_ROOT = ("/etc", "/tmp")  # noqa: S108 - no file
"""Where a fresh root has files of the child's own: a grant to read hides none of them."""


def fault_of(path: str) -> str:
    """Return why no child can be shown a path, and what to do; "" if one can.

    Args:
        path: as it is written; links are followed.
    """
    if not path or "\0" in path:
        return f"not a path: {path!r}"
    try:
        real, mode = _found(path)
    except FileNotFoundError:
        return f"there is no {path!r}; make it first"
    except OSError as why:
        return f"cannot use {path!r}: {why.strerror}; name another path"
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        return f"{path!r} is neither a file nor a directory; name one"
    return next(_faults_of_place(path, real), "")


def _faults_of_place(path: str, real: str) -> Iterator[str]:
    """Yield why no child can be shown what lies at a path without links."""
    if real == "/":
        yield "'/' holds what is the host's own; name a directory in it"
    for place in _OF_THE_MACHINE:
        if _is_in(real, place):
            yield f"{path!r} lies in {place}, of which a child has its own; leave it out"
    for secret in _usual_secrets():
        if _is_in(real, secret) or _is_in(secret, real):
            yield _holds_secret(path, secret)


def check_exposed(
    exposed: Iterable[tuple[str, str]], files: ShownFiles, *, can_hide: bool
) -> None:
    """Refuse what a child may not be shown.

    Args:
        exposed: (path as it is written, path without links) of each.
        files: the files that the child is to see.
        can_hide: entries of a directory can be hidden.

    Raises:
        SpawnError: the host's own directories or keys are there, or a workspace is.
    """
    for path, real in exposed:
        why = fault_of(path) or next(
            _find_keeper(path, real, files, can_hide=can_hide), ""
        )
        if why:
            raise not_exposed(path, why)


def read_by_calls(files: ShownFiles, *, can_hide: bool) -> tuple[str, ...]:
    """Return the grants to read that the child sees by its own system calls (rule 2).

    Args:
        files: the files that the child is to see.
        can_hide: entries of a directory can be hidden.
    """
    found = []
    for path in files.readable:
        if fault_of(path) or path in _OF_A_FRESH_ROOT:
            continue
        is_secret = any(
            _is_in(path, name) or (_is_in(name, path) and not can_hide)
            for name in _hidden_names(files)
        )
        if not is_secret and files.mount_of(path) is None:
            found.append(path)
    return tuple(found)


def not_exposed(path: str, why: str) -> SpawnError:
    """Word that a child cannot be shown a path."""
    text = f"cannot expose {path!r}: {why}"
    return SpawnError(0, "expose", text, why)


def _find_keeper(
    path: str, real: str, files: ShownFiles, *, can_hide: bool
) -> Iterator[str]:
    """Yield why this child may not be shown a path."""
    if not real:
        yield "a link on its way may be a child's; name what it leads to"
        return
    for name in _hidden_names(files):
        if _is_in(real, name) or (_is_in(name, real) and not can_hide):
            yield _holds_secret(path, name)
    mount = files.mount_of(real)
    if mount is not None and mount.is_writable:
        yield f"it lies in workspace {mount.path!r}, which is seen anyhow; leave it out"


def _holds_secret(path: str, secret: str) -> str:
    if path == secret:
        return f"no child may see {path!r}; name another path"
    return f"no child may see {secret!r} there; name what lies beside it"


def _hidden_names(files: ShownFiles) -> Iterator[str]:
    for location in files.hidden:
        yield location.path
        yield from other_names(location.path)


def _found(path: str) -> tuple[str, int]:
    """Return a path without links, and the mode of what is there."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_mode
    finally:
        os.close(fd)


def _usual_secrets() -> Iterator[str]:
    """Yield where daemons and workspaces of this user are kept."""
    for path in {usual_state_dir(), os.environ.get("SANDHOST_STATE") or "/nonexistent"}:
        with contextlib.suppress(OSError):  # there is none
            yield _found(path)[0]


def _is_in(path: str, place: str) -> bool:
    """Tell whether a path is a place or lies in it."""
    return path == place or path.startswith(place.rstrip("/") + "/")
