"""The store: each content once, by its hash, in memory or on the disk.

1. Content never changes. Its key is the BLAKE3 of its bytes: equal contents, of any
   clients, are one blob with two references.
2. A blob is freed with its last reference; a table gives its references back when its
   process ends.
3. All blobs have ``max_memory`` together. When it is full, the oldest unused blobs move
   to the disk (``supervisor.llmfd.blob_files``). A content longer than ``max_memory`` or
   ``MOST_IN_MEMORY_BYTES`` goes there at once.
4. Any thread may call; the lock covers counts and dictionaries, never bytes. Slow work
   (a scan, a copy, a move to the disk) is for ``threads.in_thread``.
"""

from __future__ import annotations

import binascii
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from hostlib.threads import ThreadLock, in_background
from supervisor.llmfd.blob import Blob, Content
from supervisor.llmfd.blob_files import (
    SLOW_TO_FREE_BYTES,
    BlobFiles,
    PartialFile,
    make_disk_error,
    make_gone_error,
)
from supervisor.llmfd.errors import FdError
from supervisor.llmfd.index import IndexReader, TextIndex
from supervisor.llmfd.memory_file import Piece  # noqa: TC001 - msgspec looks at it

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.llmfd.blob import BlobState
    from supervisor.llmfd.memory_file import MemoryFile

DEFAULT_MAX_MEMORY = 256 * 1024 * 1024
"""Memory for the contents of a host."""

BASE64_PIECE_BYTES = 3 * 1024 * 1024
"""Bytes of one encoding step; a multiple of 3, so that pieces join without padding."""

MOST_IN_MEMORY_BYTES = 16 * 1024 * 1024
"""Longest content that stays in memory: a mapped file is read as quickly, and the kernel
may drop its pages."""

STEP_BYTES = 128 * 1024
"""Bytes that are read, written, hashed and scanned at once: they fit into the second
cache."""

FEW_FILES = 20
"""Files that are removed in the caller's thread: a millisecond."""

JOINED_BYTES = 16 * 1024
"""Shorter pieces are joined: single bytes would take forty times their memory."""


class Store:
    """The contents of one host.

    Args:
        max_memory: bytes of content in memory.
        directory: of contents on the disk, of this store alone; None for a temporary
            one.

    Attributes:
        blobs: all blobs by key.
        memory_bytes: content in memory now.
        files: has the contents on the disk.

    Raises:
        OSError: the directory cannot be used.
    """

    def __init__(
        self, max_memory: int = DEFAULT_MAX_MEMORY, directory: str | None = None
    ) -> None:
        self.blobs: dict[bytes, Blob] = {}
        self.memory_bytes = 0
        self.files = BlobFiles(directory)
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
        writer = self.writer()
        try:
            writer.add(data)
            return writer.finish()
        finally:
            writer.close()

    def writer(self) -> Writer:
        """Return a writer for content that comes in pieces."""
        return Writer(self)

    def make_content(self, blob: Blob, index: TextIndex | None) -> Content:
        """Return the content of a held blob; ``index`` is None if it is no text."""
        if index is not None:
            blob.give_index(index)
            return Content(blob)
        return Content(self._encode(blob), blob)

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

    def enter(self, key: bytes, place: bytes | PartialFile) -> Blob:
        """Add a content, or return the blob that has it.

        Args:
            key: its BLAKE3.
            place: the bytes, whose memory is reserved, or the file that has them.

        Raises:
            FdError: ``file_operation``: the disk refused; the caller keeps the place.
        """
        with self._lock:
            twin = self.blobs.get(key)
            if twin is None:
                return self._enter_new(key, place)
            twin.refs += 1
            twin.was_used = True
        self._give_up(place)  # another thread was quicker
        return twin

    def _enter_new(self, key: bytes, place: bytes | PartialFile) -> Blob:
        if isinstance(place, PartialFile):
            blob = Blob(key, place.size, None, self.files)
            place.finish(blob.name)
        else:
            blob = Blob(key, len(place), place, self.files)
            self._movable[key] = blob
        self.blobs[key] = blob
        return blob

    def _give_up(self, place: bytes | PartialFile) -> None:
        if isinstance(place, PartialFile):
            place.close()
        else:
            self.give_back(len(place))

    # Memory

    def reserve(self, size: int) -> bool:
        """Take room in memory by moving others to the disk; return whether there is any.

        It waits for the disk if memory is tight.
        """
        if self._reserve(size):
            return True
        if size > self._max_memory:
            return False
        self._make_room(size)
        return self._reserve(size)

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
        part = PartialFile(self.files)
        try:
            part.add(data)
            with self._lock:
                part.finish(blob.name)
                blob.in_memory = None
                self.memory_bytes -= blob.size
        except FdError:
            with self._lock:
                self._movable[blob.key] = blob
            raise
        finally:
            part.close()

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
        on_disk = sum(blob.in_memory is None for blob in freed)
        size = sum(blob.size for blob in freed)
        if size > SLOW_TO_FREE_BYTES or on_disk > FEW_FILES:
            in_background(self._forget_all, freed)
        else:
            self._forget_all(freed)

    def release(self, blob: Blob) -> None:
        """Count one holder of a blob less; the last one frees it."""
        with self._lock:
            if not self._is_last(blob):
                return
        self.forget(blob)

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
            self.forget(blobs.pop())  # frees its memory now, not with the last one

    def forget(self, blob: Blob) -> None:
        """Free what a content without a holder takes, in memory or on the disk."""
        if blob.in_memory is not None:
            self.give_back(blob.size)
            return
        with self._lock:
            # The same bytes may have come again since, with a file of that name.
            twin = self.blobs.get(blob.key)
            if twin is not None and twin.in_memory is None:
                return
            part = self.files.unname(blob.name, blob.size)
        if part is not None:
            in_background(self.files.remove, [part])

    def close(self) -> None:
        """Remove all files, and close their directory; safe to call twice."""
        with self._lock:  # no file gets another name meanwhile
            if any(self.files.descriptors()):
                self.files.remove_all_but(())
                self.files.close()

    # Hand-over

    def snapshot(self, memory: MemoryFile) -> list[BlobState]:
        """Return all contents; their files stay where they are."""
        return [blob.snapshot(memory) for blob in self.blobs.values()]

    def restore(self, left: list[BlobState], memory: MemoryFile) -> list[Blob]:
        """Restore the contents of the program before; return them, held once.

        Raises:
            HandoverError: one was not handed over whole.
        """
        for state in left:
            blob = Blob.restore(state, memory, self.files)
            self.blobs[blob.key] = blob
            if blob.in_memory is not None:
                self._movable[blob.key] = blob
                self.memory_bytes += blob.size
        return list(self.blobs.values())

    def content(self, keys: list[bytes]) -> Content:
        """Return the content of its blobs' keys, held once more."""
        return self.hold(Content(*(self.blobs[key] for key in keys)))


