"""Stores for the parts of a log: memory, a file, a ring of either.

Each store keeps all bytes from its own offset on, and says how many more it takes; the
log (``log``) chooses the next store.

The kernel copies bytes into the file and the host copies them out: a page that waits in
a socket must not change when the ring wraps.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from hostlib.handover import HandoverError
from hostlib.threads import count_sleeps, in_thread
from supervisor.toolexec.output.quota import LEAST_FILE_BYTES, STEP_BYTES
from vfs.mounts import mount_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.toolexec.output.quota import LogQuota

HEAD_BYTES = 65_536
"""Bytes of every execution in memory; the size of a pipe."""

WINDOW_BYTES = 1024 * 1024
"""The window in memory, without a file."""


class StoreState(msgspec.Struct):
    """The state of a part of a log: a file by descriptor, memory by bytes.

    Attributes:
        data: bytes in memory, by place.
    """

    kind: str
    start: int
    data: bytes = b""
    fd: int = -1
    charged: int = 0
    ring_bytes: int = 0
    length: int = 0
    allowed: int = 0


class LogStore(Protocol):
    """Keeps a part of a log: all bytes from ``start`` on."""

    start: int

    def room(self, low: int, end: int) -> int:
        """Return the number of bytes that it takes now.

        Args:
            low: offset of the slowest attached reader.
            end: offset of the next byte.
        """
        ...

    async def write(self, offset: int, data: memoryview) -> int:
        """Write bytes, at most ``room``; return their number.

        Raises:
            OSError: the file refused.
        """
        ...

    async def read(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` of its bytes, at least one.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def oldest(self, end: int) -> int:
        """Return the offset of its oldest byte when it ends at ``end``."""
        ...

    def snapshot(self) -> StoreState:
        """Return its state for ``restore_store``."""
        ...

    def close(self) -> None:
        """Free all."""
        ...


class LogHead:
    """The beginning, in memory."""

    def __init__(self, data: bytes = b"") -> None:
        self.start = 0
        self._data = bytearray(data)

    def room(self, low: int, end: int) -> int:
        """See ``LogStore``."""
        return HEAD_BYTES - end

    async def write(self, offset: int, data: memoryview) -> int:
        """See ``LogStore``."""
        self._data += data
        return len(data)

    def whole(self) -> bytes:
        """Return all its bytes."""
        return bytes(self._data)

    async def read(self, offset: int, size: int) -> bytes:
        """See ``LogStore``."""
        return bytes(memoryview(self._data)[offset : offset + size])

    def oldest(self, end: int) -> int:
        """See ``LogStore``."""
        return 0

    def snapshot(self) -> StoreState:
        """See ``LogStore``."""
        return StoreState("head", self.start, bytes(self._data))

    def close(self) -> None:
        """See ``LogStore``."""
        self._data = bytearray()


class Window:
    """A ring in memory, used without a file."""

    def __init__(self, start: int, ring: bytes | None = None) -> None:
        self.start = start
        self._ring = bytearray(WINDOW_BYTES if ring is None else ring)

    def room(self, low: int, end: int) -> int:
        """See ``LogStore``."""
        return WINDOW_BYTES - (end - max(low, self.start))

    async def write(self, offset: int, data: memoryview) -> int:
        """See ``LogStore``."""
        at = (offset - self.start) % WINDOW_BYTES
        part = data[: WINDOW_BYTES - at]
        self._ring[at : at + len(part)] = part
        return len(part)

    async def read(self, offset: int, size: int) -> bytes:
        """See ``LogStore``."""
        at = (offset - self.start) % WINDOW_BYTES
        return bytes(memoryview(self._ring)[at : min(at + size, WINDOW_BYTES)])

    def oldest(self, end: int) -> int:
        """See ``LogStore``."""
        return max(self.start, end - WINDOW_BYTES)

    def snapshot(self) -> StoreState:
        """See ``LogStore``."""
        return StoreState("window", self.start, bytes(self._ring))

    def close(self) -> None:
        """See ``LogStore``."""
        self._ring = bytearray()


class File:
    """An unnamed file: it grows, and becomes a ring when it may not.

    Attributes:
        fd: the descriptor, owned.
        ring_bytes: its size as a ring; 0 while it grows.
        is_spliceable: whether its file system takes splice(2), as far as known.
    """

    def __init__(
        self, start: int, file: tuple[int, int], limit_bytes: int, quota: LogQuota
    ) -> None:
        self.start = start
        self.fd, self._charged = file
        self.ring_bytes = 0
        self.is_spliceable = True
        self._limit_bytes = limit_bytes
        self._least_bytes = min(limit_bytes, LEAST_FILE_BYTES)
        self._length = 0
        self._allowed = self._charged
        self._quota = quota
        self._mount = mount_of(os.fstat(self.fd).st_dev, self.fd)

    def room(self, low: int, end: int) -> int:
        """See ``LogStore``."""
        if self.ring_bytes:
            return self.ring_bytes - (end - max(low, self.start))
        if self._allowed <= self._length < self._limit_bytes:
            self._grow()
        return min(self._allowed, self._limit_bytes) - self._length

    def _grow(self) -> None:
        if self._quota.take(STEP_BYTES):
            self._charged += STEP_BYTES
            self._allowed += STEP_BYTES
        elif self._length < self._least_bytes:
            self._allowed = self._least_bytes

    def freeze(self) -> bool:
        """Become a ring; return False if it is too short, or a ring already."""
        if self.ring_bytes or self._length < WINDOW_BYTES:
            return False
        self.ring_bytes = self._length
        return True

    async def write(self, offset: int, data: memoryview) -> int:
        """See ``LogStore``."""
        at = offset - self.start
        if self.ring_bytes:
            at %= self.ring_bytes
            data = data[: self.ring_bytes - at]
        mount = self._mount
        if not mount.inline:
            mount.try_again()
        if mount.inline:
            written = self._inline(lambda: os.pwrite(self.fd, data, at))
        else:
            written = await in_thread(os.pwrite, self.fd, data, at)
        self._length = max(self._length, at + written)
        return written

    def fitting(self, offset: int, size: int) -> int:
        """Return how many of ``size`` bytes can be kept now without waiting.

        0 while the disk is slow: threads write then.
        """
        if not self._mount.inline:
            return 0
        if self.ring_bytes:
            size = min(size, self.ring_bytes - (offset - self.start) % self.ring_bytes)
        return size

    def keep(self, offset: int, size: int, move: Callable[[int, int, int], int]) -> int:
        """Move bytes into the file; return their number.

        Args:
            offset: in the output.
            size: at most ``fitting``.
            move: takes (descriptor, size, offset in the file).

        Raises:
            OSError: the file refused, or there were no bytes.
        """
        at = offset - self.start
        if self.ring_bytes:
            at %= self.ring_bytes
        written = self._inline(lambda: move(self.fd, size, at))
        self._length = max(self._length, at + written)
        return written

    def _inline(self, write: Callable[[], int]) -> int:
        """Write in this thread, and record its duration."""
        slept, begun_s = count_sleeps(), time.monotonic()
        written = write()
        self._mount.note(time.monotonic() - begun_s, slept)
        return written

    async def read(self, offset: int, size: int) -> bytes:
        """See ``LogStore``."""
        at = offset - self.start
        if self.ring_bytes:
            at %= self.ring_bytes
            size = min(size, self.ring_bytes - at)
        try:
            return bytes(self._mount.read(self.fd, size, at))
        except BlockingIOError:
            return await in_thread(os.pread, self.fd, size, at)

    def oldest(self, end: int) -> int:
        """See ``LogStore``."""
        return max(self.start, end - self.ring_bytes) if self.ring_bytes else self.start

    def snapshot(self) -> StoreState:
        """See ``LogStore``."""
        return StoreState(
            "file",
            self.start,
            fd=self.fd,
            charged=self._charged,
            ring_bytes=self.ring_bytes,
            length=self._length,
            allowed=self._allowed,
        )

    def restore(self, state: StoreState) -> None:
        """Restore the progress of the program before."""
        self.ring_bytes = state.ring_bytes
        self._length, self._allowed = state.length, state.allowed

    def close(self) -> None:
        """See ``LogStore``."""
        self._quota.give_file(self.fd, self._charged)


class Note:
    """The host's note, in memory."""

    def __init__(self, start: int, text: bytes) -> None:
        self.start = start
        self._text = text

    def room(self, low: int, end: int) -> int:
        """See ``LogStore``."""
        return 0

    async def write(self, offset: int, data: memoryview) -> int:
        """See ``LogStore``."""
        raise NotImplementedError("nothing follows the last word")

    def whole(self) -> bytes:
        """Return all of it."""
        return self._text

    async def read(self, offset: int, size: int) -> bytes:
        """See ``LogStore``."""
        at = offset - self.start
        return self._text[at : at + size]

    def oldest(self, end: int) -> int:
        """See ``LogStore``."""
        return self.start

    def snapshot(self) -> StoreState:
        """See ``LogStore``."""
        return StoreState("note", self.start, self._text)

    def close(self) -> None:
        """See ``LogStore``."""
        self._text = b""


def restore_store(state: StoreState, limit_bytes: int, quota: LogQuota) -> LogStore:
    """Return a handed-over part of a log.

    Raises:
        HandoverError: this program knows no such part.
    """
    match state.kind:
        case "head":
            return LogHead(state.data)
        case "window":
            return Window(state.start, state.data)
        case "note":
            return Note(state.start, state.data)
        case "file":
            charged = (state.fd, state.charged)
            file = File(state.start, charged, limit_bytes, quota)
            file.restore(state)
            return file
        case _:
            raise HandoverError(f"a log has a part of an unknown kind, {state.kind!r}")
