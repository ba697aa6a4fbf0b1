"""Where the parts of a log are kept: in memory, in a file, in a ring of either.

Each store keeps everything from an offset of its own on, and says how much more it can
take; the log (``log``) decides which comes next.

Bytes are copied into the file by the kernel and out of it by the host: a page that waits
in a socket must not change when the ring comes round.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from hostlib.threads import count_sleeps, in_thread
from supervisor.toolexec.output.quota import LEAST_FILE_BYTES, STEP_BYTES
from vfs.errors import HandoverError
from vfs.mounts import mount_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.toolexec.output.quota import Quota

HEAD_BYTES = 65_536
"""Kept in memory of every execution; what a pipe holds by default."""

WINDOW_BYTES = 1024 * 1024
"""The window in memory, where no file can be had."""


class StoreState(msgspec.Struct):
    """A part of a log, handed over: a file by its descriptor, memory as it is.

    Attributes:
        data: what lies in memory, in the order of its place.
    """

    kind: str
    start: int
    data: bytes = b""
    fd: int = -1
    charged: int = 0
    ring_bytes: int = 0
    length: int = 0
    allowed: int = 0


class Store(Protocol):
    """Where a part of a log is kept: everything from ``start`` on."""

    start: int

    def room(self, low: int, end: int) -> int:
        """Return how many bytes it can take now.

        Args:
            low: offset that the slowest attached reader has come to.
            end: offset at which the next byte would be.
        """
        ...

    async def write(self, offset: int, data: memoryview) -> int:
        """Take bytes, no more than there is room for; return how many it took.

        Raises:
            OSError: the file refused.
        """
        ...

    async def read(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes that it keeps, at least one.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def oldest(self, end: int) -> int:
        """Return the offset of the oldest byte that it keeps when it ends at ``end``."""
        ...

    def snapshot(self) -> StoreState:
        """Return it as ``restore_store`` takes it."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Head:
    """The beginning, in memory."""

    def __init__(self, data: bytes = b"") -> None:
        self.start = 0
        self._data = bytearray(data)

    def room(self, low: int, end: int) -> int:
        """See ``Store``."""
        return HEAD_BYTES - end

    async def write(self, offset: int, data: memoryview) -> int:
        """See ``Store``."""
        self._data += data
        return len(data)

    def whole(self) -> bytes:
        """Return all that it keeps."""
        return bytes(self._data)

    async def read(self, offset: int, size: int) -> bytes:
        """See ``Store``."""
        return bytes(memoryview(self._data)[offset : offset + size])

    def oldest(self, end: int) -> int:
        """See ``Store``."""
        return 0

    def snapshot(self) -> StoreState:
        """See ``Store``."""
        return StoreState("head", self.start, bytes(self._data))

    def close(self) -> None:
        """See ``Store``."""
        self._data = bytearray()


class Window:
    """A ring in memory, where no file can be had."""

    def __init__(self, start: int, ring: bytes | None = None) -> None:
        self.start = start
        self._ring = bytearray(WINDOW_BYTES if ring is None else ring)

    def room(self, low: int, end: int) -> int:
        """See ``Store``."""
        return WINDOW_BYTES - (end - max(low, self.start))

    async def write(self, offset: int, data: memoryview) -> int:
        """See ``Store``."""
        at = (offset - self.start) % WINDOW_BYTES
        part = data[: WINDOW_BYTES - at]
        self._ring[at : at + len(part)] = part
        return len(part)

    async def read(self, offset: int, size: int) -> bytes:
        """See ``Store``."""
        at = (offset - self.start) % WINDOW_BYTES
        return bytes(memoryview(self._ring)[at : min(at + size, WINDOW_BYTES)])

    def oldest(self, end: int) -> int:
        """See ``Store``."""
        return max(self.start, end - WINDOW_BYTES)

    def snapshot(self) -> StoreState:
        """See ``Store``."""
        return StoreState("window", self.start, bytes(self._ring))

    def close(self) -> None:
        """See ``Store``."""
        self._ring = bytearray()


