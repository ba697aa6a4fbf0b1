"""Contents on the disk: files of one directory, named by the hash of their bytes.

Contents that do not fit into memory are such files, and those of checkpoints.

1. A file gets its name when all of it is there; until then, and while it is removed, it
   has a random one (``PART``).
2. A file is open only while it is read or written: a host has fewer descriptors than its
   children may have contents.
3. The next host with that directory removes the files of a dead one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import tempfile
import weakref
from typing import TYPE_CHECKING

from hostlib.threads import MAX_THREADS, ThreadLock, in_background
from supervisor.llmfd.errors import FILE_OPERATION, FdError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from supervisor.llmfd.index import Buffer

PART = ".part"
"""The end of the name of a file that is not whole, or not needed any more."""

MOST_COPIED_BYTES = 256 * 1024
"""Longest content that is copied, which takes 20 us; longer ones are mapped."""

WRITE_BYTES = 1024 * 1024
"""Bytes of one write. A kernel with large folios takes memory in pieces as long as the
write; in a virtual machine the longest may be memory that its host has not backed yet
(1.3 instead of 0.3 s a GB)."""

UNMAP_BYTES = 16 * 1024 * 1024
"""Bytes that are unmapped at once, with the interpreter held: a millisecond."""

SLOW_TO_FREE_BYTES = 16 * 1024 * 1024
"""Longer contents are freed in a thread: the kernel needs 70 to 200 ms for a GiB."""

MOST_DESCRIPTORS = 1 + 2 * (MAX_THREADS + 1)
"""The directory, and a file and its mapping for each thread that reads."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class BlobFiles:
    """The files of one directory, which no other host uses.

    Args:
        directory: made if it is missing, closed to other users; None for a temporary
            one, which is made with the first file and removed with this object.

    Raises:
        OSError: the directory cannot be used.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._fd = -1
        self._is_closed = False
        self._lock = ThreadLock()
        if directory is not None:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._open(directory, None)

    def _open(self, directory: str, temporary: str | None) -> None:
        self._fd = os.open(directory, _DIRECTORY)
        self._end = weakref.finalize(self, _close, self._fd, temporary)

    @property
    def fd(self) -> int:
        """The directory; -1 once it is closed.

        Raises:
            OSError: no temporary one can be made.
        """
        with self._lock:
            if self._fd < 0 and not self._is_closed:
                directory = tempfile.mkdtemp(prefix="sandhost-fds-")
                self._open(directory, directory)
                fcntl.flock(self._fd, fcntl.LOCK_SH)  # no leftover of a dead host
            return self._fd

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptor of the host, if it has one, with a word for it."""
        if self._fd >= 0:
            yield self._fd, "directory of contents"

    def close(self) -> None:
        """Close the directory; safe to call twice."""
        with self._lock:
            self._is_closed = True
            if self._fd >= 0:
                self._fd = -1
                self._end()

    # Reading

    def read(self, name: str, size: int) -> Buffer:
        """Return a content, copied if it is short; the caller drops a mapping soon.

        Raises:
            FdError: ``file_operation``: the disk refused, or the file is not whole.
        """
        if size <= MOST_COPIED_BYTES:
            return self.read_part(name, 0, size)
        try:
            return ContentMap.of(self.open(name), size)
        except OSError as why:
            raise make_disk_error(why, "read") from None
        except ValueError:  # the file is shorter
            raise make_gone_error() from None

    def read_part(self, name: str, offset: int, size: int) -> bytes:
        """Return a part of a content.

        Raises:
            FdError: as for ``read``.
        """
        try:
            fd = self.open(name)
            try:
                data = os.pread(fd, size, offset)
            finally:
                os.close(fd)
        except OSError as why:
            raise make_disk_error(why, "read") from None
        if len(data) != size:
            raise make_gone_error()
        return data

    def pieces(self, name: str, step: int) -> Iterator[bytes]:
        """Yield all bytes of a file, at most ``step`` at once.

        Raises:
            OSError: the disk refused; FileNotFoundError: there is no such file.
        """
        fd = self.open(name)
        try:
            while piece := os.read(fd, step):
                yield piece
        finally:
            os.close(fd)

    def open(self, name: str) -> int:
        """Return a descriptor of a file; the caller closes it.

        Raises:
            OSError: the disk refused; FileNotFoundError: there is none.
        """
        return os.open(name, _READ, dir_fd=self.fd)

    # Writing

    def append(self, name: str, data: Buffer | memoryview) -> None:
        """Write behind the bytes so far of a file, which is made if it is missing.

        Raises:
            OSError: the disk refused.
        """
        fd = os.open(name, _WRITE, 0o600, dir_fd=self.fd)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view[:WRITE_BYTES]) :]
        finally:
            os.close(fd)

    def flush(self, name: str) -> None:
        """Return once the bytes of a file are on the disk.

        Raises:
            OSError: the disk refused.
        """
        fd = self.open(name)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, name: str, new: str) -> None:
        """Change the name of a file, in place of one that has the new name.

        Raises:
            OSError: the disk refused.
        """
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    # Removing

    def unname(self, name: str, size: int) -> str | None:
        """Remove a short file; give a long one a random name, and return that."""
        if size <= SLOW_TO_FREE_BYTES:
            self.remove([name])
            return None
        part = make_part_name()
        with contextlib.suppress(OSError):  # it is gone, or the directory is closed
            self.rename(name, part)
        return part

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that the disk refuses to remove stays for the next host."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.fd)

    def remove_all_but(self, held: Collection[str]) -> int:
        """Remove files that a dead host left, and return how many.

        Other things there were made by a user.

        Raises:
            OSError: the directory cannot be listed.
        """
        with os.scandir(self.fd) as entries:
            strays = [
                entry.name
                for entry in entries
                if entry.name not in held and entry.is_file(follow_symlinks=False)
            ]
        self.remove(strays)
        return len(strays)


