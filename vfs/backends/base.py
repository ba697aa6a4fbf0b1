"""The contract of backends; a suite of tests checks each against it.

A backend is a directory tree; names are relative to it and never lead out of it.  Calls
block: those that may take long are made in a worker thread.  All raise ``OSError`` with an
errno, and ``AccessDeniedError`` for a name that leads out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from vfs.mounts import Mount


class FileStatus(NamedTuple):
    """The result of STAT: size in bytes, mtime in nanoseconds, kind in words."""

    size: int
    mtime_ns: int
    kind: str


class RemovedEntry(NamedTuple):
    """A file or directory that lost a name.

    Attributes:
        size: bytes that are freed when the file is not open any more; 0 if it has other
            names.
        identity: its device and inode.
        was_last: the name was its last one, so its bytes will be freed.
    """

    size: int
    identity: tuple[int, int]
    was_last: bool


class UnflushedError(OSError):
    """A file was published, but its directory could not be synced to the disk.

    The name has the complete new content; after a crash of the machine it may have the old
    one again.

    Attributes:
        replaced: the file that had the name before; None if there was none.
    """

    def __init__(self, why: OSError, replaced: RemovedEntry | None) -> None:
        super().__init__(why.errno, why.strerror)
        self.replaced = replaced


class Handle(Protocol):
    """An open regular file, without an offset.

    Attributes:
        fd: the host's descriptor, or -1 if there is none.
        mount: its file system.
    """

    fd: int
    mount: Mount

    def pread(self, size: int, offset: int) -> bytes | bytearray:
        """Read up to ``size`` bytes at ``offset``, fewer at the end of the file.

        Raises:
            BlockingIOError: the data is not in memory.
        """

    def pread_wait(self, size: int, offset: int) -> bytes:
        """Read like ``pread``, waiting for the disk."""

    def pwrite(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data``; else cut off the added bytes and raise (spec W5)."""

    def append(self, data: bytes | memoryview) -> int:
        """Write at the end, as ``pwrite``; return the offset after it (spec P1)."""

    def cut_off(self, end: int, old_end: int) -> None:
        """Cut off the bytes from ``old_end`` to ``end``, if ``end`` is still the end."""

    def size(self) -> int:
        """Return the size in bytes."""

    def truncate(self, size: int) -> None:
        """Set the size in bytes."""

    def sync(self) -> None:
        """Sync the data to the disk."""

    def publish(self, *, durable: bool) -> RemovedEntry | None:
        """Give a staged file its name; return the file that it replaced."""

    def will_replace(self) -> bool:
        """Return whether the name of a staged file exists, so that it will replace."""

    def identity(self) -> tuple[int, int]:
        """Return the file's device and inode."""

    def links(self) -> int:
        """Return the number of names of the file; 0 after its removal."""

    def descriptors(self) -> tuple[int, ...]:
        """Return the host's descriptors that the handle holds."""

    def close(self) -> None:
        """Close the file; a staged one that was not published vanishes."""

    def drop(self) -> None:
        """Close the file like ``close``; free many pages in a thread."""


class Backend(Protocol):
    """A directory tree."""

    def open(
        self, name: bytes, mode: Mode, *, create: bool, exclusive: bool, staged: bool
    ) -> Handle:
        """Open a regular file.

        Args:
            name: relative to this tree.
            mode: how to access it; nothing is truncated here.
            create: make the file if it is missing.
            exclusive: fail with ``EEXIST`` if it exists.
            staged: the file gets its name at ``publish``.
        """

    def stat(self, name: bytes) -> FileStatus:
        """Return size, time and kind; links are followed inside the tree."""

    def list(self, name: bytes, limit: int) -> list[tuple[bytes, str]]:
        """Return (name, kind) of a directory's entries, sorted by name.

        Raises:
            OSError: ``EOVERFLOW``: there are more than ``limit``.
        """

    def make_directory(self, name: bytes) -> None:
        """Make a directory."""

    def remove(self, name: bytes) -> RemovedEntry:
        """Remove a file, a link itself or an empty directory."""

    def rename(self, old: bytes, target: Backend, new: bytes) -> RemovedEntry | None:
        """Rename an entry, return the one it replaced; EXDEV to another kind of tree."""

    def sync_entry(self, name: bytes) -> None:
        """Sync the directory entry of a name to the disk, without the file."""

    def narrow(self, name: bytes, *, create: bool) -> tuple[Backend, bytes | None]:
        """Return a part of the tree with a descriptor of its own.

        Args:
            name: a directory or a file.
            create: the file may be missing.

        Returns:
            (the directory, None), or for a file (its directory, its name there) with
            links resolved; the returned tree follows no link in a last component.
        """

    @property
    def is_distant(self) -> bool:
        """Whether its file system may wait for another machine or process."""

    @property
    def is_lasting(self) -> bool:
        """Whether it needs no path as long as it is held."""

    def identity(self) -> tuple[int, int]:
        """Return the device and inode of its directory."""

    def descriptors(self) -> tuple[int, ...]:
        """Return the host's descriptors that the tree holds."""

    def close(self) -> None:
        """Close the tree's descriptors."""


class Mode:
    """An open mode of the wire (spec O3).

    Attributes:
        text: the word.
        flags: O_* flags of access only: creation and truncation are decided separately,
            after a look at the opened file (spec O7).
        reads: READ is allowed.
        writes: WRITE is allowed.
        appends: writes go to the end.
        creates: a missing file is made.
        empties: an existing file loses its content.
    """

    __slots__ = ("appends", "creates", "empties", "flags", "reads", "text", "writes")

    def __init__(self, text: str, flags: int) -> None:
        self.text = text
        self.flags = flags
        self.reads = text == "r" or text.endswith("+")
        self.writes = text != "r"
        self.appends = text[0] == "a"
        self.creates = text[0] != "r"
        self.empties = text[0] == "w"


MODES = {
    b"r": Mode("r", os.O_RDONLY),
    b"w": Mode("w", os.O_WRONLY),
    b"a": Mode("a", os.O_WRONLY | os.O_APPEND),
    b"r+": Mode("r+", os.O_RDWR),
    b"w+": Mode("w+", os.O_RDWR),
    b"a+": Mode("a+", os.O_RDWR | os.O_APPEND),
}
"""The six modes by their word."""

KEPT = Mode("r-", os.O_WRONLY)
KEPT.text = "w"  # its word in tables and events
"""A mode of the host only: writes into an existing file, without truncating it."""
