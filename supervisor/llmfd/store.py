"""Where content is kept: each text once, by its hash, in memory or on the disk.

Rules of this file.

1. Content never changes.  Its key is the BLAKE3 of its bytes: the same content put in
   twice, by anybody, is one blob with two references.
2. A blob is freed with its last reference.  Nobody closes descriptors by hand; a table
   gives its references back when its process ends.
3. Memory up to ``max_memory`` over all blobs.  What comes in when it is full stays, and
   what came first and was not asked for since moves to the disk (``supervisor.llmfd.spool``).
   What alone is longer than ``max_memory`` goes there at once, and so does what comes in
   pieces and is longer than ``MOST_IN_MEMORY_BYTES``.
4. Any thread may call; the lock covers counts and dictionaries only, never the bytes.
   What takes long (a scan, a copy, a move to the disk) is for ``threads.in_thread``.
"""

from __future__ import annotations

import binascii
from collections import OrderedDict
from typing import TYPE_CHECKING

from blake3 import blake3

from hostlib.threads import ThreadLock, afterwards, beside
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
"""Memory for contents over a whole host."""

BESIDE_BYTES = 1024 * 1024
"""From here on bytes are hashed, and written, beside the look at what is in them."""

BASE64_PIECE_BYTES = 3 * 1024 * 1024
"""One step of an encoding; a multiple of 3, so that pieces join without padding."""

MOST_IN_MEMORY_BYTES = 16 * 1024 * 1024
"""Longest content that comes in pieces and is kept in memory: what lies in a mapped file
is read as quickly, and the kernel may drop it when it needs the room."""

STEP_BYTES = 128 * 1024
"""What is read, written, hashed and looked at in one go: it is in the second cache level
for each of them.  So one thread takes about as long as two that pass longer pieces on,
for less of the processor's time, and needs no second processor."""

JOINED_BYTES = 16 * 1024
"""Shorter pieces are joined: each byte by itself would take forty times its memory."""


