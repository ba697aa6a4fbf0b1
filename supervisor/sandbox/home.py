"""A child's HOME: its first entries, and whether the child can write there.

The host's work on that directory before the child starts.

Rule: an entry is written only into an empty directory, so that no link of a child that
had it before is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def is_home_file(name: str) -> bool:
    """Tell whether a name can be that of a file within HOME."""
    parts = name.split("/")
    return "\0" not in name and not {"", ".", ".."} & set(parts)


def make_home(path: str) -> None:
    """Make a HOME that is not there yet.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)  # noqa: PTH102 - text


def fill_home(path: str, files: Mapping[str, str]) -> bool:
    """Write the first entries of a HOME, if it is empty; return whether it was.

    Raises:
        OSError: it cannot be written to.
    """
    if not files:
        return True
    if os.listdir(path):  # noqa: PTH208 - text
        return False
    for name, text in files.items():
        _write(path, name.split("/"), text)
    return True


def _write(top: str, parts: list[str], text: str) -> None:
    *directories, name = parts
    here = os.open(top, _DIRECTORY)
    try:
        for directory in directories:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700, dir_fd=here)
            below = os.open(directory, _DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        fd = os.open(name, _FRESH, 0o600, dir_fd=here)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
    finally:
        os.close(here)


def check_owner(path: str, user: int | None) -> None:
    """Raise ``OSError`` if a kept HOME is not what its child can be shown as its own.

    Args:
        path: of it.
        user: that the child gets, as which root's files are shown to it; None for the
            host's.
    """
    owner = os.stat(path).st_uid  # noqa: PTH116 - text
    if user is not None and owner != 0:
        why = f"HOME belongs to user {owner} and not to root; 'chown -R root' it"
        raise OSError(errno.EPERM, why, path)
