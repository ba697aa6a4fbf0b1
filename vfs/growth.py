"""How much lies beneath places, for what grows there without passing the ledger.

Tools write by themselves. What they add is found by looking at the places that their
child may write, and taken off from what lay there before: the rest is growth, whatever
made it.

Rules of this file.

1. A look holds ``HELD`` descriptors and follows no link, however deep the tree is. What
   is moved meanwhile leads nowhere: the way up must lead where the way down began.
2. A look takes time, so what it finds is true only if nothing was charged meanwhile. Else
   nothing is given back, and only what is beyond all doubt is charged. Bytes without a
   name are added to what it finds.
3. A file takes its length, or what was allocated for it where that is more than a block
   or two beyond: so a sparse file counts as it always did, and room that was allocated
   beyond a file's end counts too. A directory takes what was allocated for it, once that
   is long. A file with many names takes room once, and is an entry for each name.
4. A directory that its owner has closed to itself hides what is in it: it is counted as
   that, and one more than before is as good as a limit that is passed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from vfs.mounts import mount_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostlib.accounts import Account
    from vfs.ledger import Ledger
    from vfs.places import Place

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})


ROUNDING_BYTES = 64 * 1024
"""What is allocated beyond a length because file systems allocate blocks: clusters of
64 KiB are the longest in use, and attributes take a block, too."""

HELD = 32
"""Directories on the way down that stay open; a walk that is deeper goes up by "..".

