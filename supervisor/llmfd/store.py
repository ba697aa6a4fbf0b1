"""The store: each content once, by its hash, in memory or on the disk.

1. Content never changes. Its key is the BLAKE3 of its bytes: equal contents, of any
   clients, are one blob with two references.
2. A blob is freed with its last reference; a table gives its references back when its
   process ends.
3. All blobs have ``max_memory`` together. When it is full, the oldest unused blobs move
   to the disk (``supervisor.llmfd.spool``). A content longer than ``max_memory``, or
   one in pieces longer than ``MOST_IN_MEMORY_BYTES``, goes there at once.
4. Any thread may call; the lock covers counts and dictionaries, never bytes. Slow work
   (a scan, a copy, a move to the disk) is for ``threads.in_thread``.
"""

from __future__ import annotations

import binascii
from collections import OrderedDict
from typing import TYPE_CHECKING

from blake3 import blake3

from hostlib.threads import ThreadLock, in_background, run_beside
from hostlib.unnamed_files import descriptors_of
from supervisor.llmfd.blob import Blob, Content
from supervisor.llmfd.errors import FdError
from supervisor.llmfd.index import Reader, TextIndex
from supervisor.llmfd.slots import SLOW_TO_FREE_BYTES
from supervisor.llmfd.spool import Incoming, Spool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from supervisor.llmfd.index import Buffer
    from supervisor.llmfd.slots import Slot

DEFAULT_MAX_MEMORY = 256 * 1024 * 1024
"""Memory for the contents of a host."""

BESIDE_BYTES = 1024 * 1024
"""Size from which hashing and writing run beside the scan."""

BASE64_PIECE_BYTES = 3 * 1024 * 1024
"""Bytes of one encoding step; a multiple of 3, so that pieces join without padding."""

MOST_IN_MEMORY_BYTES = 16 * 1024 * 1024
"""Longest content in pieces that stays in memory: a mapped file is read as quickly, and
the kernel may drop its pages."""

STEP_BYTES = 128 * 1024
"""Bytes that are read, written, hashed and scanned at once: they fit into the second
cache. One thread then takes about as long as two with longer pieces, and less processor
time."""

JOINED_BYTES = 16 * 1024
"""Shorter pieces are joined: single bytes would take forty times their memory."""


