r"""What an execution prints: kept by offset, up to a limit, for any number of readers.

    tool -> pipe -> pump -> log: head (memory) | file (disk) | window (memory)
                              \-> the live reader, from the pump's own buffer

Rules of this file.

1. No byte is dropped that an attached reader has not taken.  Up to the limit readers are
   independent; beyond it the oldest bytes make room, and the slowest attached reader
   slows the tool.
2. The first ``HEAD_BYTES`` stay in memory, for most tools print less.  What follows goes
   to a file without a name, which becomes a ring when it may not grow: at the limit, at
   the child's quota, on a full disk.  Without a file there is a window in memory.
3. Bytes are copied to and from the file, never spliced: a page that waits in a socket
   must not change when the ring comes round.
4. One reader that has taken everything is *live*: the pump hands it each piece from its
   own buffer, and waits ``LIVE_PATIENCE_S`` for it at most.  Measured: 1.5 GB/s so, 1.0
   by way of the file (ADR 25).

Cancellation of ``append`` and of readers loses nothing that was kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from typing import TYPE_CHECKING, Protocol

import trio

from vfs.hostio import in_thread, mount_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD_BYTES = 65_536
"""Kept in memory of every execution; what a pipe holds by default."""

PIECE_BYTES = 131_072
"""Most that is read, written or sent at once."""

QUOTA_STEP_BYTES = 1024 * 1024
"""How much of a child's quota a growing file takes at a time."""

LEAST_FILE_BYTES = 8 * 1024 * 1024
"""What a file may grow to although the child's quota is used up: with less, a tool and
its reader would wait for each other all the time."""

WINDOW_BYTES = 1024 * 1024
"""The window in memory, where no file can be had."""

LIVE_PATIENCE_S = 0.005
"""How long the pump waits for the live reader: several times what a program on the
other core takes for a piece, and too short to be felt by the tool's other readers."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LogFullError(Exception):
    """Output that must be kept whole does not fit; the text says why."""


class Quota:
    """What the logs of one child may occupy on the disk, and the files for that.

    A file that is no longer needed becomes the spare one: it is written again from its
    beginning, which is up to ten times as quick as to have pages allocated anew.  It
    never changes hands between children.

    Args:
        limit_bytes: all of them together.
        make_room: gives a finished execution's log up; tells whether there was one.
        close: closes a descriptor, somewhere where that may take its time.
    """

    def __init__(
        self,
        limit_bytes: int,
        make_room: Callable[[], bool],
        close: Callable[[int], None] = os.close,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._make_room = make_room
        self._close = close
        self._spare: tuple[int, int] | None = None

    def take(self, size_bytes: int) -> bool:
        """Take a share; False if there is none."""
        while self.used_bytes + size_bytes > self.limit_bytes:
            if not (self.drop_spare() or self._make_room()):
                return False
        self.used_bytes += size_bytes
        return True

    def open_file(self, directory: str) -> tuple[int, int]:
        """Return a file without a name, and the share that has been taken for it.

        Raises:
            OSError: it cannot be made.
        """
        spare, self._spare = self._spare, None
        return spare or (open_unnamed(directory), 0)

    def give_file(self, fd: int, share_bytes: int) -> None:
        """Give a file back with its share."""
        if share_bytes <= LEAST_FILE_BYTES:
            os.close(fd)
            self.used_bytes -= share_bytes
            return
        self.drop_spare()
        self._spare = fd, share_bytes

    def drop_spare(self) -> bool:
        """Close the spare file; tells whether there was one."""
        if self._spare is None:
            return False
        fd, share_bytes = self._spare
        self._spare = None
        self.used_bytes -= share_bytes
        self._close(fd)
        return True

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return (self._spare[0],) if self._spare is not None else ()


class Reader(Protocol):
    """Whoever follows a log.

    Attributes:
        offset: everything before it has been taken.
    """

    offset: int

    async def take(self, piece: memoryview) -> bool:
        """Take the next piece from memory; False if the log is to keep the rest.

        Only called while it is live, with what begins at ``offset``.
        """
        ...

    def wake(self) -> None:
        """Look at the log: called while it is live and the log is finished."""
        ...


class _Store(Protocol):
    """Where a part of a log is kept: everything from ``start`` on."""

    start: int

    def room(self, low: int, end: int) -> int: ...
    async def write(self, offset: int, data: memoryview) -> int: ...
    async def read(self, offset: int, size: int) -> bytes: ...
    def oldest(self, end: int) -> int: ...
    def close(self) -> None: ...


class _Head:
    """The beginning, in memory."""

    def __init__(self) -> None:
        self.start = 0
        self._data = bytearray()

    def room(self, low: int, end: int) -> int:
        return HEAD_BYTES - end

    async def write(self, offset: int, data: memoryview) -> int:
        self._data += data
        return len(data)

    async def read(self, offset: int, size: int) -> bytes:
        return bytes(memoryview(self._data)[offset : offset + size])

    def oldest(self, end: int) -> int:
        return 0

    def close(self) -> None:
        self._data = bytearray()


class _Window:
    """A ring in memory, where no file can be had."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._ring = bytearray(WINDOW_BYTES)

    def room(self, low: int, end: int) -> int:
        return WINDOW_BYTES - (end - max(low, self.start))

    async def write(self, offset: int, data: memoryview) -> int:
        at = (offset - self.start) % WINDOW_BYTES
        part = data[: WINDOW_BYTES - at]
        self._ring[at : at + len(part)] = part
        return len(part)

    async def read(self, offset: int, size: int) -> bytes:
        at = (offset - self.start) % WINDOW_BYTES
        return bytes(memoryview(self._ring)[at : min(at + size, WINDOW_BYTES)])

    def oldest(self, end: int) -> int:
        return max(self.start, end - WINDOW_BYTES)

    def close(self) -> None:
        self._ring = bytearray()