A tree that anybody makes is not as deep, so what is moved in it meanwhile is no matter."""


class MovedError(Exception):
    """A directory far down was moved while somebody looked into it."""


class Content(NamedTuple):
    """What lies beneath some places.

    Attributes:
        size_bytes: of all files and long directories (rule 3).
        files: entries of any kind, each name of a file one.
        closed: directories that their owner, this process's user, may not read.
    """

    size_bytes: int
    files: int
    closed: int


def content_of(places: Iterable[Place]) -> Content:
    """Look at what lies beneath places, each thing once; for a worker thread.

    Raises:
        MovedError: something was moved meanwhile: look again.
        OSError: a place cannot be read.
    """
    held = [(place, fd) for place in places for fd in place.backend.descriptors()]
    look = _Look({place.identity for place, _ in held if place.only is None})
    for place, fd in held:
        if place.only is not None:
            look.note_entry(fd, os.fsdecode(place.only))
    for place, fd in held:
        if place.only is None:
            look.walk(fd)
    return Content(look.size_bytes, look.files, look.closed)


def content_beneath(fd: int) -> Content:
    """Look at what lies beneath one directory; for a worker thread.

    Raises:
        MovedError: something was moved meanwhile: look again.
        OSError: it cannot be read.
    """
    look = _Look(set())
    look.walk(fd)
    return Content(look.size_bytes, look.files, look.closed)


class Charged(NamedTuple):
    """What a ledger has charged.

    Attributes:
        size_bytes: bytes.
        files: files.
        unnamed_bytes: of the bytes, those that no look finds: they have no name yet
            (staged) or none any more (removed while open), or are reserved by a WRITE.
    """

    size_bytes: int
    files: int
    unnamed_bytes: int


def charged_to(ledger: Ledger, reserved_bytes: int = 0) -> Charged:
    """Return what is charged now.

    Args:
        ledger: to it.
        reserved_bytes: of that, what requests that have begun have not done yet.
    """
    unnamed = {
        file.handle.identity(): file.handle.size()
        for file in ledger.open
        if file.staged or not file.handle.links()
    }
    unnamed_bytes = sum(unnamed.values()) + reserved_bytes
    return Charged(ledger.size_bytes.used, ledger.files.used, unnamed_bytes)


def before_all(charged: Charged, found: Content) -> tuple[int, int, int]:
    """Return what lay there before any of what is charged, for ``Ledger.before``."""
    named_bytes = charged.size_bytes - charged.unnamed_bytes
    return found.size_bytes - named_bytes, found.files - charged.files, found.closed


def settle(ledger: Ledger, charged: Charged, found: Content, now: Charged) -> None:
    """Charge a ledger for what was found beneath its places (rule 2).

    Args:
        ledger: whose ``before`` is known.
        charged: to it, before the look.
        found: by the look.
        now: charged to it.
    """
    before = ledger.before
    if before is None:
        raise RuntimeError("nobody has looked at what was there before")
    is_exact = now == charged

    def settle_one(account: Account[int], grown: int, most: int) -> None:
        if is_exact or grown > most:
            account.record(grown - most)

    if ledger.bounds_size:
        grown = found.size_bytes - before[0] + now.unnamed_bytes
        settle_one(ledger.size_bytes, grown, max(charged.size_bytes, now.size_bytes))
    if ledger.bounds_files:
        grown = max(0, found.files - before[1])
        settle_one(ledger.files, grown, max(charged.files, now.files))


class _Frame:
    """A directory on the way down.

    Attributes:
        fd: open, or -1 if it was closed meanwhile.
        identity: what tells it from any other.
        inner: the names of those that are still to be entered.
    """

    __slots__ = ("fd", "identity", "inner")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.identity = _identity(os.fstat(fd))
        self.inner: list[str] = []

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class _Look:
    """One look at some places, of which these are the tops that are directories."""

    def __init__(self, tops: set[tuple[int, int]]) -> None:
        self.size_bytes = 0
        self.files = 0
        self.closed = 0
        self._tops = tops
        self._walked: set[tuple[int, int]] = set()
        self._sized: set[tuple[int, int]] = set()  # files that may come again
        # Entries that are places, by the directory that they are in.
        self._places: dict[tuple[int, int], set[str]] = {}

    def note_entry(self, dir_fd: int, name: str) -> None:
        """Count an entry that is a place of its own."""
        noted = self._places.setdefault(_identity(os.fstat(dir_fd)), set())
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            if name not in noted:
                noted.add(name)
                self._count(status, dir_fd, is_place=True)

    def walk(self, top_fd: int) -> None:
        """Count everything beneath a directory."""
        frames = [_Frame(os.open(".", _DIRECTORY, dir_fd=top_fd))]
        try:
            if frames[0].identity in self._walked:
                return
            self._walked.add(frames[0].identity)
            frames[0].inner = self._list(frames[0])
            while frames:
                frame = frames[-1]
                if frame.inner:
                    fd = self._enter(frame.fd, frame.inner.pop())
                    if fd >= 0:
                        frames.append(_Frame(fd))
                        frames[-1].inner = self._list(frames[-1])
                        if len(frames) > HELD:
                            frames[-HELD - 1].close()
                    continue
                if len(frames) > 1 and frames[-2].fd < 0:
                    frames[-2].fd = _up(frame.fd, frames[-2].identity)
                frames.pop().close()
        finally:
            for frame in frames:
                frame.close()

    def _enter(self, fd: int, name: str) -> int:
        """Open a directory to be looked into, if there is one; -1 if there is not."""
        try:
            return os.open(name, _DIRECTORY, dir_fd=fd)
        except PermissionError:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                self.closed += status.st_uid == os.geteuid()
            return -1
        except OSError as why:
            if why.errno in _GONE:
                return -1
            raise

    def _list(self, frame: _Frame) -> list[str]:
        """Count the entries of a directory; return those that are directories."""
        inner = []
        noted = self._places.get(frame.identity, ())
        with os.scandir(frame.fd) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if entry.name not in noted:
                    self._count(status, frame.fd)
                if stat.S_ISDIR(status.st_mode) and _identity(status) not in self._tops:
                    inner.append(entry.name)
        return inner

    def _count(
        self, status: os.stat_result, dir_fd: int, *, is_place: bool = False
    ) -> None:
        self.files += 1
        if stat.S_ISDIR(status.st_mode):
            self.size_bytes += _beyond(0, status, dir_fd)
        elif stat.S_ISLNK(status.st_mode):
            self.size_bytes += status.st_size
        elif stat.S_ISREG(status.st_mode):
            if is_place or status.st_nlink > 1:
                identity = _identity(status)
                if identity in self._sized:
                    return
                self._sized.add(identity)
            length = status.st_size
            self.size_bytes += length + _beyond(length, status, dir_fd)


def _beyond(length: int, status: os.stat_result, dir_fd: int) -> int:
    """Return what is allocated beyond a length; 0 for what blocks are rounded up to."""
    beyond = status.st_blocks * 512 - length
    if beyond <= max(ROUNDING_BYTES, status.st_blksize):
        return 0
    if mount_of(status.st_dev, dir_fd).allocates_ahead:
        return max(0, beyond - 2 * length)
    return beyond


def _up(fd: int, identity: tuple[int, int]) -> int:
    """Open the directory that another one was entered from.

    Raises:
        MovedError: that one lies elsewhere now.
    """
    above = os.open("..", _DIRECTORY, dir_fd=fd)
    if _identity(os.fstat(above)) != identity:
        os.close(above)
        raise MovedError
    return above


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
