"""Places: the directories and single files of a policy.

Rules of this file.

1. A place is a directory descriptor that is held from the start.  The text of a name only
   chooses *which* place is tried; the kernel decides whether the file is beneath it
   (``hostlib.linux.resolve``).  So a wrong choice can refuse too much, but never allow
   too much (spec A4).
2. A place that is one file is held by its directory, with links in its name resolved: it
   may be granted before it exists, stays granted when it is replaced, and is refused
   when it is replaced by a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING, Self

import msgspec

from hostlib.handover import HandoverError
from hostlib.linux.resolve import check_name, open_beneath
from vfs.backends import HostDirectory, MountDirectory
from vfs.errors import AccessDeniedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfs.backends import Backend

# Components that an absolute path without detours does not have: "", "." and "..".
ODD = re.compile(rb"/(?:/|\.{1,2}(?:/|\Z)|\Z)")

PUBLISH_DIRECT = "direct"
PUBLISH_ON_CLOSE = "on-close"
DURABILITY = ("none", "close", "write")


class PlaceState(msgspec.Struct):
    """A place; see ``Place``.

    Attributes:
        fd: its held directory, by the number that it keeps across exec(2).
        beneath: names are resolved beneath that.
        flags: O_* flags of every open there.
        is_mount: the directory is one of a mount.
        user: of that mount.
    """

    fd: int
    beneath: bool
    flags: int
    prefixes: tuple[bytes, ...]
    only: bytes | None
    read: bool
    write: bool
    relative: bytes | None
    publish: str
    durability: str
    is_mount: bool = False
    user: int | None = None


class Place:
    """A directory that names lie beneath, or one file.

    Args:
        backend: the held directory, for a file its directory; the place owns it.
        prefixes: absolute paths of the place; the first is the one from the
            configuration or client, the last of ``open_place`` has no links.
        only: the one entry that is granted; None grants everything beneath.
        read: may be read.
        write: may be written.
        relative: the place's path from the start of relative names, empty for a root;
            None if relative names do not reach it (a grant).
        publish: when ``w`` and ``w+`` show: ``direct`` or ``on-close`` (spec A3b).
        durability: when fsync is called: ``none``, ``close`` or ``write``.

    Attributes:
        identity: device and inode of the held directory.
        is_distant: its file system may wait for another machine or process.
        is_lasting: it needs no path as long as it is held.
    """

    __slots__ = (
        "backend",
        "durability",
        "identity",
        "is_distant",
        "is_lasting",
        "only",
        "prefixes",
        "publish",
        "read",
        "relative",
        "write",
    )

    def __init__(  # noqa: PLR0913 - the fields of one place
        self,
        backend: Backend,
        prefixes: tuple[bytes, ...],
        *,
        only: bytes | None = None,
        read: bool = False,
        write: bool = False,
        relative: bytes | None = None,
        publish: str = PUBLISH_DIRECT,
        durability: str = "none",
    ) -> None:
        self.backend = backend
        self.prefixes = prefixes
        self.only = only
        self.read = read
        self.write = write
        self.relative = relative
        self.publish = publish
        self.durability = durability
        self.identity = backend.identity()
        self.is_distant = backend.is_distant
        self.is_lasting = backend.is_lasting

    def snapshot(self) -> PlaceState:
        """Return the place for the next program.

        Raises:
            HandoverError: the place is no directory of the host.
        """
        backend = self.backend
        if not isinstance(backend, HostDirectory):
            raise HandoverError(
                f"cannot hand over a place: {type(backend).__name__} is no directory"
                " of the host"
            )
        return PlaceState(
            fd=backend.dir_fd,
            beneath=backend.beneath,
            flags=backend.flags,
            prefixes=self.prefixes,
            only=self.only,
            read=self.read,
            write=self.write,
            relative=self.relative,
            publish=self.publish,
            durability=self.durability,
            is_mount=isinstance(backend, MountDirectory),
            user=self.user,
        )

    @classmethod
    def restore(cls, state: PlaceState) -> Self:
        """Return the place of the program before; its path is not resolved again."""
        follow = not state.flags & os.O_NOFOLLOW
        backend = (
            MountDirectory(state.fd, state.user, follow=follow)
            if state.is_mount
            else HostDirectory(state.fd, beneath=state.beneath, follow=follow)
        )
        return cls(
            backend,
            state.prefixes,
            only=state.only,
            read=state.read,
            write=state.write,
            relative=state.relative,
            publish=state.publish,
            durability=state.durability,
        )

    @property
    def user(self) -> int | None:
        """The user of its mount; None for this process's user."""
        backend = self.backend
        return backend.user if isinstance(backend, MountDirectory) else None

    def fill(self, dir_fd: int) -> None:
        """Hold the mount that the child has made; the place was empty before."""
        if not isinstance(self.backend, MountDirectory):
            raise TypeError("a place that was held from the start")
        self.backend.fill(dir_fd)
        self.identity = self.backend.identity()

    def beneath(self, name: bytes) -> bytes | None:
        """Return the rest of ``name`` beneath this place, by its text; else None."""
        if self.only is not None:
            # A file has nothing beneath it, and `FILE/` is not its name.
            named = name in self.prefixes or name == self.relative
            return self.only if named else None
        if not name.startswith(b"/"):
            return _strip_prefix(name, self.relative)
        for prefix in self.prefixes:
            rest = _strip_prefix(name, prefix)
            if rest is not None:
                return rest
        return None

    def part(self, rest: bytes, *, read: bool, write: bool) -> Place:
        """Return a place for a part of this one, with the given rights.

        Args:
            rest: a directory or file beneath this place; a file to be written may be
                missing.
            read: may be read.
            write: may be written.

        Raises:
            AccessDeniedError: ``rest`` leads out.
            OSError: the part cannot be opened.
        """
        backend, only = self.backend.narrow(rest, create=write)
        prefixes = self.prefixes
        relative = self.relative
        if self.only is None:
            prefixes = tuple(_join(prefix, rest) for prefix in prefixes)
            relative = None if relative is None else _join(relative, rest)
        return Place(
            backend,
            prefixes,
            only=only,
            read=read,
            write=write,
            relative=relative,
            publish=self.publish,
            durability=self.durability,
        )

    def holds(self, inner: Place, rest: bytes) -> bool:
        """Return whether ``rest`` beneath this place is now the place ``inner``."""
        try:
            backend, only = self.backend.narrow(rest, create=inner.only is not None)
        except (OSError, AccessDeniedError):
            return False
        try:
            return only == inner.only and backend.identity() == inner.identity
        finally:
            backend.close()


