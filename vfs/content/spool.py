"""Files without a name for what memory does not hold.

What it is: two places on the disk, and what stands for a content that lies there.  What
it is not: it knows no keys, no holders and no limits (``vfs.content.store``).

Rules of this file.

1. A file here never has a name: a host that is killed leaves nothing behind.
2. A long content has a file of its own and is mapped: it is read as memory is, and the
   kernel keeps of it what it has room for.  A mapping costs the host a descriptor.
3. Short ones lie in slots of a few files, for a host has fewer descriptors than a model
   may have contents.  A slot that is given back is used again; a file whose slots are
   all free is emptied.
4. A slot that was given back is never read: its next content is somebody else's.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
from typing import TYPE_CHECKING

from vfs.content.errors import FILE_OPERATION, FdError
from vfs.hostio import afterwards

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOT_SIZES = tuple(1024 * 4**n for n in range(5))
"""1 KiB to 256 KiB: a content takes the smallest slot it fits, so at most four times
its size."""

MOST_IN_SLOT_BYTES = SLOT_SIZES[-1]
"""To read as much out of a slot takes 20 us; longer contents are mapped."""

WRITE_BYTES = 1024 * 1024
"""One write.  A kernel with large folios takes memory in pieces as long as the write, and
the longest come from where nobody has written before: in a virtual machine that may be
memory which its host has yet to find (1.3 instead of 0.3 s a GB)."""

SLOW_TO_FREE_BYTES = 16 * 1024 * 1024
"""A longer file is freed in a thread: to give a GiB back takes the kernel 70 to 200 ms."""

UNMAP_BYTES = 16 * 1024 * 1024
"""What is unmapped at once, with the interpreter held: a millisecond."""


class FileMap(mmap.mmap):
    """A long content on the disk.

    Attributes:
        fd: its file, if that is still open: to give the pages back is then up to
            close(2), which lets go of the interpreter; -1 if it is not.
        identity: what tells the file from others.
    """

    fd: int = -1
    identity: tuple[int, int]
    spool: Spool

    def free(self) -> None:
        """Give the file back, now or in a thread; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            self._unmap()
        else:
            afterwards(self._free_slowly, fd)

    def _free_slowly(self, fd: int) -> None:
        size = len(self)
        for start in range(0, size, UNMAP_BYTES):
            self.madvise(mmap.MADV_DONTNEED, start, min(UNMAP_BYTES, size - start))
        self._unmap()
        self.spool.close_file(fd)

    def _unmap(self) -> None:
        # A search of a client that is gone may still read: then it ends with that.
        with contextlib.suppress(BufferError):
            self.close()


class Slot:
    """A short content on the disk.

    Attributes:
        size: bytes.
    """

    __slots__ = ("_file", "_is_free", "_number", "size")

    def __init__(self, file: SlotFile, number: int, size: int) -> None:
        self._file = file
        self._number = number
        self._is_free = False
        self.size = size

    def read(self) -> bytes:
        """Return the content.

        Raises:
            FdError: ``file_operation``: the disk refused, or the content is gone.
        """
        try:
            data = self._file.read(self._number, self.size)
        except OSError as why:
            raise no_room(why, "read") from None
        # After the read: what was free only then has been read before its next use.
        if self._is_free or len(data) != self.size:
            raise FdError(FILE_OPERATION, "Cannot read content: it is gone")
        return data

    def free(self) -> None:
        """Give the slot back; safe to call twice."""
        if not self._is_free:
            self._is_free = True  # before somebody else may write there (rule 4)
            self._file.free(self._number)


