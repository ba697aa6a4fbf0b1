"""Payloads on their way in: whole in memory or in an unnamed file, within one budget.

Rules of this file.

1. A payload reaches a file only when its last byte has come (spec W2), so it is kept
   until then.
2. All payloads of all clients share one budget of memory.  Beyond it a payload goes to
   an unnamed file: nobody waits for somebody else's payload (spec W3).
3. Memory is taken by what comes, not by what was declared: small payloads use buffers
   that exist already, large ones a mapping whose pages the kernel gives on first touch
   (attack 15).
"""

import mmap
import os
import tempfile
from typing import Final

DEFAULT_BUDGET_BYTES = 64 * 1024 * 1024
"""Memory for payloads over all clients (spec W3)."""

_CLASSES: Final = ((64 * 1024, 16), (1024 * 1024, 4))
"""(size, how many are kept) of the buffers that are used again.

A fresh 1 MiB buffer costs 256 page faults, about as much as writing it to the file.
"""

SCRATCH_BYTES = 64 * 1024
"""Piece in which a spooled or drained payload is received."""


class Payload:
    """One payload being received.

    Attributes:
        left: bytes that have not come yet.
        size: bytes in all.
    """

    __slots__ = (
        "_budget",
        "_buffer",
        "_charged",
        "_map",
        "_spool",
        "_view",
        "left",
        "size",
    )

    def __init__(self, budget: "PayloadBudget", size: int) -> None:
        self._budget = budget
        self.size = size
        self.left = size
        self._buffer: bytearray | None = None
        self._map: mmap.mmap | None = None
        self._spool = -1
        self._charged = 0
        self._view = memoryview(b"")

    def hold(self) -> None:
        """Take memory or, beyond the budget, a file."""
        budget = self._budget
        if not budget.charge(self):
            self._spool = budget.open_spool()
            self._view = budget.scratch
        elif self._buffer is not None:
            self._view = memoryview(self._buffer)[: self.size]
        else:
            self._map = mmap.mmap(-1, self.size)
            self._view = memoryview(self._map)

    @property
    def is_spooled(self) -> bool:
        """Whether the payload goes to a file."""
        return self._spool >= 0

    def descriptors(self) -> tuple[int, ...]:
        """Return the file's descriptor; a mapping of it keeps one more of its own."""
        return (self._spool,) if self._spool >= 0 else ()

    def space(self) -> memoryview:
        """Return where the next bytes are to be received."""
        if self._spool >= 0:
            return self._view[: self.left]
        return self._view[self.size - self.left :]

    def advance(self, count: int) -> None:
        """Count bytes that were received into ``space``.

        Raises:
            OSError: the spool file could not take them.
        """
        if self._spool >= 0:
            _write_all(self._spool, self._view[:count])
        self.left -= count

    def add(self, piece: bytes) -> None:
        """Copy bytes in that were received elsewhere.

        Raises:
            OSError: the spool file could not take them.
        """
        if self._spool >= 0:
            _write_all(self._spool, memoryview(piece))
        else:
            start = self.size - self.left
            self._view[start : start + len(piece)] = piece
        self.left -= len(piece)

    def view(self) -> memoryview:
        """Return the whole payload; only when nothing is left to come."""
        if self._spool >= 0 and self._map is None and self.size:
            self._map = mmap.mmap(self._spool, self.size, prot=mmap.PROT_READ)
            self._view = memoryview(self._map)
        return self._view

    def close(self) -> None:
        """Give memory and file back; safe to call twice."""
        if self._spool < 0 or self._map is not None:
            self._view.release()
        self._view = memoryview(b"")
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._spool >= 0:
            os.close(self._spool)
            self._spool = -1
        self._budget.release(self)


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


class PayloadBudget:
    """The memory of all payloads of a host.

    Args:
        limit_bytes: most memory at once.
        spool_dir: where unnamed files are made; the system's temporary directory.

    Attributes:
        used_bytes: memory that payloads hold now.
    """

    __slots__ = ("_free", "_limit", "_scratch", "_spool_dir", "spooled", "used_bytes")

    def __init__(
        self, limit_bytes: int = DEFAULT_BUDGET_BYTES, spool_dir: str | None = None
    ) -> None:
        self._limit = limit_bytes
        self._spool_dir = spool_dir
        self._free: tuple[list[bytearray], ...] = tuple([] for _ in _CLASSES)
        self._scratch = bytearray(SCRATCH_BYTES)
        self.used_bytes = 0
        self.spooled = 0

    @property
    def scratch(self) -> memoryview:
        """Return the one buffer for bytes that are not kept in memory."""
        return memoryview(self._scratch)

    def begin(self, size: int) -> Payload:
        """Return a payload of ``size`` bytes, ready to receive."""
        payload = Payload(self, size)
        payload.hold()
        return payload

    def charge(self, payload: Payload) -> bool:
        """Charge a payload and give it a buffer, if it fits; tell whether."""
        for index, (class_size, _) in enumerate(_CLASSES):
            if payload.size <= class_size:
                if self.used_bytes + class_size > self._limit:
                    return False
                free = self._free[index]
                payload._buffer = free.pop() if free else bytearray(class_size)
                break
        else:
            class_size = payload.size
            if self.used_bytes + class_size > self._limit:
                return False
        payload._charged = class_size
        self.used_bytes += class_size
        return True

    def release(self, payload: Payload) -> None:
        """Take a payload's buffer back."""
        self.used_bytes -= payload._charged
        payload._charged = 0
        buffer, payload._buffer = payload._buffer, None
        if buffer is None:
            return
        for free, (class_size, kept) in zip(self._free, _CLASSES, strict=True):
            if len(buffer) == class_size and len(free) < kept:
                free.append(buffer)

    def open_spool(self) -> int:
        """Open an unnamed file for one payload."""
        self.spooled += 1
        directory = self._spool_dir or tempfile.gettempdir()
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
        try:
            return os.open(directory, flags, 0o600)
        except OSError:
            # No O_TMPFILE on this file system: make one and take its name away.
            fd, name = tempfile.mkstemp(dir=directory)
            os.unlink(name)
            return fd