class _File:
    """A file without a name: it grows, and becomes a ring when it may not.

    Attributes:
        fd: the descriptor, owned.
        ring_bytes: its size as a ring; 0 while it grows.
    """

    def __init__(
        self, start: int, file: tuple[int, int], limit_bytes: int, quota: Quota
    ) -> None:
        self.start = start
        self.fd, self._charged = file
        self.ring_bytes = 0
        self._limit_bytes = limit_bytes
        self._least_bytes = min(limit_bytes, LEAST_FILE_BYTES)
        self._length = 0
        self._allowed = self._charged
        self._quota = quota
        self._mount = mount_of(os.fstat(self.fd).st_dev)

    def room(self, low: int, end: int) -> int:
        if self.ring_bytes:
            return self.ring_bytes - (end - max(low, self.start))
        if self._allowed <= self._length < self._limit_bytes:
            self._grow()
        return min(self._allowed, self._limit_bytes) - self._length

    def _grow(self) -> None:
        if self._quota.take(QUOTA_STEP_BYTES):
            self._charged += QUOTA_STEP_BYTES
            self._allowed += QUOTA_STEP_BYTES
        elif self._length < self._least_bytes:
            self._allowed = self._least_bytes

    def freeze(self) -> bool:
        """Become a ring; False if there is too little to be one, or it is one."""
        if self.ring_bytes or self._length < WINDOW_BYTES:
            return False
        self.ring_bytes = self._length
        return True

    async def write(self, offset: int, data: memoryview) -> int:
        at = offset - self.start
        if self.ring_bytes:
            at %= self.ring_bytes
            data = data[: self.ring_bytes - at]
        mount = self._mount
        if not mount.inline:
            mount.try_again()
        if mount.inline:
            begun_s = time.monotonic()
            written = os.pwrite(self.fd, data, at)
            mount.note(time.monotonic() - begun_s)
        else:
            written = await in_thread(os.pwrite, self.fd, data, at)
        self._length = max(self._length, at + written)
        return written

    async def read(self, offset: int, size: int) -> bytes:
        at = offset - self.start
        if self.ring_bytes:
            at %= self.ring_bytes
            size = min(size, self.ring_bytes - at)
        try:
            return self._mount.read(self.fd, size, at)
        except BlockingIOError:
            return await in_thread(os.pread, self.fd, size, at)

    def oldest(self, end: int) -> int:
        return max(self.start, end - self.ring_bytes) if self.ring_bytes else self.start

    def close(self) -> None:
        self._quota.give_file(self.fd, self._charged)