class SlotFile:
    """Slots of one size.

    Args:
        spool: opens the file when the first slot is taken.
        slot_bytes: their size.
    """

    def __init__(self, spool: Spool, slot_bytes: int) -> None:
        self.fd = -1
        self._spool = spool
        self._slot_bytes = slot_bytes
        self._free: list[int] = []
        self._count = 0
        self._lock = threading.Lock()

    def put(self, data: bytes) -> Slot:
        """Keep a content.

        Raises:
            OSError: the disk refused.
        """
        with self._lock:
            if self.fd < 0:
                self.fd = self._spool.open_file()
            if self._free:
                number = self._free.pop()
            else:
                number = self._count
                self._count += 1
        try:
            _pwrite_all(self.fd, data, number * self._slot_bytes)
        except BaseException:
            self.free(number)
            raise
        return Slot(self, number, len(data))

    def read(self, number: int, size: int) -> bytes:
        """Return the first bytes of a slot."""
        return os.pread(self.fd, size, number * self._slot_bytes)

    def free(self, number: int) -> None:
        """Take a slot back."""
        with self._lock:
            self._free.append(number)
            if len(self._free) == self._count:
                self._free.clear()
                self._count = 0
                self._spool.close_file(self.fd)
                self.fd = -1


class Spool:
    """The files without a name of one store.

    Args:
        directory: where they are made; None: the system's temporary one.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._open: set[int] = set()
        self._slots = {size: SlotFile(self, size) for size in SLOT_SIZES}

    def keep(self, data: bytes) -> FileMap | Slot:
        """Put a content on the disk; return what stands for it there.

        Raises:
            FdError: ``file_operation``: the disk refused.
        """
        try:
            if 0 < len(data) <= MOST_IN_SLOT_BYTES:
                size = next(size for size in SLOT_SIZES if len(data) <= size)
                return self._slots[size].put(data)
            fd = self.open_file()
            try:
                write_all(fd, data)
            except BaseException:
                self.close_file(fd)
                raise
            return self.map(fd, len(data))
        except OSError as why:
            raise no_room(why) from None

    def map(self, fd: int, size: int) -> FileMap:
        """Return the content of a file from ``open_file``, which belongs to it now.

        Raises:
            OSError: it cannot be mapped; the file is closed.
        """
        try:
            made = FileMap(fd, size, prot=mmap.PROT_READ)
            status = os.fstat(fd)
            made.identity = status.st_dev, status.st_ino
        except BaseException:
            self.close_file(fd)
            raise
        made.spool = self
        if size > SLOW_TO_FREE_BYTES:
            made.fd = fd
        else:
            self.close_file(fd)
        return made

    def open_file(self) -> int:
        """Open a new file without a name; ``close_file`` closes it.

        Raises:
            OSError: the directory cannot have one.
        """
        directory = self._directory or tempfile.gettempdir()
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
        try:
            fd = os.open(directory, flags, 0o600)
        except (IsADirectoryError, NotImplementedError):
            fd = _open_unlinked(directory)
        except OSError as why:
            if why.errno != errno.EOPNOTSUPP:  # a file system without O_TMPFILE
                raise
            fd = _open_unlinked(directory)
        self._open.add(fd)
        return fd

    def take_over(self, fd: int) -> None:
        """Own a file that another program of this host has opened."""
        self._open.add(fd)

    def close_file(self, fd: int) -> None:
        """Close a file; what is mapped of it stays."""
        self._open.discard(fd)
        os.close(fd)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors, but those of mappings."""
        for fd in tuple(self._open):
            yield fd, "content"


def descriptors_of(files: set[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Return (file, descriptor) of each that this process has of some files."""
    found = []
    for name in os.listdir("/proc/self/fd") if files else ():
        fd = int(name)
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) in files:
                found.append(((status.st_dev, status.st_ino), fd))
    return found


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of it at the end of what was written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:WRITE_BYTES]) :]


def _pwrite_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


def _open_unlinked(directory: str) -> int:
    fd, name = tempfile.mkstemp(dir=directory)
    os.unlink(name)
    return fd


def no_room(why: OSError, verb: str = "store") -> FdError:
    """Return what is told of a disk that refused."""
    reason = os.strerror(why.errno or errno.EIO)
    return FdError(FILE_OPERATION, f"Cannot {verb} content: {reason}")
