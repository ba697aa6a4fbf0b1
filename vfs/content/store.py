"""Where content is kept: each text once, by its hash, in memory or on the disk.

Rules of this file.

1. Content never changes.  Its key is the BLAKE3 of its bytes: the same content put in
   twice, by anybody, is one blob with two references.
2. A blob is freed with its last reference.  Nobody closes descriptors by hand; a table
   gives its references back when its process ends.
3. Memory up to ``max_memory`` over all blobs; what does not fit, and what is longer than
   ``MOST_IN_MEMORY_BYTES``, goes to an unnamed file and is mapped: the kernel keeps of it
   what it has room for, and a host that is killed leaves nothing behind.
4. Any thread may call; the lock covers counts and dictionaries only, never the bytes.
   What takes long (a scan, a copy) is for ``hostio.in_thread``: it works in pieces of
   at most a few MiB, between which others get the interpreter.
"""

from __future__ import annotations

import binascii
import contextlib
import mmap
import os
import tempfile
import threading
from typing import TYPE_CHECKING

from blake3 import blake3

from vfs.content.blob import Blob, Content
from vfs.content.errors import FILE_OPERATION, FdError
from vfs.content.index import Reader, TextIndex
from vfs.hostio import beside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfs.content.index import Buffer

DEFAULT_MAX_MEMORY = 256 * 1024 * 1024
"""Memory for contents over a whole host."""

MOST_IN_MEMORY_BYTES = 16 * 1024 * 1024
"""Longest content that comes in pieces and is kept in memory: what lies in a mapped file
is read as quickly, and the kernel may drop it when it needs the room."""

PIECE_BYTES = 4 * 1024 * 1024
"""One step of a copy, about a millisecond."""

BESIDE_BYTES = 1024 * 1024
"""From here on a piece is hashed, and written, beside the look at what is in it."""

BASE64_PIECE_BYTES = 3 * 1024 * 1024
"""One step of an encoding; a multiple of 3, so that pieces join without padding."""