class Store:
    """The contents of one host.

    Args:
        max_memory: bytes of content in memory.
        directory: where unnamed files are made; None: the system's temporary one.

    Attributes:
        blobs: what is kept, by key.
        memory_bytes: content in memory now.
        spool: what is kept on the disk.
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
        # Of the blobs in memory those that may move, in the order in which they came.
        self._movable: OrderedDict[bytes, Blob] = OrderedDict()

    # Putting in

    def put(self, data: bytes) -> Content:
        """Keep bytes; text as it is, anything else as base64 too.

        Raises:
            FdError: ``file_operation``: it had to go to the disk, and the disk refused.
        """
        reader = Reader()
        in_memory = self.reserve(len(data))
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
            self.give_back(len(data) if in_memory else 0)
            raise
        return self.as_content(self.enter(key, kept), reader.finish())

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

    def as_content(self, blob: Blob, index: TextIndex | None) -> Content:
        """Return the content of a blob that is held; ``index`` is None if it is no text."""
        if index is not None:
            blob.give_index(index)
            return Content(blob)
        return Content(self._encoded(blob), blob)

    @staticmethod
    def _hashed(data: bytes) -> tuple[bytes, Buffer]:
        return blake3(data).digest(), data

    def _hashed_and_spooled(self, data: bytes) -> tuple[bytes, Buffer | Slot]:
        return blake3(data).digest(), self.spool.keep(data)

    def _encoded(self, raw: Blob) -> Blob:
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
        """Enter bytes whose memory is reserved, or return those that are there."""
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
        self._forget(blob)  # somebody was quicker
        return twin

    # Memory

    def reserve(self, size: int) -> bool:
        """Take room in memory, others moving to the disk for it; tell whether there is.

        It waits for the disk where memory is tight: see ``is_tight``.
        """
        if self._reserve(size):
            return True
        if size > self._max_memory:
            return False
        self._make_room(size)
        return self._reserve(size)

    def is_tight(self, size: int) -> bool:
        """Tell whether something of that size has to wait for others to move."""
        return self.memory_bytes + size > self._max_memory

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self.memory_bytes + size > self._max_memory:
                return False
            self.memory_bytes += size
            return True

    def give_back(self, size: int) -> None:
        """Give room back that was taken."""
        with self._lock:
            self.memory_bytes -= size

    def _make_room(self, size: int) -> None:
        """Move blobs to the disk until there is room, or none is left to move."""
        with self._moving:
            while (blob := self._next_to_move(size)) is not None:
                try:
                    self._move(blob)
                except FdError:
                    return  # the disk is full: what comes in will be told so
                finally:
                    self.release(blob)

    def _next_to_move(self, size: int) -> Blob | None:
        """Return who moves next, held; None if there is room or nobody is left.

        A content that was asked for since it came, or since it was last considered, goes to the
        end of the queue instead (the "clock" of operating systems).
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

    def drop_all(self, contents: Sequence[Content]) -> None:
        """Count one holder of each less; much that is freed by that is in a thread."""
        with self._lock:
            blobs = [blob for content in contents for blob in content.blobs]
            freed = [blob for blob in blobs if self._is_last(blob)]
        if sum(blob.size for blob in freed) > SLOW_TO_FREE_BYTES:
            afterwards(self._forget_all, freed)
        else:
            self._forget_all(freed)

    def release(self, blob: Blob) -> None:
        """Count one holder of a blob less; the last one frees it."""
        with self._lock:
            if not self._is_last(blob):
                return
        self._forget(blob)

    def _is_last(self, blob: Blob) -> bool:
        """Take a holder away; tell whether it was the last (the lock is held)."""
        blob.refs -= 1
        if blob.refs:
            return False
        if self.blobs.get(blob.key) is blob:
            del self.blobs[blob.key]
            self._movable.pop(blob.key, None)
        return True

    def _forget_all(self, blobs: list[Blob]) -> None:
        while blobs:
            self._forget(blobs.pop())  # its memory is free now, not with the last one

    def _forget(self, blob: Blob) -> None:
        if blob.in_memory is not None:
            self.give_back(blob.size)
        blob.close()

    # Looking at it

    @property
    def disk_bytes(self) -> int:
        """Return how much content lies on the disk."""
        with self._lock:
            blobs = tuple(self.blobs.values())
        return sum(blob.size for blob in blobs if blob.in_memory is None)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what it holds of the host's descriptors, with a word for each."""
        found = dict(self.spool.descriptors())
        found.update((fd, "content") for _, fd in self.files())
        yield from found.items()

    def files(self) -> list[tuple[tuple[int, int], int]]:
        """Return (what tells a file from others, descriptor) of each of its contents.

        Python keeps those of mappings to itself (mmap has a copy of its own); /proc has
        them.
        """
        with self._lock:
            blobs = tuple(self.blobs.values())
        found = (blob.mapping for blob in blobs)
        mapped = {one.identity for one in found if one is not None}
        return descriptors_of(mapped | self.spool.files.identities())


class Writer:
    """Content that comes in pieces: in memory while it is short, then on the disk.

    Args:
        store: will keep it.

    Attributes:
        size: bytes so far.
        incoming: what lies on the disk; None while it is in memory.
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
            FdError: ``file_operation``: the disk refused; nothing more can be added.
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
        """Keep a piece in memory, or turn to the disk."""
        if not self._fits(len(piece)):
            self._spill(self.size + len(piece))
        elif self._pieces and len(self._pieces[-1]) < JOINED_BYTES:
            self._pieces[-1] += piece
        else:
            self._pieces.append(piece)

    def _fits(self, size: int) -> bool:
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

    def go_on(self, incoming: Incoming) -> None:
        """Go on with what another program of this host has put on the disk.

        Raises:
            FdError: ``file_operation``: it cannot be read; the caller closes this.
        """
        self.incoming = incoming
        for piece in incoming.pieces(STEP_BYTES):
            self._hash.update(piece)
            self._reader.feed(piece)
        self.size = incoming.size

    def digest(self) -> bytes:
        """Return the BLAKE3 of what was added so far."""
        return self._hash.digest()

    def finish(self) -> Content:
        """Return what was added, held once; the writer is done.

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
        return store.as_content(store.enter(self.digest(), data), self._reader.finish())

    def close(self) -> None:
        """Give everything back that was not finished; safe to call twice."""
        self._pieces = []
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)
        if self.incoming is not None:
            self.incoming.close()
