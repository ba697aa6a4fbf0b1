"""Places: the directories and single files that a policy is made of.

Rules of this file.

1. A place is a directory descriptor that is held from the start.  A name's text only
   chooses *which* place is asked; whether the file is beneath that place is the
   kernel's answer (``paths``).  A wrong guess by text can therefore refuse too much,
   never allow too much (spec A4).
2. A place that is one file is held through its directory, links in its name resolved:
   a file that does not exist yet can be granted, one that is replaced stays granted,
   one that is replaced by a link is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING

from hostlib.linux.resolve import check_name, open_beneath
from vfs.backends import HostDirectory, MountDirectory
from vfs.errors import AccessDeniedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfs.backends import Backend

# What is left out of an absolute path that is written out: empty names, "." and "..".
_ODD = re.compile(rb"/(?:/|\.{1,2}(?:/|\Z)|\Z)")

PUBLISH_DIRECT = "direct"
PUBLISH_ON_CLOSE = "on-close"
DURABILITY = ("none", "close", "write")


class Place:
    """A directory that names lie beneath, or one file.

    Args:
        backend: the held directory, that of the file for a file; the place owns it.
        prefixes: absolute texts of the place itself; the first one is what it was
            asked for by, the last one of ``open_place`` its path without any link.
        only: the one entry that is granted; None grants everything beneath.
        read: may be read.
        write: may be written.
        relative: the way to this place from where relative names start, empty for a
            root; None where relative names do not reach it (a grant).
        publish: when ``w`` and ``w+`` show: ``direct`` or ``on-close`` (spec A3b).
        durability: when fsync is paid: ``none``, ``close`` or ``write``.

    Attributes:
        identity: what tells the held directory from any other.
        is_distant: its file system may wait for another machine or process.
        is_lasting: no path has to name it, for as long as it is held.
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

    def fill(self, dir_fd: int) -> None:
        """Hold the mount that a child has made, of which nothing was asked yet."""
        if not isinstance(self.backend, MountDirectory):
            raise TypeError("a place that was held from the start")
        self.backend.fill(dir_fd)
        self.identity = self.backend.identity()

    def beneath(self, name: bytes) -> bytes | None:
        """Return what of ``name`` lies beneath this place by its text, else None."""
        if self.only is not None:
            # One file: nothing lies beneath it, and `FILE/` is not its name.
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
        """Return a part of this place, held on its own, with the rights given.

        Args:
            rest: a directory or file beneath this place; one that is to be written may
                be missing.
            read: may be read.
            write: may be written.

        Raises:
            AccessDeniedError: it leads out.
            OSError: it cannot be reached.
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
        """Tell whether ``rest`` beneath this place is what ``inner`` holds, now."""
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
    """Resolve a path as the host sees it, once, and hold it (spec A3).

    Raises:
        OSError: the path, or the directory of a file that is to be written, cannot be
            reached.
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
    """Return a path without ``.`` and ``..``, if it still means the same then.

    ``a/LINK/../b`` is not ``a/b`` where LINK leads elsewhere.
    """
    if not _ODD.search(given):
        return (given,)
    text = os.path.abspath(given)
    for one, other in (
        (given, text),
        (os.path.dirname(given), os.path.dirname(text)),  # of a file yet to be made
    ):
        with contextlib.suppress(OSError):
            return (text,) if os.path.samefile(one, other) else ()
    return ()


def open_directory(dir_fd: int, name: bytes) -> int:
    """Open a directory beneath a held one, for nothing but being there (spec A4).

    Returns:
        An O_PATH descriptor, the caller's to close.

    Raises:
        OSError: it leads out, is no directory, or is not there.
    """
    check_name(name)
    return open_beneath(dir_fd, name, os.O_PATH | os.O_DIRECTORY)


def close_places(places: Iterable[Place]) -> None:
    """Release the directories that the places hold."""
    for place in places:
        place.backend.close()
