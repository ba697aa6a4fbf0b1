"""Slots: contents on the disk that share a few files and their descriptors.

1. A slot takes disk space for its content only: unwritten parts are holes, and a hole
   is punched after a longer content. Where a file system cannot do that, the space is
   reused; a file whose slots are all free is closed.
2. A slot that was given back is never read: its next content is another client's. Short
   contents are copied and the mark is checked afterwards; longer ones are mapped, and
   their slot is free when the last mapping is gone.
3. Python's mappings have a descriptor each: one exists only while there is a reader.
   The last used ones stay for readers of the next page.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from typing import TYPE_CHECKING

from hostlib.threads import ThreadLock, in_background, in_background_only
from supervisor.llmfd.errors import FILE_OPERATION, FdError

if TYPE_CHECKING:
    from hostlib.unnamed_files import UnnamedFiles
    from supervisor.llmfd.index import Buffer

SLOT_SIZES = tuple(1024 * 4**n for n in range(13))
"""1 KiB to 16 GiB: a content takes the smallest slot that it fits."""

MOST_COPIED_BYTES = 256 * 1024
"""Longest content that is copied, which takes 20 us; longer ones are mapped."""

WRITE_BYTES = 1024 * 1024
"""Bytes of one write. A kernel with large folios takes memory in pieces as long as the
write; in a virtual machine the longest may be memory that its host has not backed yet
(1.3 instead of 0.3 s a GB)."""

SLOW_TO_FREE_BYTES = 16 * 1024 * 1024
"""Longer contents are freed in a thread: the kernel needs 70 to 200 ms for a GiB."""

UNMAP_BYTES = 16 * 1024 * 1024
"""Bytes that are unmapped at once, with the interpreter held: a millisecond."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h

_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


class SlotMap(mmap.mmap):
    """A longer content in a slot, while it has a reader."""

    def __del__(self) -> None:
        """Let other threads run while a long one is unmapped."""
        release_pages(self)


class Slot:
    """A content in a slot.

    Attributes:
        size: bytes.
        room: its capacity in bytes.
    """

    __slots__ = ("_file", "_is_free", "_map", "_number", "room", "size")

    def __init__(self, file: SlotFile, number: int, size: int) -> None:
        self._file = file
        self._number = number
        self._is_free = False
        self._map: weakref.ReferenceType[SlotMap] | None = None
        self.room = file.slot_bytes
        self.size = size

    @property
    def address(self) -> tuple[int, int]:
        """Return (slot size, number)."""
        return self.room, self._number

    def append(self, data: Buffer | memoryview) -> None:
        """Write behind the bytes so far; the piece fits.

        Raises:
            OSError: the disk refused.
        """
        view = memoryview(data)
        while view:
            done = self._file.write(self._number, view[:WRITE_BYTES], self.size)
            self.size += done
            view = view[done:]

    def read(self) -> bytes | SlotMap:
        """Return the content; the caller drops a mapping soon.

        Raises:
            FdError: ``file_operation``: the disk refused, or the content is gone.
        """
        try:
            if self.size > MOST_COPIED_BYTES:
                return self._mapping()
            data = self._file.read(self._number, self.size)
        except OSError as why:
            raise make_disk_error(why, "read") from None
        # After the read: a slot that is freed later was still whole.
        if self._is_free or len(data) != self.size:
            raise _make_gone_error()
        return data

    def piece(self, offset: int, size: int) -> bytes:
        """Return a part of the bytes so far, without a mapping that stays.

        Precondition: the slot was not given back.

        Raises:
            OSError: the disk refused.
        """
        return self._file.read(self._number, size, offset)

    def _mapping(self) -> SlotMap:
        kept = self._file.kept
        with self._file.lock:
            if self._is_free:
                raise _make_gone_error()
            found = None if self._map is None else self._map()
            if found is None:
                found = self._file.map(self._number, self.size)
                self._map = weakref.ref(found)
            gone = kept.add(found)
        del gone  # outside of the lock: unmapping may be slow
        return found

    def free(self) -> None:
        """Give the slot back; safe to call twice."""
        with self._file.lock:
            if self._is_free:
                return
            self._is_free = True  # before another client may write there (rule 2)
            self._file.leaving.add(self._number)
        reader = None
        if self._map is not None:
            self._file.kept.drop(self._map())
            reader = self._map()
        if reader is None:
            self._file.free(self._number, self.size)
        else:
            weakref.finalize(reader, self._free_unread).atexit = False

    def _free_unread(self) -> None:
        # In a thread: the last reader may end anywhere, with any lock held.
        in_background_only(self._file.free, self._number, self.size)


