"""Files without a name for what memory does not hold.

Which place on the disk a content gets, and how it comes there.

Rules of this file.

1. A file here never has a name: a host that is killed leaves nothing behind.
2. A content lies in a slot of a file that others share (``supervisor.llmfd.slots``): a host has
   fewer descriptors than its children may have contents.
3. A long one has a file of its own, which stays mapped: it is read as memory is, and the
   kernel keeps of it what it has room for.  That takes two descriptors, so there are so
   many such files and no more; then long contents lie in slots too, and are mapped anew
   for each search.  So nobody's contents are refused for those of others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from typing import TYPE_CHECKING

from hostlib.threads import afterwards
from hostlib.unnamed_files import UnnamedFiles, identity_of
from supervisor.llmfd.errors import FILE_OPERATION, FdError
from supervisor.llmfd.slots import (
    SLOT_SIZES,
    SLOW_TO_FREE_BYTES,
    WRITE_BYTES,
    KeptMaps,
    Slot,
    SlotFile,
    no_room,
    release_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llmfd.index import Buffer

LONG_BYTES = 16 * 1024 * 1024
"""A longer content has a file of its own, if there is one to be had."""

LIMIT_PER_FILE = 32
"""One such file for so many descriptors that a process may have: contents take a sixteenth
of them at most, which nobody else may have then."""


LIMIT_PER_MAP = 32
MOST_KEPT_MAPS = 256
"""Likewise for mappings of slots that are kept: to map one anew takes 20 us."""

MOST_DESCRIPTORS = 1_048_576
"""What Linux gives a process at most, if nobody has said anything else."""


class FileMap(mmap.mmap):
    """A long content on the disk.

    Attributes:
        fd: its file, if that is still open: to give the pages back is then up to
            close(2), which lets go of the interpreter; -1 if it is not.
        identity: what tells the file from others.
    """

    fd: int = -1
    identity: tuple[int, int]
    files: UnnamedFiles

    def free(self) -> None:
        """Give the file back, now or in a thread; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            self._unmap()
        else:
            afterwards(self._free_slowly, fd)

    def _free_slowly(self, fd: int) -> None:
        release_pages(self)
        self._unmap()
        self.files.close(fd)

    def _unmap(self) -> None:
        # A search of a client that is gone may still read: then it ends with that.
        with contextlib.suppress(BufferError):
            self.close()


class Incoming:
    """A content on its way to the disk.

    It moves to a larger slot, or to a file of its own, when it has outgrown where it is:
    that copies a third of it at most.

    Args:
        spool: has the places.
        at_least: bytes that will come; more may.
        fd: a file of its own that is begun; -1 for none.
        slot: a slot as above.

    Attributes:
        fd: the file of its own; -1 for none.
        slot: where it lies otherwise; None before the first byte.
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
            FdError: ``file_operation``: the disk refused; nothing more can be added.
        """
        try:
            if self.fd < 0:
                self._find_room(max(self.size + len(piece), self._at_least))
            if self.slot is None:
                write_all(self.fd, piece)
            else:
                self.slot.append(piece)
        except OSError as why:
            raise no_room(why) from None
        self.size += len(piece)

    def pieces(self, step: int) -> Iterator[bytes]:
        """Yield what has come, at most ``step`` bytes at once.

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
            raise no_room(why, "read") from None

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
        """Return what stands for it; it is the caller's now.

        Raises:
            FdError: ``file_operation``: it cannot be mapped; it is gone.
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
            raise no_room(why) from None

    def close(self) -> None:
        """Give back what was not finished; safe to call twice."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.free()
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if self.size > SLOW_TO_FREE_BYTES:
            afterwards(self._spool.files.close, fd)
        else:
            self._spool.files.close(fd)


class Spool:
    """The files without a name of one store.

    Args:
        directory: where they are made; None: the system's temporary one.
        most_files: contents with a file of their own; None: as many as the descriptors
            that this process may have now allow.

    Attributes:
        files: those that are open.
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
        """How many descriptors it takes at most."""
        return 2 * self._most_files + self._most_maps + len(self.slots)

    @property
    def has_files(self) -> bool:
        """Whether one more content may have a file of its own."""
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
        """Put a content on the disk; return what stands for it there.

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
        """Return the content of a file from ``files``, which belongs to it now.

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
        """Yield what it holds of the host's descriptors, but those of mappings."""
        return self.files.descriptors()


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def write_all(fd: int, data: Buffer | memoryview) -> None:
    """Write all of it at the end of what was written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:WRITE_BYTES]) :]