class File:
    """A file without a name: it grows, and becomes a ring when it may not.

    Attributes:
        fd: the descriptor, owned.
        ring_bytes: its size as a ring; 0 while it grows.
        is_spliceable: its file system takes what waits in a pipe, as far as is known.
    """

    def __init__(
        self, start: int, file: tuple[int, int], limit_bytes: int, quota: Quota
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
        """See ``Store``."""
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
        """Become a ring; False if there is too little to be one, or it is one."""
        if self.ring_bytes or self._length < WINDOW_BYTES:
            return False
        self.ring_bytes = self._length
        return True

    async def write(self, offset: int, data: memoryview) -> int:
        """See ``Store``."""
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
        """Return how much of ``size`` bytes can be kept at once, not to wait for it.

        Nothing while the disk is slow: that is for threads.
        """
        if not self._mount.inline:
            return 0
        if self.ring_bytes:
            size = min(size, self.ring_bytes - (offset - self.start) % self.ring_bytes)
        return size

    def keep(self, offset: int, size: int, move: Callable[[int, int, int], int]) -> int:
        """Have bytes moved into the file; return how many.

        Args:
            offset: in the output.
            size: no more than is ``fitting``.
            move: takes (descriptor, size, offset in the file).

        Raises:
            OSError: the file refused, or nothing was there.
        """
        at = offset - self.start
        if self.ring_bytes:
            at %= self.ring_bytes
        written = self._inline(lambda: move(self.fd, size, at))
        self._length = max(self._length, at + written)
        return written

    def _inline(self, write: Callable[[], int]) -> int:
        """Write in this thread, and have noted how long it took."""
        slept, begun_s = count_sleeps(), time.monotonic()
        written = write()
        self._mount.note(time.monotonic() - begun_s, slept)
        return written

    async def read(self, offset: int, size: int) -> bytes:
        """See ``Store``."""
        at = offset - self.start
        if self.ring_bytes:
            at %= self.ring_bytes
            size = min(size, self.ring_bytes - at)
        try:
            return self._mount.read(self.fd, size, at)
        except BlockingIOError:
            return await in_thread(os.pread, self.fd, size, at)

    def oldest(self, end: int) -> int:
        """See ``Store``."""
        return max(self.start, end - self.ring_bytes) if self.ring_bytes else self.start

    def snapshot(self) -> StoreState:
        """See ``Store``."""
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
        """Be as far as the file of the program before."""
        self.ring_bytes = state.ring_bytes
        self._length, self._allowed = state.length, state.allowed

    def close(self) -> None:
        """See ``Store``."""
        self._quota.give_file(self.fd, self._charged)


class Note:
    """The host's own last words, in memory."""

    def __init__(self, start: int, text: bytes) -> None:
        self.start = start
        self._text = text

    def room(self, low: int, end: int) -> int:
        """See ``Store``."""
        return 0

    async def write(self, offset: int, data: memoryview) -> int:
        """See ``Store``."""
        raise NotImplementedError("nothing follows the last word")

    def whole(self) -> bytes:
        """Return all of it."""
        return self._text

    async def read(self, offset: int, size: int) -> bytes:
        """See ``Store``."""
        at = offset - self.start
        return self._text[at : at + size]

    def oldest(self, end: int) -> int:
        """See ``Store``."""
        return self.start

    def snapshot(self) -> StoreState:
        """See ``Store``."""
        return StoreState("note", self.start, self._text)

    def close(self) -> None:
        """See ``Store``."""
        self._text = b""


def restore_store(state: StoreState, limit_bytes: int, quota: Quota) -> Store:
    """Return the part of a log that was handed over.

    Raises:
        HandoverError: this program knows no such part.
    """
    match state.kind:
        case "head":
            return Head(state.data)
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