class OutputLog:
    """The output of one execution.

    Args:
        directory: where its file may be made.
        limit_bytes: most that is kept on the disk.
        quota: of the child.
        keep_all: it must be kept from its first byte (version 1).

    Attributes:
        start: offset of the oldest byte that is kept.
        end: offset after the newest.
        is_finished: nothing more will come.
        note_at: where the host's own last words begin; -1 if it has none.
    """

    def __init__(
        self, directory: str, limit_bytes: int, quota: Quota, *, keep_all: bool = False
    ) -> None:
        self.start = 0
        self.end = 0
        self.is_finished = False
        self.note_at = -1
        self.readers: set[Reader] = set()
        self.live: Reader | None = None
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._quota = quota
        self._keep_all = keep_all
        self._stores: list[_Store] = [_Head()]
        self._grown = trio.lowlevel.ParkingLot()
        self._space = trio.lowlevel.ParkingLot()
        self._users = 0
        self._is_discarded = False

    # The pump's side

    async def append(self, data: bytes | memoryview) -> None:
        """Keep bytes; waits until there is room for them (rule 1).

        Raises:
            LogFullError: it must be kept whole, and cannot be.
        """
        view = memoryview(data)
        while view:
            store = self._stores[-1]
            room = store.room(self._low(), self.end)
            if room <= 0:
                await self._make_room(store)
                continue
            try:
                written = await store.write(self.end, view[:room])
            except OSError as why:
                self._give_way(store, why)
                continue
            piece, view = view[:written], view[written:]
            self._took(store, written)
            await self._hand_on(piece)

    def finish(self, note: bytes = b"") -> None:
        """Say that nothing more will come; ``note`` is the host's own last word."""
        if note:
            self.note_at = self.end
            self._stores.append(_Note(self.end, note))
            self.end += len(note)
        self.is_finished = True
        self._grown.unpark_all()
        if self.live is not None:
            self.live.wake()

    def _took(self, store: _Store, written: int) -> None:
        self.end += written
        oldest = store.oldest(self.end)
        if oldest > store.start:
            self.start = max(self.start, oldest)
            for old in self._stores[:-1]:
                old.close()
            del self._stores[:-1]

    async def _hand_on(self, piece: memoryview) -> None:
        if self._grown:
            self._grown.unpark_all()
        live = self.live
        if live is not None and not await live.take(piece) and self.live is live:
            self.live = None

    async def _make_room(self, store: _Store) -> None:
        """Open the next store, or wait for the slowest reader."""
        if isinstance(store, _Head):
            self._open_file()
        elif isinstance(store, _File) and store.freeze():
            if self._keep_all:
                raise LogFullError("the output is longer than log_limit keeps")
        else:
            await self._space.park()

    def _open_file(self) -> None:
        try:
            file = self._quota.open_file(self._directory)
        except OSError as why:
            self._open_window(why)
        else:
            self._stores.append(_File(self.end, file, self._limit_bytes, self._quota))

    def _open_window(self, why: OSError) -> None:
        if self._keep_all:
            raise LogFullError(f"the output cannot be kept: {why.strerror}")
        self._stores.append(_Window(self.end))

    def _give_way(self, store: _Store, why: OSError) -> None:
        """Go on after a write that failed: as a ring on a full disk, else in memory."""
        goes_round = (
            not self._keep_all
            and why.errno in _FULL
            and isinstance(store, _File)
            and store.freeze()
        )
        if not goes_round:
            self._open_window(why)

    def _low(self) -> int:
        """Return the offset that the slowest attached reader has come to."""
        return min((self.end, *(reader.offset for reader in self.readers)))

    # The readers' side

    @contextlib.contextmanager
    def attached(self, reader: Reader) -> Iterator[None]:
        """Hold the output from a reader's offset on for as long as the block lasts."""
        self.readers.add(reader)
        self._users += 1
        try:
            yield
        finally:
            self.readers.discard(reader)
            if self.live is reader:
                self.live = None
            self.advanced()
            self._users -= 1
            if self._is_discarded and not self._users:
                self._close()

    def advanced(self) -> None:
        """Take note that a reader has taken something."""
        if self._space:
            self._space.unpark_all()

    async def wait_beyond(self, offset: int) -> None:
        """Wait until there is something at an offset, or nothing will ever be."""
        while self.end <= offset and not self.is_finished:
            await self._grown.park()

    async def read(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an offset between ``start`` and ``end``.

        Raises:
            OSError: the file cannot be read.
        """
        until = self.end
        for store in reversed(self._stores):
            if store.start <= offset:
                return await store.read(offset, min(size, until - offset))
            until = store.start
        raise OSError(errno.EIO, "output that is no longer kept was asked for")

    def discard(self) -> None:
        """Give everything back, once no reader is attached."""
        self._is_discarded = True
        if not self._users:
            self._close()

    def _close(self) -> None:
        while self._stores:
            self._stores.pop().close()

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return tuple(store.fd for store in self._stores if isinstance(store, _File))


class _Note:
    """The host's own last words, in memory."""

    def __init__(self, start: int, text: bytes) -> None:
        self.start = start
        self._text = text

    def room(self, low: int, end: int) -> int:
        return 0

    async def write(self, offset: int, data: memoryview) -> int:
        raise NotImplementedError("nothing follows the last word")

    async def read(self, offset: int, size: int) -> bytes:
        at = offset - self.start
        return self._text[at : at + size]

    def oldest(self, end: int) -> int:
        return self.start

    def close(self) -> None:
        self._text = b""


def open_unnamed(directory: str) -> int:
    """Open a file that has no name, or none any more.

    Raises:
        OSError: it cannot be made.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, os.O_TMPFILE | flags, 0o600)
    except OSError as why:
        # Not every file system has O_TMPFILE: open(2).
        if why.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT}:
            raise
    fd, name = tempfile.mkstemp(dir=directory)
    os.unlink(name)  # noqa: PTH108 - of what was made here
    return fd
