"""Files without a name for contents that do not fit into memory.

1. A file here has no name: a killed host leaves nothing behind.
2. A content lies in a slot of a shared file (``supervisor.llmfd.slots``): a host has
   fewer descriptors than its children may have contents.
3. A long content has its own file, which stays mapped: reading it is like reading
   memory. That takes two descriptors, so their number is bounded; further long contents
   lie in slots, too, and are mapped for each search. So no child's contents exclude
   another's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from typing import TYPE_CHECKING

from hostlib.threads import in_background
from hostlib.unnamed_files import UnnamedFiles, identity_of
from supervisor.llmfd.errors import FILE_OPERATION, FdError
from supervisor.llmfd.slots import (
    SLOT_SIZES,
    SLOW_TO_FREE_BYTES,
    WRITE_BYTES,
    KeptMaps,
    Slot,
    SlotFile,
    make_disk_error,
    release_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.index import Buffer

LONG_BYTES = 16 * 1024 * 1024
"""A longer content gets its own file, if one is left."""

LIMIT_PER_FILE = 32
"""One such file for so many descriptors of the process: contents take a sixteenth of
them at most."""


LIMIT_PER_MAP = 32
MOST_KEPT_MAPS = 256
"""The same for kept mappings of slots: mapping takes 20 us."""

MOST_DESCRIPTORS = 1_048_576
"""Descriptors that Linux gives a process where no limit is set."""


class FileMap(mmap.mmap):
    """A long content on the disk.

    Attributes:
        fd: its file, if open: close(2) then frees the pages and releases the
            interpreter; -1 if not.
        identity: identifies the file.
    """

    fd: int = -1
    identity: tuple[int, int]
    files: UnnamedFiles

    def free(self) -> None:
        """Free the file, now or in a thread; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            self._unmap()
        else:
            in_background(self._free_slowly, fd)

    def _free_slowly(self, fd: int) -> None:
        release_pages(self)
        self._unmap()
        self.files.close(fd)

    def _unmap(self) -> None:
        # A search of a client that is gone may still read: it unmaps at its end.
        with contextlib.suppress(BufferError):
            self.close()