class Store:
    """The contents of one host.

    Args:
        max_memory: bytes of content in memory.
        directory: has unnamed files; None for the system's temporary directory.

    Attributes:
        blobs: all blobs by key.
        memory_bytes: content in memory now.
        spool: has the contents on the disk.
    """

    def __init__(
        self, max_memory: int = DEFAULT_MAX_MEMORY, directory: str | None = None
    ) -> None:
        self.blobs: dict[bytes, Blob] = {}
        self.memory_bytes = 0
        self.spool = Spool(directory)
        self._max_memory = max_memory
        self._lock = ThreadLock()
        self._moving = ThreadLock()
        # The movable blobs in memory, oldest first.
        self._movable: OrderedDict[bytes, Blob] = OrderedDict()

    # Putting in

    def put(self, data: bytes) -> Content:
        """Keep bytes: a text as it is, other bytes as base64 too.

        Raises:
            FdError: ``file_operation``: it needs the disk, and the disk refused.
        """
        reader = Reader()
        in_memory = self.reserve(len(data))
        store = self._hash if in_memory else self._hash_and_spool
        try:
            if len(data) < BESIDE_BYTES:
                key, kept = store(data)
                reader.feed(data)
            else:
                wait = run_beside(store, data)
                reader.feed(data)
                key, kept = wait()
        except BaseException:
            self.give_back(len(data) if in_memory else 0)
            raise
        return self.make_content(self.enter(key, kept), reader.finish())

    def put_text(self, text: str) -> Content:
        """Keep a text.

        Raises:
            UnicodeEncodeError: it has a lone surrogate.
            FdError: as for ``put``.
        """
        return self.put(text.encode())

    def writer(self) -> Writer:
        """Return a writer for content that comes in pieces."""
        return Writer(self)

    def make_content(self, blob: Blob, index: TextIndex | None) -> Content:
        """Return the content of a held blob; ``index`` is None if it is no text."""
        if index is not None:
            blob.give_index(index)
            return Content(blob)
        return Content(self._encode(blob), blob)

    @staticmethod
    def _hash(data: bytes) -> tuple[bytes, Buffer]:
        return blake3(data).digest(), data

    def _hash_and_spool(self, data: bytes) -> tuple[bytes, Buffer | Slot]:
        return blake3(data).digest(), self.spool.keep(data)

    def _encode(self, raw: Blob) -> Blob:
        pieces = (
            binascii.b2a_base64(piece, newline=False)
            for piece in raw.pieces(step=BASE64_PIECE_BYTES)
        )
        writer = self.writer()
        try:
            for piece in pieces:
                writer.add(piece)
            return writer.finish().text
        except BaseException:
            self.release(raw)
            raise
        finally:
            writer.close()

    def enter(self, key: bytes, place: Buffer | Slot) -> Blob:
        """Add bytes whose memory is reserved, or return the blob with them."""
        blob = Blob(key, place)
        with self._lock:
            twin = self.blobs.get(key)
            if twin is None:
                self.blobs[key] = blob
                if blob.in_memory is not None:
                    self._movable[key] = blob
                return blob
            twin.refs += 1
            twin.was_used = True
        self._forget(blob)  # another thread was quicker
        return twin

    # Memory

    def reserve(self, size: int) -> bool:
        """Take room in memory by moving others to the disk; return whether there is any.

        It waits for the disk if memory is tight: see ``is_tight``.
        """
        if self._reserve(size):
            return True
        if size > self._max_memory:
            return False
        self._make_room(size)
        return self._reserve(size)

    def is_tight(self, size: int) -> bool:
        """Return whether a content of that size has to wait for others to move."""
        return self.memory_bytes + size > self._max_memory

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self.memory_bytes + size > self._max_memory:
                return False
            self.memory_bytes += size
            return True

    def give_back(self, size: int) -> None:
        """Give room back."""
        with self._lock:
            self.memory_bytes -= size

    def _make_room(self, size: int) -> None:
        """Move blobs to the disk until there is room, or none can move."""
        with self._moving:
            while (blob := self._next_to_move(size)) is not None:
                try:
                    self._move(blob)
                except FdError:
                    return  # the disk is full: the new content gets the error
                finally:
                    self.release(blob)

    def _next_to_move(self, size: int) -> Blob | None:
        """Return the next blob to move, held; None if there is room or none is left.

        A content that was used since it came, or since it was last considered, goes to
        the end of the queue instead (the "clock" of operating systems).
        """
        with self._lock:
            while self._movable and self.memory_bytes + size > self._max_memory:
                key, blob = self._movable.popitem(last=False)
                if blob.was_used:
                    blob.was_used = False
                    self._movable[key] = blob
                    continue
                blob.refs += 1
                return blob
            return None

    def _move(self, blob: Blob) -> None:
        data = blob.in_memory
        if data is None:
            return
        try:
            place = self.spool.keep(data)
        except FdError:
            with self._lock:
                self._movable[blob.key] = blob
            raise
        with self._lock:
            blob.move(place)
            self.memory_bytes -= blob.size

    # Holding and giving back

    def hold(self, content: Content) -> Content:
        """Count one more holder of a content; return it."""
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

    def drop_all(self, contents: Sequence[Content]) -> None:
        """Count one holder less of each; many are freed in a thread."""
        with self._lock:
            blobs = [blob for content in contents for blob in content.blobs]
            freed = [blob for blob in blobs if self._is_last(blob)]
        if sum(blob.size for blob in freed) > SLOW_TO_FREE_BYTES:
            in_background(self._forget_all, freed)
        else:
            self._forget_all(freed)

    def release(self, blob: Blob) -> None:
        """Count one holder of a blob less; the last one frees it."""
        with self._lock:
            if not self._is_last(blob):
                return
        self._forget(blob)

    def _is_last(self, blob: Blob) -> bool:
        """Remove a holder; return whether it was the last (the lock is held)."""
        blob.refs -= 1
        if blob.refs:
            return False
        if self.blobs.get(blob.key) is blob:
            del self.blobs[blob.key]
            self._movable.pop(blob.key, None)
        return True

    def _forget_all(self, blobs: list[Blob]) -> None:
        while blobs:
            self._forget(blobs.pop())  # frees its memory now, not with the last one

    def _forget(self, blob: Blob) -> None:
        if blob.in_memory is not None:
            self.give_back(blob.size)
        blob.close()

    # Views

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of content on the disk."""
        with self._lock:
            blobs = tuple(self.blobs.values())
        return sum(blob.size for blob in blobs if blob.in_memory is None)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host, with a word for each."""
        found = dict(self.spool.descriptors())
        found.update((fd, "content") for _, fd in self.files())
        yield from found.items()

    def files(self) -> list[tuple[tuple[int, int], int]]:
        """Return (identity of the file, descriptor) of each content with a file.

        Python hides those of mappings (mmap has its own duplicate); /proc shows them.
        """
        with self._lock:
            blobs = tuple(self.blobs.values())
        found = (blob.mapping for blob in blobs)
        mapped = {one.identity for one in found if one is not None}
        return descriptors_of(mapped | self.spool.files.identities())


