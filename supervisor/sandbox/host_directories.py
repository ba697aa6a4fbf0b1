"""Directories of a host's own, which its children see empty wherever they lie.

Where they are at this moment.  Files of keys are hidden from children, too.

Rule: a directory is known by what it is, not by its name.  A tool that may write around it
can move what it lies in; it is held, and the kernel says what it is called now.  A file of
a key is looked up by its name for each child: an operator may put another one in its
place, and no descriptor of it is to be found.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Location(NamedTuple):
    """A directory, or a file of a key, where it is.

    Attributes:
        path: without links.
        identity: its device and inode.
    """

    path: str
    identity: tuple[int, int]


def locations_of(*directories: int) -> tuple[Location, ...]:
    """Return where directories are that are held, by their descriptors.

    A removed directory lies nowhere, and is left out; so is -1, which is no descriptor.
    """
    found = []
    for directory in directories:
        if directory < 0:
            continue
        status = os.fstat(directory)
        path = os.readlink(f"/proc/self/fd/{directory}")  # noqa: PTH115 - text
        # Either alone may be said of one that is there, by a name or a file system.
        if status.st_nlink > 0 or not path.endswith(" (deleted)"):
            found.append(Location(path, (status.st_dev, status.st_ino)))
    return tuple(found)


RESOLVERS = ("/run/nscd", "/run/systemd/resolve", "/run/dbus", "/run/avahi-daemon")
"""Where the sockets are by which programs of the host look names up: a path passes a net
namespace, and nss asks them before DNS (spec NET4)."""


def resolver_locations() -> tuple[Location, ...]:
    """Return where the sockets of the host's resolvers are."""
    found: tuple[Location, ...] = ()
    for path in RESOLVERS:
        with contextlib.suppress(OSError):  # it runs none
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                found += locations_of(fd)
            finally:
                os.close(fd)
    return found


class HiddenDirectories:
    """Directories that no child sees into, held from when they are first there.

    Args:
        paths: their names, with links or without.

    Attributes:
        files: the names of the files of keys.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._held: dict[str, int] = dict.fromkeys(paths, -1)
        self.files: frozenset[str] = frozenset()
        self._look()

    def add(self, path: str) -> None:
        """Hold one more."""
        self._held.setdefault(path, -1)
        self._look()

    def remove(self, path: str) -> None:
        """Hold one no more."""
        fd = self._held.pop(path, -1)
        if fd >= 0:
            os.close(fd)

    def locations(self, *others: int) -> tuple[Location, ...]:
        """Return the places of existing ones, and of others that the caller holds."""
        self._look()
        found = locations_of(*others, *self._held.values())
        for path in self.files:
            with contextlib.suppress(OSError):  # it is gone
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    found += locations_of(fd)
                finally:
                    os.close(fd)
        return found

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what is held, with a word for it."""
        for fd in self._held.values():
            if fd >= 0:
                yield fd, "directory of the host's own"

    def close(self) -> None:
        """Close what is held."""
        for path in tuple(self._held):
            self.remove(path)

    def _look(self) -> None:
        for path, fd in self._held.items():
            if fd < 0:
                with contextlib.suppress(OSError):  # not made yet, or never
                    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
                    self._held[path] = os.open(path, flags)