class WriterState(msgspec.Struct):
    """See ``Writer``; its bytes are pieces in the memory file, or a partial file."""

    token: str
    size: int
    pieces: list[Piece]
    file: str | None


class Writer:
    """Content that comes in pieces: in memory while short, then on the disk.

    Args:
        store: keeps the result.

    Attributes:
        size: bytes so far.
        incoming: the file that has the bytes; None while they are in memory.
    """

    def __init__(self, store: Store) -> None:
        self.size = 0
        self._store = store
        self._pieces: list[bytes] = []
        self.incoming: PartialFile | None = None
        self._hash = blake3()
        self._reader = IndexReader()
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
            self._spill()
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

    def _spill(self) -> None:
        self.incoming = PartialFile(self._store.files)
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self.incoming.add(piece)
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)

    def digest(self) -> bytes:
        """Return the BLAKE3 of the bytes so far."""
        return self._hash.digest()

    def finish(self) -> Content:
        """Return the content, held once; the writer is done.

        Raises:
            FdError: ``file_operation``: the disk refused.
        """
        place: bytes | PartialFile | None = self.incoming
        if place is None:
            pieces, self._pieces, self._reserved = self._pieces, [], 0
            place = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        blob = self._store.enter(self.digest(), place)
        return self._store.make_content(blob, self._reader.finish())

    def close(self) -> None:
        """Free an unfinished content; safe to call twice."""
        self._pieces = []
        reserved, self._reserved = self._reserved, 0
        self._store.give_back(reserved)
        if self.incoming is not None:
            self.incoming.close()

    # Hand-over

    def snapshot(self, token: str, memory: MemoryFile) -> WriterState:
        """Return it as ``restore`` takes it, under its token."""
        pieces = [memory.put(piece) for piece in self._pieces]
        file = None if self.incoming is None else self.incoming.name
        return WriterState(token, self.size, pieces, file)

    def restore(self, state: WriterState, memory: MemoryFile) -> None:
        """Continue a content of the program before: it is hashed and scanned again.

        Raises:
            FdError: ``file_operation``: its file cannot be read, or there is less room
                in memory and none on the disk; the caller closes this.
        """
        for piece in state.pieces:
            self.add(memory.get(piece))
        if state.file is None:
            return
        files = self._store.files
        self.incoming = PartialFile(files, state.file, state.size)
        try:
            for data in files.pieces(state.file, STEP_BYTES):
                self._hash.update(data)
                self._reader.feed(data)
                self.size += len(data)
        except OSError as why:
            raise make_disk_error(why, "read") from None
        if self.size != state.size:
            raise make_gone_error()