class Store:
    """The contents of one host.

    Args:
        max_memory: bytes of content in memory.
        directory: where unnamed files are made; None: the system's temporary one.

    Attributes:
        blobs: what is kept, by key.
        memory_bytes: content in memory now.
    """

    def __init__(
        self, max_memory: int = DEFAULT_MAX_MEMORY, directory: str | None = None
    ) -> None:
        self.blobs: dict[bytes, Blob] = {}
        self.memory_bytes = 0
        self._max_memory = max_memory
        self._directory = directory
        self._lock = threading.Lock()
        self._writing: set[int] = set()

    # Putting in

    def put(self, data: bytes) -> Content:
        """Keep bytes; text as it is, anything else as base64 too.

        Raises:
            FdError: ``file_operation``: it had to go to the disk, and the disk refused.
        """
        reader = Reader()
        in_memory = self._reserve(len(data))
        store = self._hashed if in_memory else self._hashed_and_spooled
        try:
            if len(data) < BESIDE_BYTES:
                key, kept = store(data)
                reader.feed(data)
            else:
                wait = beside(store, data)
                reader.feed(data)
                key, kept = wait()
        except BaseException:
            self._give_back(len(data) if in_memory else 0)
            raise
        return self._as_content(self._enter(key, kept), reader.finish())

    def put_text(self, text: str) -> Content:
        """Keep a text.

        Raises:
            UnicodeEncodeError: it holds a lone surrogate.
            FdError: as for ``put``.
        """
        return self.put(text.encode())

    def writer(self) -> Writer:
        """Return a place for content that comes in pieces."""
        return Writer(self)

    def _as_content(self, blob: Blob, index: TextIndex | None) -> Content:
        """Return the content of a blob that is held; ``index`` is None if it is no text."""
        if index is not None:
            blob.give_index(index)
            return Content(blob)
        try:
            return Content(self._encoded(blob), blob)
        except BaseException:
            self.release(blob)
            raise

    @staticmethod
    def _hashed(data: bytes) -> tuple[bytes, Buffer]:
        return blake3(data).digest(), data

    def _hashed_and_spooled(self, data: bytes) -> tuple[bytes, Buffer]:
        return blake3(data).digest(), self._spool(data)

    def _encoded(self, raw: Blob) -> Blob:
        writer = self.writer()
        try:
            for offset in range(0, raw.size, BASE64_PIECE_BYTES):
                piece = raw.data[offset : offset + BASE64_PIECE_BYTES]
                writer.add(binascii.b2a_base64(piece, newline=False))
            return writer.finish().text
        finally:
            writer.close()

    def _enter(self, key: bytes, data: Buffer) -> Blob:
        """Enter bytes whose memory is reserved, or return those that are there."""
        blob = Blob(key, data, None)
        with self._lock:
            twin = self.blobs.get(key)
            if twin is None:
                self.blobs[key] = blob
                return blob
            twin.refs += 1
        self._forget(blob)  # somebody was quicker
        return twin

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self.memory_bytes + size > self._max_memory:
                return False
            self.memory_bytes += size
            return True

    def _give_back(self, size: int) -> None:
        with self._lock:
            self.memory_bytes -= size

    def _spool(self, data: bytes) -> mmap.mmap:
        fd = self._open_file()
        try:
            _write_all(fd, memoryview(data))
            return mapped(fd, len(data))
        except OSError as why:
            raise _no_room(why) from None
        finally:
            self._close_file(fd)

    def _open_file(self) -> int:
        directory = self._directory or tempfile.gettempdir()
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
        try:
            try:
                fd = os.open(directory, flags, 0o600)
            except (IsADirectoryError, NotImplementedError):
                fd = _open_unlinked(directory)
            except OSError as why:
                if why.errno != 95:  # EOPNOTSUPP: a file system without O_TMPFILE
                    raise
                fd = _open_unlinked(directory)
        except OSError as why:
            raise _no_room(why) from None
        self._writing.add(fd)
        return fd

    def _close_file(self, fd: int) -> None:
        self._writing.discard(fd)
        os.close(fd)

    # Holding and giving back

    def hold(self, content: Content) -> Content:
        """Count one more holder of a content, and return it."""
        with self._lock:
            for blob in content.blobs:
                blob.refs += 1
        return content

    def hold_all(self, contents: list[Content]) -> None:
        """Count one more holder of each."""
        with self._lock:
            for content in contents:
                content.text.refs += 1
                if content.raw is not None:
                    content.raw.refs += 1

    def drop(self, content: Content) -> None:
        """Count one holder less."""
        for blob in content.blobs:
            self.release(blob)

    def release(self, blob: Blob) -> None:
        """Count one holder of a blob less; the last one frees it."""
        with self._lock:
            blob.refs -= 1
            if blob.refs:
                return
            if self.blobs.get(blob.key) is blob:
                del self.blobs[blob.key]
        self._forget(blob)

    def _forget(self, blob: Blob) -> None:
        if not blob.is_mapped:
            self._give_back(blob.size)
        blob.close()

    # Looking at it

    @property
    def disk_bytes(self) -> int:
        """Return what lies in files."""
        with self._lock:
            return sum(b.size for b in self.blobs.values() if b.is_mapped)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors."""
        for fd in (*self._writing, *self.files().values()):
            yield fd, "content"

    def files(self) -> dict[tuple[int, int], int]:
        """Return the descriptors of mapped files, by what tells these from others.

        Python keeps them to itself (mmap has a copy of its own); /proc has them.
        """
        with self._lock:
            blobs = tuple(self.blobs.values())
        return descriptors_of(
            {b.data.identity for b in blobs if isinstance(b.data, Mapped)}
        )


class Writer:
    """Content that comes in pieces: in memory while it is short, then in a file.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, store: Store) -> None:
        self.size = 0
        self._store = store
        self._pieces: list[bytes] = []
        self._fd = -1
        self._hash = blake3()
        self._reader = Reader()
        self._reserved = 0

    def add(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            FdError: ``file_operation``: the disk refused; nothing more can be added.
        """
        if self._fd < 0 and not self._fits(len(piece)):
            self._spill()
        if len(piece) < BESIDE_BYTES:
            self._keep(piece)
            self._reader.feed(piece)
        else:
            wait = beside(self._keep, piece)
            self._reader.feed(piece)
            wait()
        self.size += len(piece)

    def _keep(self, piece: bytes) -> None:
        self._hash.update(piece)
        if self._fd >= 0:
            self._write(piece)
        else:
            self._pieces.append(piece)

    def _fits(self, size: int) -> bool:
        if self.size + size > MOST_IN_MEMORY_BYTES or not self._store._reserve(size):  # noqa: SLF001 - one file
            return False
        self._reserved += size
        return True

    def _spill(self) -> None:
        self._fd = self._store._open_file()  # noqa: SLF001 - one file
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self._write(piece)
        reserved, self._reserved = self._reserved, 0
        self._store._give_back(reserved)  # noqa: SLF001 - one file

    def _write(self, piece: bytes) -> None:
        try:
            _write_all(self._fd, memoryview(piece))
        except OSError as why:
            raise _no_room(why) from None

    def digest(self) -> bytes:
        """Return the BLAKE3 of what was added so far."""
        return self._hash.digest()

    def finish(self) -> Content:
        """Return what was added, held once; the writer is done."""
        store = self._store
        data: Buffer
        if self._fd < 0:
            pieces, self._pieces, self._reserved = self._pieces, [], 0
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            try:
                data = mapped(self._fd, self.size)
            except OSError as why:
                raise _no_room(why) from None
            finally:
                self.close()
        blob = store._enter(self.digest(), data)  # noqa: SLF001 - one file
        return store._as_content(blob, self._reader.finish())  # noqa: SLF001 - one file

    def close(self) -> None:
        """Give everything back that was not finished; safe to call twice."""
        self._pieces = []
        reserved, self._reserved = self._reserved, 0
        self._store._give_back(reserved)  # noqa: SLF001 - one file
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._store._close_file(fd)  # noqa: SLF001 - one file


class Mapped(mmap.mmap):
    """A mapped file.

    Attributes:
        identity: what tells the file from others.
    """

    identity: tuple[int, int]


def descriptors_of(files: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return which descriptor of this process each of some files has, if any."""
    found: dict[tuple[int, int], int] = {}
    for name in os.listdir("/proc/self/fd") if files else ():
        fd = int(name)
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) in files:
                found[status.st_dev, status.st_ino] = fd
    return found


def mapped(fd: int, size: int) -> Mapped:
    """Map a file; the descriptor is the caller's still.

    Raises:
        OSError: it cannot be.
    """
    made = Mapped(fd, size, prot=mmap.PROT_READ)
    status = os.fstat(fd)
    made.identity = status.st_dev, status.st_ino
    return made


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:PIECE_BYTES]) :]


def _open_unlinked(directory: str) -> int:
    fd, name = tempfile.mkstemp(dir=directory)
    os.unlink(name)
    return fd


def _no_room(why: OSError) -> FdError:
    reason = os.strerror(why.errno or 5)
    return FdError(FILE_OPERATION, f"Cannot store content: {reason}")