def _strip_prefix(name: bytes, prefix: bytes | None) -> bytes | None:
    if prefix is None:
        return None
    if prefix in (b"", b"/"):
        return name.lstrip(b"/") or b"."
    if name == prefix:
        return b"."
    if name.startswith(prefix + b"/"):
        return name[len(prefix) :].lstrip(b"/") or b"."
    return None


def _join(prefix: bytes, rest: bytes) -> bytes:
    """Return the text of ``rest`` beneath ``prefix``."""
    rest = rest.rstrip(b"/")
    if rest in (b"", b"."):
        return prefix
    return prefix + rest if prefix in (b"", b"/") else prefix + b"/" + rest


def open_place(
    path: str | bytes,
    *,
    read: bool = False,
    write: bool = False,
    relative: bytes | None = None,
    publish: str = PUBLISH_DIRECT,
    durability: str = "none",
) -> Place:
    """Resolve a path of the host once, and return a place that holds it (spec A3).

    Raises:
        OSError: the path, or the directory of a file to be written, cannot be opened.
    """
    given = os.fsencode(path)
    if not given:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if not given.startswith(b"/"):
        try:
            given = os.path.join(os.getcwdb(), given)
        except FileNotFoundError as why:  # that directory was removed
            why.filename = path
            raise
    backend, only = HostDirectory(-1, beneath=False).narrow(given, create=write)
    try:
        real = backend.path() if only is None else _join(backend.path(), only)
        if write and publish == PUBLISH_ON_CLOSE:
            with contextlib.suppress(OSError):  # may be written but not listed
                backend.remove_stale()
        return Place(
            backend,
            tuple(dict.fromkeys((*_plain_text(given), real))),
            only=only,
            read=read,
            write=write,
            relative=relative,
            publish=publish,
            durability=durability,
        )
    except BaseException:
        backend.close()
        raise


def _plain_text(given: bytes) -> tuple[bytes, ...]:
    """Return a path without ``.`` and ``..``, if it still names the same file.

    ``a/LINK/../b`` is not ``a/b`` if LINK leads elsewhere.
    """
    if not ODD.search(given):
        return (given,)
    text = os.path.abspath(given)
    for one, other in (
        (given, text),
        (os.path.dirname(given), os.path.dirname(text)),  # the file may not exist yet
    ):
        with contextlib.suppress(OSError):
            return (text,) if os.path.samefile(one, other) else ()
    return ()


def open_directory(dir_fd: int, name: bytes) -> int:
    """Open a directory beneath a held one with O_PATH (spec A4).

    Returns:
        A descriptor, which the caller owns.

    Raises:
        OSError: the name leads out, is no directory, or does not exist.
    """
    check_name(name)
    return open_beneath(dir_fd, name, os.O_PATH | os.O_DIRECTORY)


def close_places(places: Iterable[Place]) -> None:
    """Close the directories of places."""
    for place in places:
        place.backend.close()
