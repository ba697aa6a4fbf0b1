"""Gives directories and their content to the user of a child, before its start.

1. Only files of the directory's owner change hands: others may be links to foreign files.
2. No depth is assumed and no link followed, also on the way to the directory: its content
   and its parents (``/tmp``) may be the work of a hostile process.
3. The directory itself is given last; one that has the user already is done.
4. The parent stays the host's, but lets the user's group through: a child may see it.
5. Directories of the host belong to a keeper without processes: a child could be shown
   root's files as its own (``launchpad.owners``). A child that is root gets root's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from hostlib.linux.syscalls import NOT_THERE, open_exactly

if TYPE_CHECKING:
    from collections.abc import Iterable

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SOME_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
KEEPER = 0x3FFFFFFF
"""A user without processes, for files that root uses and no child sees as its own."""

_AROUND = 2
"""Directories of the host's around one that is given: a sidecar's lies in two."""

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def find_chown_fault(user: int) -> str:
    """Return why a user cannot be given files, "" if it can; tried on an unnamed file.

    A root without capabilities may not, and to one in a user namespace, a container's
    say, few users exist (user_namespaces(7)).  And who may not overrule that user later
    (CAP_FOWNER, CAP_DAC_OVERRIDE) could not remove what is made in there.
    """
    what = "given to"
    try:
        fd = os.memfd_create("sandhost-gift", os.MFD_CLOEXEC)
        try:
            os.fchown(fd, user, user)
            what = "taken back from"
            os.fchmod(fd, 0)
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        finally:
            os.close(fd)
    except OSError as why:
        return f"a file cannot be {what} user {user}: {why.strerror}"
    return ""


def give_to_keeper(directory: int) -> None:
    """Give a held directory to the keeper (rule 5), if this process can.

    Precondition: it was just made and is empty, so an earlier open of it shows nothing.
    """
    if os.geteuid() == 0 and not find_chown_fault(KEEPER):
        # On a file system without owners nobody else has any either.
        with contextlib.suppress(OSError):
            os.fchown(directory, KEEPER, -1)


def take_parents_from_keeper(directories: Iterable[str]) -> None:
    """Take the parents of directories from the keeper, for a child that stays root.

    A directory that is not there, or behind a link, is passed over: its use fails later.

    Raises:
        OSError: this process may not.
    """
    if os.geteuid() != 0:
        return
    for path in directories:
        try:
            here = open_exactly(os.fsencode(path))
        except OSError as why:
            if why.errno not in NOT_THERE:
                raise
            continue
        try:
            for _ in range(_AROUND):
                here, below = os.open("..", _SOME_DIRECTORY, dir_fd=here), here
                os.close(below)
                if is_kept(here):
                    _take_by(here)
        finally:
            os.close(here)


def take_from_keeper(directory: int) -> None:
    """Take a directory from the keeper, held open to be read, if it has it.

    Raises:
        OSError: this process may not.
    """
    if os.geteuid() == 0 and is_kept(directory):
        _take(directory)


def _take_by(directory: int) -> None:
    fd = os.open(".", _DIRECTORY, dir_fd=directory)
    try:
        _take(fd)
    finally:
        os.close(fd)


def _take(directory: int) -> None:
    os.fchown(directory, os.geteuid(), os.getegid())
    os.fchmod(directory, stat.S_IRWXU)


def is_kept(directory: int) -> bool:
    """Tell whether a held directory is the keeper's (rule 5)."""
    return os.fstat(directory).st_uid == KEEPER


def find_closed_parent(
    user: int, directory: str, top: str, *, mapped: bool = False
) -> str:
    """Return the nearest parent that keeps a user from its directory; "" for none.

    Args:
        user: and its group, of the same number.
        directory: has been given to it.
        top: is looked at last; "" if it does not hold the directory.
        mapped: directories of root's on the way are shown as the user's.

    Raises:
        OSError: one of them is gone.
    """
    last = os.stat(top)  # noqa: PTH116 - text
    closed = ""
    fd = os.open(directory, _SOME_DIRECTORY)
    try:
        while True:
            status = os.fstat(fd)
            fd, below = os.open("..", _SOME_DIRECTORY, dir_fd=fd), fd
            os.close(below)
            above = os.fstat(fd)
            if os.path.samestat(above, status):
                return ""  # the root directory lies in itself
            if not (closed or above.st_mode & _ways_through(above, user, mapped)):
                closed = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - text
            if os.path.samestat(above, last):
                return closed
    finally:
        os.close(fd)


