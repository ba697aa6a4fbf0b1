"""The LLM fds of a host as plain forms for the hand-over, and back.

Contents, tables, names, sections, unused tokens, temporary files and conversations.

Rules of this file.

1. A content goes once, however many hold it: in a memory file, or as the file in which
   it lies already. The counts of its scan go with it.
2. The forms are JSON: texts of a model or a program may be no UTF-8, and JSON has a
   form for that.
3. All contents are held here until every table has its own.
"""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from supervisor.llmfd.blob import PIECE_BYTES, Blob, Content
from supervisor.llmfd.errors import FdError
from supervisor.llmfd.index import PageTable, TextIndex
from supervisor.llmfd.process import Process, Shared
from supervisor.llmfd.slots import Slot
from supervisor.llmfd.spool import Incoming
from supervisor.llmfd.table import FdNumber, FdTable, LlmFd
from supervisor.llmfd.tempfiles import TempFile
from vfs.errors import HandoverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.llmfd.store import Store, Writer


# The handed-over state of a host's LLM fds: see ``handover``.

Piece = tuple[int, int]
"""(offset, size) in the file in memory."""


class BlobState(msgspec.Struct):
    """See ``Blob``.

    Attributes:
        data: its place in the memory file, if it is there.
        fd: its own file; -1 for none.
        slot: (slot size, number), if it lies in one.
        newlines, starts, ends_line: see ``TextIndex``; None if it is no text.
        tables: (page size, place of the starts of its pages).
    """

    key: str
    size: int
    data: Piece | None
    fd: int
    slot: tuple[int, int] | None
    newlines: Piece | None
    starts: Piece | None
    ends_line: bool
    tables: list[tuple[int, Piece]]


class FdState(msgspec.Struct):
    """See ``LlmFd``; ``blobs`` are the keys of its content."""

    number: int
    blobs: list[str]
    page_size: int
    source: str
    created: float
    name: str
    sections: dict[str, tuple[int, int]]
    language: str


class WriterState(msgspec.Struct):
    """Pieces under a token so far: in memory, in the file ``fd``, or in a slot."""

    token: str
    size: int
    pieces: list[Piece]
    fd: int
    slot: tuple[int, int] | None = None


class ProcessState(msgspec.Struct):
    """See ``Process``; ``shared`` is a number."""

    shared: int
    fds: list[FdState]
    next_number: int
    messages: Any
    program: str
    claim: bool
    depth: int
    writers: list[WriterState]
    put_contents: int
    checkpoints_seen: list[str] | None = None
    checkpoints_made: list[str] = []


class SharedState(msgspec.Struct):
    """The shared parts of a child's processes; files are (id, version, keys)."""

    owner: str
    made: int
    files: list[tuple[str, int, list[str]]]


class SlotsState(msgspec.Struct):
    """See ``SlotFile``."""

    slot_bytes: int
    fd: int
    count: int
    free: list[int]


class StoreState(msgspec.Struct):
    """Contents and their places."""

    memory_fd: int
    slots: list[SlotsState]
    blobs: list[BlobState]


__all__ = ["Entering", "Leaving", "ProcessState", "SharedState", "StoreState"]


# Snapshot


