r"""The output of an execution: by offset, up to a limit, for any number of readers.

    tool -> pipe -> pump -> log: head (memory) | file (disk) | window (memory)
                        \-> the live reader, from the pump's buffer or the pipe

1. Bytes that an attached reader needs stay. Beyond the limit, the oldest bytes make
   room, and the slowest reader slows the tool.
2. ``HEAD_BYTES`` stay in memory; an unnamed file, or a ring, has the rest.
3. A *live* reader has taken all: the pump hands it each piece, and waits ``patience_s``.
   One that is behind reads the file; an only reader is waited for (ADR 25).
4. Pieces are spliced if there is a file. Cancellation loses nothing that was kept.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from hostlib.listener import ACCEPT_PAUSE_S, OUT_OF_RESOURCES
from supervisor.toolexec.output.stores import (
    File,
    LogHead,
    LogStore,
    Note,
    StoreState,
    Window,
    restore_store,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.toolexec.output.quota import LogQuota
    from supervisor.toolexec.output.splice import Tap


PIECE_BYTES = 131_072
"""Most bytes of one read, write or send."""

LIVE_PATIENCE_S = 0.005
"""Longest wait of the pump for the live reader: several times a program's time for a
piece on the other core, and too short to slow other readers."""

ALONE_PATIENCE_S = 0.02
"""The same for an only reader: some turns of others on a busy machine; later it would
have to read all that it missed from the file."""

CATCH_UP_BYTES = 8 * 1024 * 1024
"""Bytes that the only reader has to take before the pump waits for it again: a reader
slower than the tool should hold it up little."""

FILE_WAIT_S = 2.0
"""How long a tool whose output must be kept whole waits for a descriptor of the host:
others may give one back."""

_UNKNOWN = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of a file system that splice(2) cannot write to."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LogFullError(Exception):
    """Output that must be kept whole does not fit; the text has the reason."""


class LogState(msgspec.Struct):
    """The state of an ``OutputLog``; ``pending`` was read and not kept yet."""

    start: int
    end: int
    is_finished: bool
    note_at: int
    keep_all: bool
    is_discarded: bool
    stores: list[StoreState]
    pending: bytes = b""


class OutputLog:
    """The output of one execution.

    Args:
        directory: has its file.
        limit_bytes: most bytes on the disk.
        quota: of the child.
        keep_all: whether it must be kept from its first byte (version 1).

    Attributes:
        start: offset of the oldest kept byte.
        end: offset after the newest.
        is_finished: whether it is complete.
        note_at: offset of the host's note; -1 for none.
        readers: the attached ones.
        live: the live one (rule 3).
        pending: bytes that were read and are not kept yet.
    """

    def __init__(
        self,
        directory: str,
        limit_bytes: int,
        quota: LogQuota,
        *,
        keep_all: bool = False,
    ) -> None:
        self.start = 0
        self.end = 0
        self.is_finished = False
        self.note_at = -1
        self.readers: set[Follower] = set()
        self.live: Reader | None = None
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._quota = quota
        self._keep_all = keep_all
        self._stores: list[LogStore] = [LogHead()]
        self._grown = trio.lowlevel.ParkingLot()
        self._space = trio.lowlevel.ParkingLot()
        self._settled = trio.lowlevel.ParkingLot()
        self._users = 0
        self._is_discarded = False
        self.pending = memoryview(b"")
        self._waits_from = 0  # the offset of a reader that is waited for

    def snapshot(self) -> LogState:
        """Return its state for ``restore``."""
        return LogState(
            start=self.start,
            end=self.end,
            is_finished=self.is_finished,
            note_at=self.note_at,
            keep_all=self._keep_all,
            is_discarded=self._is_discarded,
            stores=[store.snapshot() for store in self._stores],
            pending=bytes(self.pending),
        )

    def restore(self, state: LogState) -> None:
        """Restore the log of the program before.

        Raises:
            HandoverError: this program knows no such log.
        """
        self.start, self.end, self.note_at = state.start, state.end, state.note_at
        self.is_finished, self._is_discarded = state.is_finished, state.is_discarded
        self._stores = [
            restore_store(store, self._limit_bytes, self._quota)
            for store in state.stores
        ]
        self.pending = memoryview(state.pending)

    # The pump's side

    async def append(self, data: bytes | memoryview) -> None:
        """Keep bytes; wait until there is room for them (rule 1).

        Raises:
            LogFullError: it must be kept whole, and does not fit.
        """
        view = self.pending = memoryview(data)
        while view:
            store = self._stores[-1]
            room = store.room(self._low(), self.end)
            if room <= 0:
                await self._make_room(store)
                continue
            try:
                written = await store.write(self.end, view[:room])
            except OSError as why:
                if not await self._has_made_room(why):
                    self._give_way(store, why)
                continue
            piece, view = view[:written], view[written:]
            self.pending = view
            self.end += written
            self._drop_old(store)
            if self._grown:
                self._grown.unpark_all()
            live = self.live
            if live is not None and not await live.take(piece):
                self._leave_behind(live)

    async def wait_for_reader(self) -> None:
        """Let the only reader become live, if it is about to.

        Once behind it would stay so: the log grows as fast as it is read. A reader that
        takes nothing is not waited for.
        """
        if self.live is not None or self._keep_all or len(self.readers) != 1:
            return
        (reader,) = self.readers
        if reader.offset < self._waits_from:
            return
        with trio.move_on_after(ALONE_PATIENCE_S):
            await self._settled.park()
        if self.live is None:
            self._waits_from = reader.offset + CATCH_UP_BYTES

    async def append_from(self, tap: Tap, size: int) -> int | None:
        """Keep bytes of a pipe, at most ``size``, without copying them here.

        Returns:
            Their number; 0 at the end of the pipe; None if they have to be copied.

        Raises:
            BlockingIOError: the pipe is empty.
        """
        store = self._stores[-1]
        if not isinstance(store, File) or not store.is_spliceable:
            return None
        size = store.fitting(self.end, min(size, store.room(self._low(), self.end)))
        if size <= 0:
            return None
        try:
            taken = tap.take(size)
        except BlockingIOError:
            raise
        except OSError as why:
            self._cannot_splice(store, why)
            return None
        if taken:
            await self._keep_and_hand_on(store, tap, taken, self.live)
        return taken

    async def _keep_and_hand_on(
        self, store: File, tap: Tap, size: int, live: Reader | None
    ) -> None:
        """Keep a piece that was taken; the live reader sends it from aside."""
        is_aside = live is not None and tap.set_aside(size, *live.frame(size))
        has_sent = False
        refusal: OSError | None = None
        try:
            self._keep(store, tap, size)
            if live is not None and is_aside:
                has_sent = await live.take_from(tap)
        except OSError as why:  # an error of the file: readers keep their own
            refusal = why
        finally:
            if live is not None and not has_sent:
                tap.empty_aside()
                self._leave_behind(live)
        if refusal is not None:
            rest = tap.rest()
            self._cannot_splice(store, refusal)
            await self.append(rest)

    def _keep(self, store: File, tap: Tap, size: int) -> None:
        while size:
            kept = store.keep(self.end, size, tap.keep)
            self.end += kept
            self._drop_old(store)
            size -= kept
        if self._grown:
            self._grown.unpark_all()

    def _leave_behind(self, live: Reader) -> None:
        """Let a live reader continue from the log."""
        live.wake()
        self._waits_from = live.offset + 1  # it was waited for
        if self.live is live:
            self.live = None

    def _cannot_splice(self, store: File, why: OSError) -> None:
        if why.errno in _UNKNOWN:
            store.is_spliceable = False
        elif not self._keep_all:  # else ``append`` handles it
            self._give_way(store, why)

    def finish(self, note: bytes = b"") -> None:
        """Mark the log as complete; ``note`` is the host's text behind it."""
        if note:
            self.note_at = self.end
            self._stores.append(Note(self.end, note))
            self.end += len(note)
        self.is_finished = True
        self._grown.unpark_all()
        if self.live is not None:
            self.live.wake()

    def _drop_old(self, store: LogStore) -> None:
        """Drop the stores before the newest, once that has dropped bytes of its own."""
        oldest = store.oldest(self.end)
        if oldest > store.start:
            self.start = max(self.start, oldest)
            for old in self._stores[:-1]:
                old.close()
            del self._stores[:-1]

    async def _make_room(self, store: LogStore) -> None:
        """Open the next store, or wait for the slowest reader."""
        if isinstance(store, LogHead):
            await self._open_file()
        elif isinstance(store, File) and store.freeze():
            if self._keep_all:
                raise LogFullError("the output is longer than log_limit keeps")
        else:
            await self._space.park()

    async def _open_file(self) -> None:
        """Open the file; a log that must be kept whole waits for a descriptor."""
        until_s = trio.current_time() + (FILE_WAIT_S if self._keep_all else 0.0)
        while True:
            try:
                file = self._quota.open_file(self._directory)
            except OSError as why:
                is_lacking = why.errno in OUT_OF_RESOURCES
                if not is_lacking or trio.current_time() >= until_s:
                    self._open_window(why)
                    return
            else:
                own = File(self.end, file, self._limit_bytes, self._quota)
                self._stores.append(own)
                return
            await trio.sleep(ACCEPT_PAUSE_S)

    def _open_window(self, why: OSError) -> None:
        if self._keep_all:
            raise LogFullError(f"the output cannot be kept: {why.strerror}")
        self._stores.append(Window(self.end))

    async def _has_made_room(self, why: OSError) -> bool:
        """Free unused files for an output that must be kept whole, on a full disk."""
        if not (self._keep_all and why.errno in _FULL and self._quota.give_up()):
            return False
        await trio.sleep(ACCEPT_PAUSE_S)  # a long file is freed in a thread
        return True

    def _give_way(self, store: LogStore, why: OSError) -> None:
        """Continue after a failed write: as a ring on a full disk, else in memory."""
        goes_round = (
            not self._keep_all
            and why.errno in _FULL
            and isinstance(store, File)
            and store.freeze()
        )
        if not goes_round:
            self._open_window(why)

    def _low(self) -> int:
        """Return the offset of the slowest attached reader."""
        return min((self.end, *(reader.offset for reader in self.readers)))

    # The readers' side

    @property
    def patience_s(self) -> float:
        """Longest wait for the live reader, seconds."""
        return LIVE_PATIENCE_S if len(self.readers) > 1 else ALONE_PATIENCE_S

    @contextlib.contextmanager
    def attached(self, reader: Follower) -> Iterator[None]:
        """Hold the output from a reader's offset on until the block ends."""
        self.readers.add(reader)
        self._users += 1
        try:
            yield
        finally:
            self.readers.discard(reader)
            if self.live is reader:
                self.live = None
            self.record_progress()
            self._settled.unpark_all()
            self._users -= 1
            if self._is_discarded and not self._users:
                self._close()

    @contextlib.contextmanager
    def handing_on_to(self, reader: Reader) -> Iterator[None]:
        """Make a reader that has taken all live, until it is too slow."""
        self.live = reader
        self._settled.unpark_all()
        try:
            yield
        finally:
            if self.live is reader:
                self.live = None

    def record_progress(self) -> None:
        """Record that a reader has taken bytes."""
        if self._space:
            self._space.unpark_all()

    async def wait_beyond(self, offset: int) -> None:
        """Wait until there is a byte at an offset, or the log is complete."""
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

    def in_memory(self) -> list[bytes] | None:
        """Return all of an output that is in memory, without the host's note.

        None if a part is on the disk.
        """
        kept = [one.whole() for one in self._stores if isinstance(one, LogHead | Note)]
        return kept if len(kept) == len(self._stores) else None

    def discard(self) -> None:
        """Free all, once no reader is attached."""
        self._is_discarded = True
        if not self._users:
            self._close()

    def _close(self) -> None:
        while self._stores:
            self._stores.pop().close()

    @property
    def has_idle_file(self) -> bool:
        """Whether discarding it frees a file at once."""
        return not self._users and bool(self.descriptors())

    def descriptors(self) -> tuple[int, ...]:
        """Return its descriptors of the host."""
        return tuple(store.fd for store in self._stores if isinstance(store, File))


# Followers of a log: the live one, and those that only hold it.


class Follower(Protocol):
    """Needs a log's bytes from an offset on.

    Attributes:
        offset: all bytes before it were taken.
    """

    offset: int


class Reader(Follower, Protocol):
    """A follower that sends a log, and may be live."""

    async def take(self, piece: memoryview) -> bool:
        """Take the next piece from memory; return False to leave the rest to the log.

        Called only while it is live, with the piece at ``offset``.
        """
        ...

    def frame(self, size: int) -> tuple[bytes, bytes]:
        """Begin the next piece of ``size`` bytes; return its prefix and suffix.

        Called only while it is live, with the piece at ``offset``.
        """
        ...

    async def take_from(self, tap: Tap) -> bool:
        """Take that piece from the pipe aside, or return False as ``take``."""
        ...

    def wake(self) -> None:
        """Look at the log: called while it is live and the log is finished."""
        ...


class LogHolder:
    """Holds a log from its beginning."""

    offset = 0