class Incoming:
    """A content on its way to the disk, written in pieces.

    It moves to a larger slot, or to its own file, when it outgrows its place: that
    copies a third of it at most.

    Args:
        spool: has the places.
        at_least: bytes that will come; more may.
        fd: a file of its own with the bytes so far; -1 for none.
        slot: a slot with them.

    Attributes:
        fd: its own file; -1 for none.
        slot: its slot otherwise; None before the first byte.
        size: bytes so far.
    """

    def __init__(
        self,
        spool: Spool,
        at_least: int = 0,
        *,
        fd: int = -1,
        slot: Slot | None = None,
    ) -> None:
        self.fd = fd
        self.slot = slot
        self.size = os.fstat(fd).st_size if slot is None and fd >= 0 else 0
        if slot is not None:
            self.size = slot.size
        self._spool = spool
        self._at_least = at_least

    def add(self, piece: bytes | memoryview) -> None:
        """Write a piece.

        Raises:
            FdError: ``file_operation``: the disk refused; it takes no more pieces.
        """
        try:
            if self.fd < 0:
                self._find_room(max(self.size + len(piece), self._at_least))
            if self.slot is None:
                write_all(self.fd, piece)
            else:
                self.slot.append(piece)
        except OSError as why:
            raise make_disk_error(why) from None
        self.size += len(piece)

    def pieces(self, step: int) -> Iterator[bytes]:
        """Yield the bytes so far, at most ``step`` at once.

        Raises:
            FdError: ``file_operation``: the disk refused.
        """
        slot = self.slot
        try:
            for at in range(0, self.size, step):
                size = min(step, self.size - at)
                if slot is None:
                    yield os.pread(self.fd, size, at)
                else:
                    yield slot.piece(at, size)
        except OSError as why:
            raise make_disk_error(why, "read") from None

    def _find_room(self, size: int) -> None:
        before = self.slot
        if before is not None and size <= before.room:
            return
        if size > LONG_BYTES and self._spool.has_files:
            self.fd = self._spool.files.open()
            if before is not None:
                write_all(self.fd, before.read())
            self.slot = None
        else:
            larger = self._spool.slot_for(size)
            try:
                if before is not None:
                    larger.append(before.read())
            except BaseException:
                larger.free()
                raise
            self.slot = larger
        if before is not None:
            before.free()

    def finish(self) -> FileMap | Slot:
        """Return the file or slot of the content; the caller owns it.

        Raises:
            FdError: ``file_operation``: it cannot be mapped; it is lost.
        """
        if self.fd < 0:
            if self.slot is None:
                raise RuntimeError("nothing has come in")
            slot, self.slot = self.slot, None
            return slot
        fd, self.fd = self.fd, -1
        try:
            return self._spool.map(fd, self.size)
        except OSError as why:
            raise make_disk_error(why) from None

    def close(self) -> None:
        """Free an unfinished content; safe to call twice."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.free()
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if self.size > SLOW_TO_FREE_BYTES:
            in_background(self._spool.files.close, fd)
        else:
            self._spool.files.close(fd)


class Spool:
    """The files without a name of one store.

    Args:
        directory: has them; None for the system's temporary directory.
        most_files: contents with their own file; None for as many as the present limit
            of descriptors allows.

    Attributes:
        files: the open ones.
        slots: the file of slots of each size.
    """

    def __init__(
        self, directory: str | None = None, most_files: int | None = None
    ) -> None:
        self.files = UnnamedFiles(directory)
        limit = descriptor_limit()
        self._most_files = limit // LIMIT_PER_FILE if most_files is None else most_files
        self._most_maps = min(MOST_KEPT_MAPS, limit // LIMIT_PER_MAP)
        kept = KeptMaps(self._most_maps)
        self.slots = {size: SlotFile(self.files, size, kept) for size in SLOT_SIZES}

    @property
    def most_descriptors(self) -> int:
        """The most descriptors that it takes."""
        return 2 * self._most_files + self._most_maps + len(self.slots)

    @property
    def has_files(self) -> bool:
        """Whether one more content may have its own file."""
        shared = sum(file.fd >= 0 for file in self.slots.values())
        return len(self.files) - shared < self._most_files

    def slot_for(self, size: int) -> Slot:
        """Return an empty slot for a content.

        Raises:
            FdError: ``file_operation``: there is none for one that long.
            OSError: the directory cannot have a file.
        """
        for slot_bytes, file in self.slots.items():
            if size <= slot_bytes:
                return file.take()
        raise FdError(
            FILE_OPERATION,
            f"Cannot store content: longer than {SLOT_SIZES[-1]} bytes, which needs a"
            " file of its own",
            f"Limit: {self._most_files} such files in this host; store less at once, or"
            " start the host with a higher limit of open files (ulimit -n)",
        )

    def keep(self, data: bytes) -> FileMap | Slot:
        """Put a content on the disk; return its file or slot.

        Raises:
            FdError: ``file_operation``: the disk refused.
        """
        incoming = Incoming(self, len(data))
        try:
            incoming.add(data)
            return incoming.finish()
        finally:
            incoming.close()

    def map(self, fd: int, size: int) -> FileMap:
        """Return a mapped file from ``files``, which it owns now.

        Raises:
            OSError: it cannot be mapped; the file is closed.
        """
        try:
            made = FileMap(fd, size, prot=mmap.PROT_READ)
            made.identity = identity_of(fd)
        except BaseException:
            self.files.close(fd)
            raise
        made.files = self.files
        if size > SLOW_TO_FREE_BYTES:
            made.fd = fd
        else:
            self.files.close(fd)
        return made

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host, except those of mappings."""
        return self.files.descriptors()


def descriptor_limit() -> int:
    """Return the number of descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def write_all(fd: int, data: Buffer | memoryview) -> None:
    """Write all of it behind the bytes so far."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:WRITE_BYTES]) :]
