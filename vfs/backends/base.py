"""What every backend promises; the contract suite checks each against it.

A backend is a directory tree; names are relative to it and never lead out of it.  All
calls are synchronous and short, or made by ``mounts`` in a thread; all raise
``OSError`` with an errno, and ``AccessDeniedError`` for a name that leads out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from vfs.mounts import Mount


class FileStatus(NamedTuple):
    """What STAT tells: size in bytes, mtime in nanoseconds, kind in words."""

    size: int
    mtime_ns: int
    kind: str


class Removed(NamedTuple):
    """What a name stood for before it was taken away.

    Attributes:
        size: bytes that are free once nobody has the file open; 0 if it has more names.
        identity: what told it from any other.
        was_last: it was the last name of a file, so its bytes will be free.
    """

    size: int
    identity: tuple[int, int]
    was_last: bool


class UnflushedError(OSError):
    """A file has its name, but the directory could not be put on the disk.

    The new content stands there, whole; after a crash of the machine the old one may be
    there again.

    Attributes:
        replaced: what had the name before; None if nothing had it.
    """

    def __init__(self, why: OSError, replaced: Removed | None) -> None:
        super().__init__(why.errno, why.strerror)
        self.replaced = replaced


class Handle(Protocol):
    """An open regular file, without an offset.

    Attributes:
        fd: the host's descriptor, or -1 where there is none.
        mount: how its file system is to be used.
    """

    fd: int
    mount: Mount

    def pread(self, size: int, offset: int) -> bytes:
        """Read up to ``size`` bytes at ``offset``, fewer at the end of the file.

        Raises:
            BlockingIOError: the data is not in memory.
        """

    def pread_wait(self, size: int, offset: int) -> bytes:
        """Read like ``pread``, waiting for the disk."""

    def pwrite(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data``, or cut off again what it added and raise (spec W5)."""

    def append(self, data: bytes | memoryview) -> int:
        """Write all at the end, as above; return the offset after it (spec P1)."""

    def cut_off(self, end: int, old_end: int) -> None:
        """Cut off what a write added beyond the old end, if nobody has added since."""

    def size(self) -> int:
        """Return the size in bytes."""

    def truncate(self, size: int) -> None:
        """Set the size in bytes."""

    def sync(self) -> None:
        """Put data on the disk."""

    def publish(self, *, durable: bool) -> Removed | None:
        """Make a staged file appear under its name; return what it replaced."""

    def will_replace(self) -> bool:
        """Tell whether the name of the file, which a staged one will take, is there."""

    def identity(self) -> tuple[int, int]:
        """Return what tells this file from any other."""

    def links(self) -> int:
        """Return how many names the file has; none after its removal."""

    def frees_much(self) -> bool:
        """Tell whether to close it may give much back, which takes long."""

    def descriptors(self) -> tuple[int, ...]:
        """Return the host's descriptors that the handle holds."""

    def close(self) -> None:
        """Release the file; a staged one that was not published never existed."""

    def drop(self) -> None:
        """Release it likewise; what that gives back, if it is much, in a thread."""


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
            exclusive: fail with ``EEXIST`` if it is there.
            staged: what is written appears at ``publish``, under the name.
        """

    def stat(self, name: bytes) -> FileStatus:
        """Tell size, time and kind; links are followed inside the tree."""

    def list(self, name: bytes, limit: int) -> list[tuple[bytes, str]]:
        """Return (name, kind) of a directory's entries, sorted by name.

        Raises:
            OSError: ``EOVERFLOW``: there are more than ``limit``.
        """

    def make_directory(self, name: bytes) -> None:
        """Make a directory."""

    def remove(self, name: bytes) -> Removed:
        """Remove a file or an empty directory, never what a link names."""

    def rename(self, old: bytes, target: Backend, new: bytes) -> Removed | None:
        """Rename an entry, return what it replaced; to another kind of tree: EXDEV."""

    def sync_entry(self, name: bytes) -> None:
        """Put a name on the disk, and not what it stands for."""

    def narrow(self, name: bytes, *, create: bool) -> tuple[Backend, bytes | None]:
        """Return a part of the tree, held on its own.

        Args:
            name: a directory or a file.
            create: the file may be missing.

        Returns:
            (the directory, None), or for a file (its directory, its name there), links
            resolved; that tree follows no link in a last component.
        """

    @property
    def is_distant(self) -> bool:
        """Whether its file system may wait for another machine or process."""

    @property
    def is_lasting(self) -> bool:
        """Whether it is there for as long as it is held, whatever has its path."""

    def identity(self) -> tuple[int, int]:
        """Return what tells this tree from any other."""

    def descriptors(self) -> tuple[int, ...]:
        """Return the host's descriptors that the tree holds."""

    def close(self) -> None:
        """Release what the tree holds."""


class Mode:
    """An open mode of the wire (spec O3).

    Attributes:
        text: the word.
        flags: O_* flags of access only: creation and truncation are decided apart, after
            a look at what was opened (spec O7).
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
KEPT.text = "w"  # what tables and events call it
"""To write into a file that is there, leaving what it holds: no word of the wire."""