def _ways_through(found: os.stat_result, user: int, mapped: bool) -> int:
    """Return the bits of a mode of which one has to be there for a user to pass."""
    if mapped and found.st_uid == 0:
        return stat.S_IXUSR
    is_group = found.st_gid == user or (mapped and found.st_gid == 0)
    return stat.S_IXOTH | (stat.S_IXGRP if is_group else 0)


def give(directories: Iterable[str], user: int) -> None:
    """Give directories and their content to a user; slow for large ones.

    Args:
        directories: their paths, without any link.
        user: their new owner.

    Raises:
        OSError: one is gone or no directory, or this process may not.
    """
    for path in directories:
        top = _open(path)
        try:
            before = os.fstat(top)
            if before.st_uid != user:
                _OwnerChange(before, user).give_contents(top)
                _open_to_group(top, user)
                os.fchown(top, user, user)
        finally:
            os.close(top)


def _open(path: str) -> int:
    try:
        found = open_exactly(os.fsencode(path))
    except OSError as why:
        raise OSError(why.errno, why.strerror, path) from None
    try:
        return os.open(".", _DIRECTORY, dir_fd=found)
    finally:
        os.close(found)


def _open_to_group(top: int, user: int) -> None:
    """Let a group pass through what a directory lies in, if that is the host's alone."""
    above = os.open("..", _DIRECTORY, dir_fd=top)
    try:
        found = os.fstat(above)
        is_private = stat.S_IMODE(found.st_mode) & ~stat.S_IXGRP == stat.S_IRWXU
        if is_private and found.st_uid in (os.geteuid(), KEEPER):
            os.fchown(above, KEEPER, user)
            os.fchmod(above, stat.S_IRWXU | stat.S_IXGRP)
    finally:
        os.close(above)


class _OwnerChange:
    """One directory's contents; one of them is held at a time, however deep it goes."""

    def __init__(self, before: os.stat_result, user: int) -> None:
        self._before = before
        self._user = user

    def give_contents(self, top: int) -> None:
        here = os.dup(top)
        todo = [self._give_entries(here)]
        trail: list[os.stat_result] = []
        try:
            while todo:
                if todo[-1]:
                    below = self._enter(here, todo[-1].pop())
                    if below is not None:
                        trail.append(os.fstat(here))
                        os.close(here)
                        here = below
                        todo.append(self._give_entries(here))
                    continue
                todo.pop()
                if todo:
                    above = os.open("..", _DIRECTORY, dir_fd=here)
                    os.close(here)
                    here = above
                    if not os.path.samestat(os.fstat(here), trail.pop()):
                        raise OSError(errno.ESTALE, "moved while it was given away")
        finally:
            os.close(here)

    def _enter(self, here: int, name: str) -> int | None:
        try:
            return os.open(name, _DIRECTORY, dir_fd=here)
        except OSError as why:
            if why.errno not in _GONE:
                raise
            return None

    def _give_entries(self, here: int) -> list[str]:
        """Give what a directory holds; return the directories among it."""
        directories = []
        with os.scandir(here) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(entry.name, dir_fd=here, follow_symlinks=False)
                    if found.st_dev != self._before.st_dev:  # a mount
                        continue
                    if stat.S_ISDIR(found.st_mode):
                        directories.append(entry.name)
                    if found.st_uid == self._before.st_uid:
                        self._give(here, entry.name)
        return directories

    def _give(self, here: int, name: str) -> None:
        os.chown(name, self._user, self._user, dir_fd=here, follow_symlinks=False)