class KeptMaps:
    """The last used mappings.

    Args:
        most: the number that is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._maps: dict[int, SlotMap] = {}  # least recently used first
        self._lock = ThreadLock()

    def add(self, used: SlotMap) -> SlotMap | None:
        """Keep a mapping; return the least recently used one if it goes."""
        with self._lock:
            self._maps.pop(id(used), None)
            self._maps[id(used)] = used
            if len(self._maps) <= self._most:
                return None
            return self._maps.pop(next(iter(self._maps)))

    def drop(self, gone: SlotMap | None) -> None:
        """Keep a mapping no longer."""
        with self._lock:
            self._maps.pop(id(gone), None)


class SlotFile:
    """Slots of one size.

    Args:
        files: opens the file when the first slot is taken.
        slot_bytes: their size.
        kept: the last used mappings of all sizes.

    Attributes:
        fd: the file; -1 while no slot is taken.
        slot_bytes: as above.
        kept: as above.
        leaving: slots that were given back and are not free yet.
        lock: guards all of it.
    """

    def __init__(self, files: UnnamedFiles, slot_bytes: int, kept: KeptMaps) -> None:
        self.fd = -1
        self.slot_bytes = slot_bytes
        self.kept = kept
        self.leaving: set[int] = set()
        self.lock = ThreadLock()
        self._files = files
        self._free: list[int] = []
        self._count = 0

    def take(self) -> Slot:
        """Return an empty slot.

        Raises:
            OSError: the directory cannot have a file.
        """
        with self.lock:
            if self.fd < 0:
                self.fd = self._files.open()
            if self._free:
                number = self._free.pop()
            else:
                number = self._count
                self._count += 1
        return Slot(self, number, 0)

    def write(self, number: int, data: memoryview, offset: int) -> int:
        """Write into a slot; return the number of written bytes."""
        return os.pwrite(self.fd, data, number * self.slot_bytes + offset)

    def read(self, number: int, size: int, offset: int = 0) -> bytes:
        """Return bytes of a slot."""
        return os.pread(self.fd, size, number * self.slot_bytes + offset)

    def map(self, number: int, size: int) -> SlotMap:
        """Return a mapping of the first bytes of a slot."""
        start = number * self.slot_bytes
        return SlotMap(self.fd, size, prot=mmap.PROT_READ, offset=start)

    def free(self, number: int, size: int) -> None:
        """Free a slot without readers; in a thread if that is slow."""
        if size > SLOW_TO_FREE_BYTES:
            in_background(self._take_back, number)
        else:
            self._take_back(number)

    def _take_back(self, number: int) -> None:
        if self.slot_bytes > MOST_COPIED_BYTES:
            _make_hole(self.fd, number * self.slot_bytes, self.slot_bytes)
        with self.lock:
            self.leaving.discard(number)
            self._free.append(number)
            if len(self._free) == self._count:
                self._free.clear()
                self._count = 0
                self._files.close(self.fd)
                self.fd = -1

    # Hand-over

    def numbers(self) -> tuple[int, list[int]]:
        """Return the number of slots, and those that are free once this program ends."""
        with self.lock:
            return self._count, [*self._free, *self.leaving]

    def take_over(self, fd: int, count: int, free: list[int]) -> None:
        """Take over a file and its slots."""
        self.fd, self._count, self._free = fd, count, free
        self._files.take_over(fd)


def _make_hole(fd: int, offset: int, size: int) -> None:
    # Without a hole the bytes are overwritten later (rule 1).
    _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size)


def release_pages(mapping: mmap.mmap) -> None:
    """Give the pages of a mapping back in steps, so that unmapping is quick.

    Other threads get the interpreter in between.
    """
    with contextlib.suppress(ValueError):  # closed, or never mapped
        size = len(mapping)
        if size > UNMAP_BYTES:
            for start in range(0, size, UNMAP_BYTES):
                part = min(UNMAP_BYTES, size - start)
                mapping.madvise(mmap.MADV_DONTNEED, start, part)


def make_disk_error(why: OSError, verb: str = "store") -> FdError:
    """Return the error for a disk that refused."""
    reason = os.strerror(why.errno or errno.EIO)
    return FdError(FILE_OPERATION, f"Cannot {verb} content: {reason}")


def _make_gone_error() -> FdError:
    return FdError(FILE_OPERATION, "Cannot read content: it is gone")