class Leaving:
    """The contents of one host in a snapshot.

    Args:
        store: keeps them.

    Attributes:
        memory_fd: the memory file; the caller closes it if the exchange fails.
        fds: every descriptor that is handed over.
        shared: the shared parts by number.
    """

    def __init__(self, store: Store) -> None:
        self.memory_fd = os.memfd_create("sandhost-contents", os.MFD_CLOEXEC)
        self.fds = {self.memory_fd}
        self.shared: list[SharedState] = []
        self._store = store
        self._numbers: dict[int, int] = {}
        self._at = 0

    def contents(self) -> StoreState:
        """Return the state of every content."""
        files = dict(self._store.files())
        slots = [
            SlotsState(size, file.fd, *file.numbers())
            for size, file in self._store.spool.slots.items()
            if file.fd >= 0
        ]
        self.fds.update(one.fd for one in slots)
        blobs = [self._blob(blob, files) for blob in self._store.blobs.values()]
        return StoreState(self.memory_fd, slots, blobs)

    def _blob(self, blob: Blob, files: dict[tuple[int, int], int]) -> BlobState:
        fd, data, slot = -1, None, None
        if blob.mapping is not None:
            fd = blob.mapping.fd
            if fd < 0:
                fd = files.get(blob.mapping.identity, -1)
            if fd < 0:
                raise HandoverError("the file of a content is not to be found")
            self.fds.add(fd)
        elif blob.in_memory is not None:
            data = self._put(memoryview(blob.in_memory))
        elif blob._slot is not None:
            slot = blob._slot.address
        index = blob._index
        newlines = starts = None
        ends_line = False
        if index is not None:
            newlines = self._put(memoryview(index._newlines).cast("B"))
            if index._starts is not None:
                starts = self._put(memoryview(index._starts).cast("B"))
            ends_line = index.lines == index._newlines[-1]
        tables = [
            (size, self._put(memoryview(table.starts).cast("B")))
            for size, table in blob._tables.items()
        ]
        return BlobState(
            blob.key.hex(),
            blob.size,
            data,
            fd,
            slot,
            newlines,
            starts,
            ends_line,
            tables,
        )

    def _put(self, data: memoryview) -> Piece:
        at, size = self._at, len(data)
        while data:
            data = data[os.write(self.memory_fd, data[:PIECE_BYTES]) :]
        self._at += size
        return at, size

    def process(self, process: Process) -> ProcessState:
        """Return the state of a process."""
        table = process.table
        return ProcessState(
            shared=self._number_shared(process.shared),
            fds=[_fd_state(fd) for fd in table.fds.values()],
            next_number=table.next_number,
            messages=process.messages,
            program=process.program,
            claim=process.claim,
            depth=process.depth,
            writers=[self._writer(*one) for one in process.begun],
            put_contents=process.begun.made,
            checkpoints_seen=process.checkpoints.seen,
            checkpoints_made=process.checkpoints.made,
        )

    def _writer(self, token: str, writer: Writer) -> WriterState:
        pieces = [self._put(memoryview(piece)) for piece in writer._pieces]
        state = WriterState(token, writer.size, pieces, -1)
        incoming = writer.incoming
        if incoming is not None and incoming.fd >= 0:
            self.fds.add(incoming.fd)
            state.fd = incoming.fd
        elif incoming is not None and incoming.slot is not None:
            state.slot = incoming.slot.address
        return state

    def _number_shared(self, shared: Shared) -> int:
        number = self._numbers.get(id(shared))
        if number is None:
            number = self._numbers[id(shared)] = len(self.shared)
            temps = shared.temps
            files = [
                (file.id, file.version, _keys(file.content))
                for file in temps._files.values()
            ]
            self.shared.append(SharedState(shared.owner, temps._made, files))
        return number


def _fd_state(fd: LlmFd) -> FdState:
    return FdState(
        fd.number,
        _keys(fd.content),
        fd.page_size,
        fd.source,
        fd.created,
        fd.name,
        fd.sections,
        fd.language,
    )


def _keys(content: Content) -> list[str]:
    return [blob.key.hex() for blob in content.blobs]


# Restoring


