"""Payloads that are being received, and reservations of memory for requests.

1. A payload is written to a file only when its last byte has come (spec W2), so it is
   kept until then.
2. A child has a part of the host's one budget of memory.  Beyond it a payload goes to an
   unnamed file, so that no client waits for another's (spec W3); a child's files are
   bounded, too, for a full disk fails the payloads of others (spec S7).
3. A payload takes memory and disk as its bytes come: the kernel gives pages on first touch
   (attack 15).  It is charged as declared: else many at once would all be refused half-way.
4. A request that is decoded, passed on or answered at length first reserves the memory that
   it needs beside its payload, for its child and for the host (attack 42).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING, Final, Self

from hostlib.accounts import Account
from hostlib.threads import in_background
from hostlib.unnamed_files import open_unnamed
from vfs.ledger import MOST_MEMORY_BYTES, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_BUDGET_BYTES = 64 * 1024 * 1024
"""Memory for payloads over all clients (spec W3)."""

CHILDREN = 8
"""Children that may be at their own bound before the host's bound is reached: as many as a
usual machine serves well (spec S7)."""

PARTS = 2
"""One child may have this part of the budget for payloads."""

ANSWER_BYTES = 4 * 1024 * 1024
"""Memory beside that of requests, for the answers of a child: a call of the model that
failed for lack of it would have been paid for nothing."""

MUCH_BYTES = 16 * 1024 * 1024
"""Freed memory that is worth a call to return it to the kernel."""

_CLASSES: Final = ((64 * 1024, 16), (1024 * 1024, 4))
"""(size, number of kept ones) of mappings that are reused.

A fresh 1 MiB costs 256 page faults, about as much as writing it to the file.
"""

LONG_BYTES = 4 * 1024 * 1024
"""A longer mapping is unmapped in a thread: 16 MiB take 3 ms."""

SCRATCH_BYTES = 64 * 1024
"""Size of the pieces in which a spooled or drained payload is received."""


_READ_BACK_BYTES = 1024 * 1024
"""Size of the pieces in which a spooled payload is read back."""


class Payload:
    """One payload being received; made by ``PayloadBudget.begin``.

    Attributes:
        left: number of bytes that have not come yet.
        size: number of bytes in all.
    """

    __slots__ = ("_account", "_budget", "_map", "_spool", "_view", "left", "size")

    def __init__(
        self,
        budget: PayloadBudget,
        account: Account[int],
        size: int,
        room: mmap.mmap | None,
        spool: int,
    ) -> None:
        self._budget = budget
        self._account = account  # charged for its memory or its disk
        self._map = room
        self._spool = spool
        self._view = budget.scratch if room is None else memoryview(room)[:size]
        self.size = size
        self.left = size

    @property
    def is_spooled(self) -> bool:
        """Whether the payload goes to a file."""
        return self._spool >= 0

    @property
    def spool(self) -> int:
        """The descriptor of that file; -1 if there is none."""
        return self._spool

    def read_received(self) -> bytes:
        """Return the bytes received so far.

        Raises:
            OSError: the spool file cannot be read.
        """
        size = self.size - self.left
        if self._spool < 0:
            return bytes(self._view[:size])
        starts = range(0, size, _READ_BACK_BYTES)
        return b"".join(
            os.pread(self._spool, min(_READ_BACK_BYTES, size - at), at) for at in starts
        )

    def descriptors(self) -> tuple[int, ...]:
        """Return the spool file's descriptor; a mapping of it holds one more."""
        return (self._spool,) if self._spool >= 0 else ()

    def space(self) -> memoryview:
        """Return the buffer for the next bytes."""
        if self._spool >= 0:
            return self._view[: self.left]
        return self._view[self.size - self.left :]

    def advance(self, count: int) -> None:
        """Count bytes that were received into ``space``.

        Raises:
            OSError: the spool file could not take them.
        """
        if self._spool >= 0:
            write_all(self._spool, self._view[:count])
        self.left -= count

    def add(self, piece: bytes) -> None:
        """Copy received bytes into the payload.

        Raises:
            OSError: the spool file could not take them.
        """
        if self._spool >= 0:
            write_all(self._spool, memoryview(piece))
        else:
            start = self.size - self.left
            self._view[start : start + len(piece)] = piece
        self.left -= len(piece)

    def view(self) -> memoryview:
        """Return the received bytes; no more may come then."""
        if self._spool >= 0 and self._map is None:
            size = self.size - self.left
            self._map = mmap.mmap(self._spool, size, prot=mmap.PROT_READ)
            self._view = memoryview(self._map)
        return self._view[: -self.left] if self.left else self._view

    def close(self) -> None:
        """Release memory and file; safe to call twice."""
        room, self._map = self._map, None
        if room is not None:
            self._view.release()
        self._view = memoryview(b"")
        if self._spool < 0:
            if room is not None:
                self._account.record(-_room_for(self.size))
                self._budget.take_back(room, self.size)
            return
        if room is not None:
            _unmap(room)
        os.close(self._spool)
        self._spool = -1
        self._account.record(-self.size)


def _unmap(room: mmap.mmap) -> None:
    # The frames of a failed call may still hold a view; the mapping goes with them.
    with contextlib.suppress(BufferError):
        room.close()


def write_all(fd: int, data: memoryview) -> None:
    """Write all of the data to a descriptor."""
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


