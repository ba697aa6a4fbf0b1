"""Growth by programs that write without the VFS: content now less content before.

1. A look holds ``HELD`` descriptors and follows no link.  After a concurrent move the way
   up does not lead back to the directory it came from, which ends the look.
2. Charges during a look make its result inexact: then nothing is given back, and only
   certain growth is charged.  Bytes of files without a name are added to the result.
3. A file takes its length, or its allocated blocks if those are more than rounding.  A
   directory takes its allocated blocks, once they are many.  A file with several names
   takes its bytes once, and an entry for each name.
4. A directory that its owner may not read is counted as closed.  One more than before
   counts like a limit that is passed, for it may hide content.
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
"""Allocation beyond a length that counts as rounding: clusters have at most 64 KiB, and
attributes take a block, too."""

HELD = 32
"""Directories on the way down that stay open; a deeper walk goes up by "..".  Usual trees
are less deep, so concurrent moves in them do no harm."""


class MovedError(Exception):
    """A deep directory was moved during a look into it."""


class PlacesContent(NamedTuple):
    """The content of some places.

    Attributes:
        size_bytes: bytes of all files and long directories (rule 3).
        files: number of entries of any kind; each name of a file is one.
        closed: number of directories that their owner, this process's user, may not
            read.
    """

    size_bytes: int
    files: int
    closed: int


def content_of(places: Iterable[Place]) -> PlacesContent:
    """Return the content of places, each file once; for a worker thread.

    Raises:
        MovedError: a directory was moved meanwhile: call again.
        OSError: a place cannot be read.
    """
    held = [(place, fd) for place in places for fd in place.backend.descriptors()]
    look = Look({place.identity for place, _ in held if place.only is None})
    for place, fd in held:
        if place.only is not None:
            look.note_entry(fd, os.fsdecode(place.only))
    for place, fd in held:
        if place.only is None:
            look.walk(fd)
    return PlacesContent(look.size_bytes, look.files, look.closed)


def content_beneath(fd: int) -> PlacesContent:
    """Return the content of one directory; for a worker thread.

    Raises:
        MovedError: a directory was moved meanwhile: call again.
        OSError: the directory cannot be read.
    """
    look = Look(set())
    look.walk(fd)
    return PlacesContent(look.size_bytes, look.files, look.closed)


class Charges(NamedTuple):
    """The charges of a ledger.

    Attributes:
        size_bytes: bytes.
        files: files.
        unnamed_bytes: the part of the bytes that no look finds: files without a name
            (staged, or removed while open), and reservations of a WRITE.
    """

    size_bytes: int
    files: int
    unnamed_bytes: int


def charges_of(ledger: Ledger, reserved_bytes: int = 0) -> Charges:
    """Return the present charges of a ledger.

    Args:
        ledger: the ledger.
        reserved_bytes: the part that unfinished requests have reserved.
    """
    unnamed = {
        file.handle.identity(): file.handle.size()
        for file in ledger.open
        if file.staged or not file.handle.links()
    }
    unnamed_bytes = sum(unnamed.values()) + reserved_bytes
    return Charges(ledger.size_bytes.used, ledger.files.used, unnamed_bytes)


def content_before(charged: Charges, found: PlacesContent) -> tuple[int, int, int]:
    """Return the content from before all charges, for ``Ledger.before``."""
    named_bytes = charged.size_bytes - charged.unnamed_bytes
    return found.size_bytes - named_bytes, found.files - charged.files, found.closed


def settle(
    ledger: Ledger, charged: Charges, found: PlacesContent, now: Charges
) -> None:
    """Charge a ledger for the content that a look found (rule 2).

    Args:
        ledger: a ledger whose ``before`` is known.
        charged: its charges before the look.
        found: the result of the look.
        now: its charges now.
    """
    before = ledger.before
    if before is None:
        raise RuntimeError("the content before the ledger's charges is unknown")
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


class Frame:
    """A directory on the way down.

    Attributes:
        fd: its descriptor; -1 if it was closed meanwhile.
        identity: its device and inode.
        inner: names of the directories in it that are not entered yet.
    """

    __slots__ = ("fd", "identity", "inner")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.identity = _identity(os.fstat(fd))
        self.inner: list[str] = []

    def close(self) -> None:
        """Close the directory."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Look:
    """One look at some places; ``tops`` are those that are directories."""

    def __init__(self, tops: set[tuple[int, int]]) -> None:
        self.size_bytes = 0
        self.files = 0
        self.closed = 0
        self._tops = tops
        self._walked: set[tuple[int, int]] = set()
        self._sized: set[tuple[int, int]] = set()  # counted files with several names
        # Entries that are places, by their directory.
        self._places: dict[tuple[int, int], set[str]] = {}

    def note_entry(self, dir_fd: int, name: str) -> None:
        """Count an entry that is itself a place."""
        noted = self._places.setdefault(_identity(os.fstat(dir_fd)), set())
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            if name not in noted:
                noted.add(name)
                self._count(status, dir_fd, is_place=True)

    def walk(self, top_fd: int) -> None:
        """Count the content of a directory."""
        frames = [Frame(os.open(".", _DIRECTORY, dir_fd=top_fd))]
        try:
            if frames[0].identity in self._walked:
                return
            self._walked.add(frames[0].identity)
            frames[0].inner = self.list_names(frames[0])
            while frames:
                frame = frames[-1]
                if frame.inner:
                    fd = self._enter(frame.fd, frame.inner.pop())
                    if fd >= 0:
                        frames.append(Frame(fd))
                        frames[-1].inner = self.list_names(frames[-1])
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
        """Open an inner directory; return -1 if it is gone or may not be read."""
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

    def list_names(self, frame: Frame) -> list[str]:
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
            self.size_bytes += bytes_beyond(0, status, dir_fd)
        elif stat.S_ISLNK(status.st_mode):
            self.size_bytes += status.st_size
        elif stat.S_ISREG(status.st_mode):
            if is_place or status.st_nlink > 1:
                identity = _identity(status)
                if identity in self._sized:
                    return
                self._sized.add(identity)
            length = status.st_size
            self.size_bytes += length + bytes_beyond(length, status, dir_fd)


def bytes_beyond(length: int, status: os.stat_result, dir_fd: int) -> int:
    """Return the bytes allocated beyond a length; 0 if they are only rounding."""
    beyond = status.st_blocks * 512 - length
    if beyond <= max(ROUNDING_BYTES, status.st_blksize):
        return 0
    if mount_of(status.st_dev, dir_fd).allocates_ahead:
        return max(0, beyond - 2 * length)
    return beyond


def _up(fd: int, identity: tuple[int, int]) -> int:
    """Open the parent of a directory, which must have the given identity.

    Raises:
        MovedError: the directory was moved.
    """
    above = os.open("..", _DIRECTORY, dir_fd=fd)
    if _identity(os.fstat(above)) != identity:
        os.close(above)
        raise MovedError
    return above


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
