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

from vfs.content.errors import FILE_OPERATION, FdError, NotTextError
from vfs.content.index import TextIndex, scan
from vfs.content.pages import PageTable, paginate

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

BASE64_PIECE_BYTES = 3 * 1024 * 1024
"""One step of an encoding; a multiple of 3, so that pieces join without padding."""


class Blob:
    """Bytes that are kept once.

    Attributes:
        key: their BLAKE3.
        size: bytes.
        data: the bytes, or a mapping of the file that has them.
        refs: who holds it.
    """

    __slots__ = ("_index", "_tables", "data", "is_mapped", "key", "refs", "size")

    def __init__(self, key: bytes, data: Buffer, index: TextIndex | None) -> None:
        self.key = key
        self.size = len(data)
        self.data = data
        self.is_mapped = isinstance(data, mmap.mmap)
        self.refs = 1
        self._index = index
        self._tables: dict[int, PageTable] = {}

    @property
    def index(self) -> TextIndex:
        """Return the counts of a text.

        Precondition: it is a text; the raw bytes of binary content have no lines.
        """
        if self._index is None:
            raise RuntimeError("the raw bytes of binary content have no lines")
        return self._index

    @property
    def is_text(self) -> bool:
        """Whether it has lines."""
        return self._index is not None

    def give_index(self, index: TextIndex) -> None:
        """Take the counts that a scan has found."""
        self._index = index

    def pages(self, page_size: int) -> PageTable:
        """Return its pages of at most ``page_size`` characters, made once for all."""
        table = self._tables.get(page_size)
        if table is None:
            table = paginate(self.data, self.index, page_size)
            self._tables[page_size] = table
        return table

    def close(self) -> None:
        """Unmap it; nobody holds it any more."""
        if isinstance(self.data, mmap.mmap):
            # A search of a client that is gone may still read: then it ends with that.
            with contextlib.suppress(BufferError):
                self.data.close()


class Content:
    """What a descriptor stands for.

    Attributes:
        text: what is paged.
        raw: the original bytes where these are no text; ``text`` is then base64.
    """

    __slots__ = ("raw", "text")

    def __init__(self, text: Blob, raw: Blob | None = None) -> None:
        self.text = text
        self.raw = raw

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Return what it holds."""
        return (self.text,) if self.raw is None else (self.text, self.raw)

    @property
    def original(self) -> Blob:
        """Return the bytes that were put in."""
        return self.text if self.raw is None else self.raw

    @property
    def stored_bytes(self) -> int:
        """Return what it takes, if nobody else holds the same."""
        return sum(blob.size for blob in self.blobs)


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
        blob = self._keep(data, in_memory=True)
        return self._as_content(blob)

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

    def _as_content(self, blob: Blob) -> Content:
        try:
            if not blob.is_text:
                blob.give_index(scan(blob.data))
            return Content(blob)
        except NotTextError:
            pass
        except BaseException:
            self.release(blob)
            raise
        try:
            return Content(self._encoded(blob), blob)
        except BaseException:
            self.release(blob)
            raise

    def _encoded(self, raw: Blob) -> Blob:
        writer = self.writer()
        try:
            for offset in range(0, raw.size, BASE64_PIECE_BYTES):
                piece = raw.data[offset : offset + BASE64_PIECE_BYTES]
                writer.add(binascii.b2a_base64(piece, newline=False))
            return writer.finish().text
        finally:
            writer.close()

    def _keep(self, data: bytes, *, in_memory: bool) -> Blob:
        key = blake3(data).digest()
        return self._known(key) or self._enter(
            key, data if in_memory and self._reserve(len(data)) else self._spool(data)
        )

    def _known(self, key: bytes) -> Blob | None:
        with self._lock:
            blob = self.blobs.get(key)
            if blob is not None:
                blob.refs += 1
            return blob

    def _enter(self, key: bytes, data: Buffer) -> Blob:
        """Enter bytes whose memory is reserved."""
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
            return _mapped(fd, len(data))
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
        """Yield what it holds of the host's descriptors while it writes.

        A mapping has a descriptor too, which Python keeps to itself.
        """
        for fd in tuple(self._writing):
            yield fd, "content"


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
        self._reserved = 0

    def add(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            FdError: ``file_operation``: the disk refused; nothing more can be added.
        """
        self._hash.update(piece)
        if self._fd < 0 and not self._fits(len(piece)):
            self._spill()
        if self._fd >= 0:
            self._write(piece)
        else:
            self._pieces.append(piece)
        self.size += len(piece)

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
        key = self._hash.digest()
        known = store._known(key)  # noqa: SLF001 - one file
        if known is not None:
            self.close()
            return store._as_content(known)  # noqa: SLF001 - one file
        data: Buffer
        if self._fd < 0:
            pieces, self._pieces, self._reserved = self._pieces, [], 0
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            try:
                data = _mapped(self._fd, self.size)
            except OSError as why:
                raise _no_room(why) from None
            finally:
                self.close()
        return store._as_content(store._enter(key, data))  # noqa: SLF001 - one file

    def close(self) -> None:
        """Give everything back that was not finished; safe to call twice."""
        self._pieces = []
        reserved, self._reserved = self._reserved, 0
        self._store._give_back(reserved)  # noqa: SLF001 - one file
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._store._close_file(fd)  # noqa: SLF001 - one file


def _mapped(fd: int, size: int) -> mmap.mmap:
    return mmap.mmap(fd, size, prot=mmap.PROT_READ)


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