class PayloadBudget:
    """The memory of all payloads of a host.

    Args:
        limit_bytes: most memory of payloads at once.
        spool_dir: directory of unnamed files; None for the system's temporary one.

    Attributes:
        payload_memory: account of the memory that payloads may fill; beyond its limit
            they go to files.  Those of children are beneath it.
        request_memory: account of what requests have reserved; those of children
            are beneath it.
        spooled: number of payloads that went to a file so far.
        on_freed: called when the last reservation of a large sum has ended.
    """

    __slots__ = (
        "_child_bytes",
        "_free",
        "_most_reserved",
        "_scratch",
        "_spool_dir",
        "on_freed",
        "payload_memory",
        "request_memory",
        "spooled",
    )

    def __init__(
        self, limit_bytes: int = DEFAULT_BUDGET_BYTES, spool_dir: str | None = None
    ) -> None:
        self.payload_memory: Account[int] = Account(None, limit_bytes)
        self._child_bytes = limit_bytes // PARTS
        self.request_memory = Account(None, CHILDREN * MOST_MEMORY_BYTES)
        self._spool_dir = spool_dir
        self._free: dict[int, list[mmap.mmap]] = {size: [] for size, _ in _CLASSES}
        self._scratch = bytearray(SCRATCH_BYTES)
        self._most_reserved = 0
        self.on_freed: Callable[[], object] | None = None
        self.spooled = 0

    @property
    def kept_bytes(self) -> int:
        """Memory of payloads that are over, kept for the next ones."""
        return sum(len(room) for rooms in self._free.values() for room in rooms)

    @property
    def scratch(self) -> memoryview:
        """The one buffer for bytes that are not kept in memory."""
        return memoryview(self._scratch)

    def begin(self, size: int, ledger: Ledger) -> Payload:
        """Return a payload of ``size`` bytes, at least one, ready to receive.

        Args:
            size: declared bytes.
            ledger: of the client that sends it.

        Raises:
            OSError: the budget is used up, and no file could be made; ``ENOMEM``: the
                child has its limit of bytes in files.
        """
        memory = ledger.payload_memory
        if memory.parent is None:
            memory.limit = self._child_bytes
            memory.join(self.payload_memory)
        room_size = _room_for(size)
        if not memory.charge(room_size):
            if ledger.spooled_bytes.used and ledger.spooled_bytes.left < size:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            spool = open_unnamed(self._spool_dir)
            self.spooled += 1
            return self.adopt(spool, size, size, ledger)
        free = self._free.get(room_size)
        try:
            room = free.pop() if free else mmap.mmap(-1, room_size)
        except BaseException:
            memory.record(-room_size)
            raise
        return Payload(self, memory, size, room, -1)

    def reservation(self, ledger: Ledger, size_bytes: int = 0) -> MemoryReservation:
        """Return a reservation of memory for a request of a ledger's child.

        Raises:
            OSError: ``ENOMEM``: the child or the host has too little memory left.
        """
        if ledger.memory.parent is None:
            ledger.memory.join(self.request_memory)
        reservation = MemoryReservation(self, ledger.memory)
        reservation.resize(size_bytes)
        return reservation

    def note_change(self) -> None:
        """Call ``on_freed`` if the last reservation of a large sum has ended."""
        self._most_reserved = max(self._most_reserved, self.request_memory.used)
        if not self.request_memory.used:
            if self._most_reserved > MUCH_BYTES and self.on_freed is not None:
                self.on_freed()
            self._most_reserved = 0

    def adopt(self, spool: int, size: int, left: int, ledger: Ledger) -> Payload:
        """Return a payload that owns a file with its bytes so far."""
        ledger.spooled_bytes.record(size)
        payload = Payload(self, ledger.spooled_bytes, size, None, spool)
        payload.left = left
        return payload

    def take_back(self, room: mmap.mmap, size: int) -> None:
        """Keep or unmap the memory of a payload of ``size`` bytes."""
        room_size = _room_for(size)
        for class_size, kept in _CLASSES:
            if room_size == class_size and len(self._free[class_size]) < kept:
                self._free[class_size].append(room)
                return
        if size > LONG_BYTES:
            in_background(_unmap, room)
        else:
            _unmap(room)


class MemoryReservation:
    """The reserved memory of one request; made by ``PayloadBudget.reservation``.

    Attributes:
        size_bytes: its present size.
    """

    __slots__ = ("_account", "_budget", "size_bytes")

    def __init__(self, budget: PayloadBudget, account: Account[int]) -> None:
        self._budget = budget
        self._account = account  # of the child, beneath that of the host
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, size_bytes: int) -> None:
        """Reserve more for an answer, also from ``ANSWER_BYTES``; raise as ``resize``."""
        self._account.record(size_bytes)
        child, host = self._account.path()
        if size_bytes > 0 and (
            child.excess > ANSWER_BYTES or host.excess > CHILDREN * ANSWER_BYTES
        ):
            self._account.record(-size_bytes)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self._note(size_bytes)

    def raise_to(self, size_bytes: int) -> None:
        """Reserve at least this size in all; raise as ``resize``."""
        self.resize(max(self.size_bytes, size_bytes))

    def resize(self, size_bytes: int) -> None:
        """Reserve this size in all, without the part for answers.

        Raises:
            OSError: ``ENOMEM``: there is no room for more; nothing has changed.
        """
        more = size_bytes - self.size_bytes
        if not self._account.charge(more):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self._note(more)

    def _note(self, more: int) -> None:
        self.size_bytes += more
        self._budget.note_change()

    def close(self) -> None:
        """Release the reservation; safe to call twice."""
        self.resize(0)


def _room_for(size: int) -> int:
    """Return the memory that a payload of a size is charged."""
    for class_size, _ in _CLASSES:
        if size <= class_size:
            return class_size
    return size