class Writer:
    """Content that comes in pieces: in memory while short, then on the disk.

    Args:
        store: keeps the result.

    Attributes:
        size: bytes so far.
        incoming: the part on the disk; None while it is in memory.
    """

    def __init__(self, store: Store) -> None:
        self.size = 0
        self._store = store
        self._pieces: list[bytes] = []
        self.incoming: Incoming | None = None
        self._hash = blake3()
        self._reader = Reader()
        self._reserved = 0

    def add(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            FdError: ``file_operation``: the disk refused; it takes no more pieces.
        """
        if self.incoming is None:
            self._keep(piece)
        view = memoryview(piece)
        for start in range(0, len(piece), STEP_BYTES):
            part = view[start : start + STEP_BYTES]
            if self.incoming is not None:
                self.incoming.add(part)
            self._hash.update(part)
            self._reader.feed(piece, start, start + len(part))
        self.size += len(piece)

    def _keep(self, piece: bytes) -> None:
        """Keep a piece in memory, or move to the disk."""
        if not self._has_room(len(piece)):
            self._spill(self.size + len(piece))
        elif self._pieces and len(self._pieces[-1]) < JOINED_BYTES:
            self._pieces[-1] += piece
        else:
            self._pieces.append(piece)

    def _has_room(self, size: int) -> bool:
        too_long = self.size + size > MOST_IN_MEMORY_BYTES
        if too_long or not self._store.reserve(size):
            return False
        self._reserved += size
        return True

    def _spill(self, size: int) -> None:
        self.incoming = Incoming(self._store.spool, size)
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self.incoming.add(piece)
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)

    def continue_from(self, incoming: Incoming) -> None:
        """Continue a content that another program of this host has put on the disk.

        Raises:
            FdError: ``file_operation``: it cannot be read; the caller closes this.
        """
        self.incoming = incoming
        for piece in incoming.pieces(STEP_BYTES):
            self._hash.update(piece)
            self._reader.feed(piece)
        self.size = incoming.size

    def digest(self) -> bytes:
        """Return the BLAKE3 of the bytes so far."""
        return self._hash.digest()

    def finish(self) -> Content:
        """Return the content, held once; the writer is done.

        Raises:
            FdError: ``file_operation``: the disk refused.
        """
        store = self._store
        data: Buffer | Slot
        if self.incoming is None:
            pieces, self._pieces, self._reserved = self._pieces, [], 0
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        else:
            data = self.incoming.finish()
        return store.make_content(
            store.enter(self.digest(), data), self._reader.finish()
        )

    def close(self) -> None:
        """Free an unfinished content; safe to call twice."""
        self._pieces = []
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)
        if self.incoming is not None:
            self.incoming.close()