def _close(fd: int, temporary: str | None) -> None:
    os.close(fd)
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def make_part_name() -> str:
    """Return a new name for a file that is not whole."""
    return secrets.token_hex(16) + PART


class ContentMap(mmap.mmap):
    """A longer content, while it is read.

    Its file stays open: close(2) frees the pages of a removed one and releases the
    interpreter meanwhile, munmap(2) in ``mmap`` does not.
    """

    _fd = -1

    @classmethod
    def of(cls, fd: int, size: int) -> ContentMap:
        """Return the mapping of an open file, which it owns.

        Raises:
            OSError: it cannot be mapped; the file is closed.
            ValueError: the file is shorter; it is closed, too.
        """
        try:
            found = cls(fd, size, prot=mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        found._fd = fd
        return found

    def __del__(self) -> None:
        """Unmap it in steps: other threads get the interpreter in between."""
        if self._fd < 0:  # never mapped
            return
        for start in range(0, len(self), UNMAP_BYTES):
            part = min(UNMAP_BYTES, len(self) - start)
            self.madvise(mmap.MADV_DONTNEED, start, part)
        self.close()
        os.close(self._fd)


class PartialFile:
    """A content that comes in, as a file without its last name.

    Args:
        files: its directory.
        name: of a file that the program before has begun; None for a new one.
        size: bytes of that.

    Attributes:
        name: the file's; None once it has its last one, or is removed.
        size: bytes so far.
    """

    def __init__(
        self, files: BlobFiles, name: str | None = None, size: int = 0
    ) -> None:
        self.name: str | None = name or make_part_name()
        self.size = size
        self._files = files

    def add(self, piece: Buffer | memoryview) -> None:
        """Write a piece.

        Raises:
            FdError: ``file_operation``: the disk refused; it takes no more pieces.
        """
        try:
            self._files.append(self._own_name(), piece)
        except OSError as why:
            raise make_disk_error(why) from None
        self.size += len(piece)

    def finish(self, name: str) -> None:
        """Give the file its last name.

        Raises:
            FdError: ``file_operation``: the disk refused.
        """
        try:
            self._files.rename(self._own_name(), name)
        except OSError as why:
            raise make_disk_error(why) from None
        self.name = None

    def close(self) -> None:
        """Remove a file that has not got its last name; safe to call twice."""
        name, self.name = self.name, None
        if name is None:
            return
        if self.size > SLOW_TO_FREE_BYTES:
            in_background(self._files.remove, [name])
        else:
            self._files.remove([name])

    def _own_name(self) -> str:
        if self.name is None:
            raise RuntimeError("a partial file is used after its end")
        return self.name


def make_disk_error(why: OSError, verb: str = "store") -> FdError:
    """Return the error for a disk that refused."""
    if isinstance(why, FileNotFoundError) and verb == "read":
        return make_gone_error()
    reason = os.strerror(why.errno or errno.EIO)
    return FdError(FILE_OPERATION, f"Cannot {verb} content: {reason}")


def make_gone_error() -> FdError:
    """Return the error for a file that is gone, or shorter than its content."""
    return FdError(FILE_OPERATION, "Cannot read content: it is gone")