class Entering:
    """The handed-over contents, until all tables have their own.

    Args:
        store: keeps them.
        state: of the program before.
        shared: the shared parts of that program.
        make_shared: makes the shared part for an owner.
    """

    def __init__(
        self,
        store: Store,
        state: StoreState,
        shared: list[SharedState],
        make_shared: Callable[[str], Shared],
    ) -> None:
        self._store = store
        self._memory_fd = state.memory_fd
        for one in state.slots:
            store.spool.slots[one.slot_bytes].take_over(one.fd, one.count, one.free)
        self._blobs = {one.key: self._blob(one) for one in state.blobs}
        self._shared = [self._enter_shared(one, make_shared) for one in shared]

    def close(self) -> None:
        """Free contents without a holder, and the memory file."""
        blobs, self._blobs = self._blobs, {}
        for blob in blobs.values():
            self._store.release(blob)
        os.close(self._memory_fd)

    def _blob(self, left: BlobState) -> Blob:
        key = bytes.fromhex(left.key)
        if left.slot is not None:
            blob = Blob(key, self._slot(left.slot, left.size))
        elif left.data is None:
            spool = self._store.spool
            spool.files.take_over(left.fd)
            blob = Blob(key, spool.map(left.fd, left.size))
        else:
            blob = Blob(key, self._read(left.data))
            self._store.memory_bytes += left.size
            self._store._movable[key] = blob
        if left.newlines is not None:
            starts = None if left.starts is None else self._array(left.starts)
            newlines = self._array(left.newlines)
            blob.give_index(
                TextIndex(left.size, newlines, starts, ends_line=left.ends_line)
            )
        for size, piece in left.tables:
            blob._tables[size] = PageTable(size, self._array(piece), left.size)
        self._store.blobs[blob.key] = blob
        return blob

    def _slot(self, address: tuple[int, int], size: int) -> Slot:
        slot_bytes, number = address
        return Slot(self._store.spool.slots[slot_bytes], number, size)

    def _read(self, piece: Piece) -> bytes:
        at, left = piece
        parts = []
        while left:
            data = os.pread(self._memory_fd, min(left, 64 * PIECE_BYTES), at)
            if not data:
                raise HandoverError("a content was not handed over whole")
            parts.append(data)
            at, left = at + len(data), left - len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _array(self, piece: Piece) -> array[int]:
        made = array("Q")
        made.frombytes(self._read(piece))
        return made

    def _content(self, keys: list[str]) -> Content:
        blobs = [self._blobs[key] for key in keys]
        return self._store.hold(Content(*blobs))

    def _enter_shared(
        self, left: SharedState, make_shared: Callable[[str], Shared]
    ) -> Shared:
        shared = make_shared(left.owner)
        shared.temps._made = left.made
        for file_id, version, keys in left.files:
            file = TempFile(file_id, version, self._content(keys))
            shared.temps.enter(file)
        return shared

    def process(self, left: ProcessState) -> Process:
        """Return a restored process; the caller sets its client."""
        shared = self._shared[left.shared]
        table = FdTable(shared.store, shared.allowance)
        table.next_number = left.next_number
        for fd in left.fds:
            table.enter(
                LlmFd(
                    FdNumber(fd.number),
                    self._content(fd.blobs),
                    fd.page_size,
                    fd.source,
                    fd.created,
                    fd.name,
                    fd.sections,
                    fd.language,
                )
            )
        process = Process(shared, table)
        process.messages, process.program = left.messages, left.program
        process.claim, process.depth = left.claim, left.depth
        process.begun.made = left.put_contents
        process.checkpoints.seen = left.checkpoints_seen
        process.checkpoints.made = left.checkpoints_made
        for one in left.writers:
            writer = self._writer(one)
            if writer is None:
                continue
            process.begun.enter(writer, one.token)
            if shared.allowance is not None:
                shared.allowance.used += writer.size  # taken piece by piece before
        return process

    def _writer(self, left: WriterState) -> Writer | None:
        """Return a restored writer; None if it cannot continue, and its room is free.

        It is hashed and scanned again: neither state has a form. Bytes on the disk stay
        there: the disk may be full.
        """
        writer = self._store.writer()
        try:
            for piece in left.pieces:
                writer.add(self._read(piece))
            if left.slot is not None:
                slot = self._slot(left.slot, left.size)
                writer.continue_from(Incoming(self._store.spool, slot=slot))
            elif left.fd >= 0:
                self._store.spool.files.take_over(left.fd)
                writer.continue_from(Incoming(self._store.spool, fd=left.fd))
        except FdError:
            writer.close()
            return None
        return writer
