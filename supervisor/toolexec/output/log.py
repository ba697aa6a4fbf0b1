r"""The output of an execution: by offset, up to a limit, for any number of readers.

    tool -> pipe -> pump -> log: head (memory) | file (disk) | window (memory)
                              \-> the live reader, from the pump's buffer or the pipe

Rules of this file.

1. No byte is dropped that an attached reader has not taken.  Up to the limit readers are
   independent; beyond it the oldest bytes make room, and the slowest attached reader
   slows the tool.
2. The first ``HEAD_BYTES`` stay in memory, for most tools print less. The rest goes to
   a file without a name, which becomes a ring when it may not grow: at the limit, at
   the child's quota, on a full disk. Without a file there is a window in memory.
3. One reader that has taken everything is *live*: the pump hands it each piece, and
   waits ``patience_s`` for it at most.  Measured: 1.5 GB/s so, 1.0 by way of the
   file (ADR 25).
4. One that is behind is read from the file, which is slower than the tool, so it would
   stay behind: while it takes what it is sent, the pump waits for the only one now and
   then, likewise (ADR 25).
5. Where there is a file, pieces go from the pipe to it and to the live reader without
   being copied by the host (``splice``, ADR 25).

Cancellation of ``append`` and of readers loses nothing that was kept.
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
    Head,
    Note,
    Store,
    StoreState,
    Window,
    restore_store,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.toolexec.output.quota import Quota
    from supervisor.toolexec.output.splice import Tap


PIECE_BYTES = 131_072
"""Most that is read, written or sent at once."""

LIVE_PATIENCE_S = 0.005
"""How long the pump waits for the live reader: several times what a program on the
other core takes for a piece, and too short to be felt by the tool's other readers."""

ALONE_PATIENCE_S = 0.02
"""Likewise where it is the only reader: some turns of others on a machine that is busy,
after which it would have to read the whole of what it missed from the file."""

CATCH_UP_BYTES = 8 * 1024 * 1024
"""Bytes that the only reader has to take before the pump waits again for it to become
live: it may be slower than the tool, and then the tool should feel little of it."""

FILE_WAIT_S = 2.0
"""How long a tool whose output must be kept whole waits for the host to have a descriptor
for it: others may have taken the last, and give it back."""

_UNKNOWN = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Answers of a file system that cannot be spliced to."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LogFullError(Exception):
    """Output that must be kept whole does not fit; the text says why."""


class LogState(msgspec.Struct):
    """See ``OutputLog``; ``pending`` was read from the pipe and is not kept yet."""

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
        self._stores: list[Store] = [Head()]
        self._grown = trio.lowlevel.ParkingLot()
        self._space = trio.lowlevel.ParkingLot()
        self._settled = trio.lowlevel.ParkingLot()
        self._users = 0
        self._is_discarded = False
        self._pending = memoryview(b"")
        self._waits_from = 0  # the offset of a reader that is waited for

    def snapshot(self) -> LogState:
        """Return it as ``restore`` takes it."""
        return LogState(
            start=self.start,
            end=self.end,
            is_finished=self.is_finished,
            note_at=self.note_at,
            keep_all=self._keep_all,
            is_discarded=self._is_discarded,
            stores=[store.snapshot() for store in self._stores],
            pending=bytes(self._pending),
        )

    def restore(self, state: LogState) -> None:
        """Be the log of the program before.

        Raises:
            HandoverError: this program knows no such log.
        """
        self.start, self.end, self.note_at = state.start, state.end, state.note_at
        self.is_finished, self._is_discarded = state.is_finished, state.is_discarded
        self._stores = [
            restore_store(store, self._limit_bytes, self._quota)
            for store in state.stores
        ]
        self._pending = memoryview(state.pending)

    # The pump's side

    async def append(self, data: bytes | memoryview) -> None:
        """Keep bytes; waits until there is room for them (rule 1).

        Raises:
            LogFullError: it must be kept whole, and cannot be.
        """
        view = self._pending = memoryview(data)
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
            self._pending = view
            self._took(store, written)
            await self._hand_on(piece)

    async def wait_for_reader(self) -> None:
        """Let the only reader become live, if it is on its way to that.

        Once behind it would stay so: the log grows as fast as it is read.  One that takes
        nothing is not waited for.
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
        """Keep what waits in a pipe, up to ``size`` bytes, without copying it here.

        Returns:
            How much it was; 0 at the end of the pipe; None if it has to be copied.

        Raises:
            BlockingIOError: nothing waits there.
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
        """Keep a piece that was taken; the live reader has it from aside."""
        is_aside = live is not None and tap.set_aside(size, *live.frame(size))
        has_sent = False
        refusal: OSError | None = None
        try:
            self._keep(store, tap, size)
            if live is not None and is_aside:
                has_sent = await live.take_from(tap)
        except OSError as why:  # the file's: a reader keeps its own to itself
            refusal = why
        finally:
            if live is not None and not has_sent:
                tap.forget_aside()
                self._leave_behind(live)
        if refusal is not None:
            rest = tap.rest()
            self._cannot_splice(store, refusal)
            await self.append(rest)

    def _keep(self, store: File, tap: Tap, size: int) -> None:
        while size:
            kept = store.keep(self.end, size, tap.keep)
            self._took(store, kept)
            size -= kept
        if self._grown:
            self._grown.unpark_all()

    def _leave_behind(self, live: Reader) -> None:
        """Let a reader that was live go on by itself."""
        live.wake()
        self._waits_from = live.offset + 1  # it has been waited for
        if self.live is live:
            self.live = None

    def _cannot_splice(self, store: File, why: OSError) -> None:
        if why.errno in _UNKNOWN:
            store.is_spliceable = False
        elif not self._keep_all:  # else ``append`` sees to it
            self._give_way(store, why)

    async def append_pending(self) -> None:
        """Keep what the program before had read and not kept yet."""
        if self._pending:
            await self.append(self._pending)

    def finish(self, note: bytes = b"") -> None:
        """Say that nothing more will come; ``note`` is the host's own last word."""
        if note:
            self.note_at = self.end
            self._stores.append(Note(self.end, note))
            self.end += len(note)
        self.is_finished = True
        self._grown.unpark_all()
        if self.live is not None:
            self.live.wake()

    def _took(self, store: Store, written: int) -> None:
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
        if live is not None and not await live.take(piece):
            self._leave_behind(live)

    async def _make_room(self, store: Store) -> None:
        """Open the next store, or wait for the slowest reader."""
        if isinstance(store, Head):
            await self._open_file()
        elif isinstance(store, File) and store.freeze():
            if self._keep_all:
                raise LogFullError("the output is longer than log_limit keeps")
        else:
            await self._space.park()

    async def _open_file(self) -> None:
        """Open the file; what must be kept whole waits for a descriptor."""
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
        """Give up what nobody uses for an output that must be kept whole, on a full disk."""
        if not (self._keep_all and why.errno in _FULL and self._quota.give_up()):
            return False
        await trio.sleep(ACCEPT_PAUSE_S)  # a long file is freed in a thread
        return True

    def _give_way(self, store: Store, why: OSError) -> None:
        """Go on after a write that failed: as a ring on a full disk, else in memory."""
        goes_round = (
            not self._keep_all
            and why.errno in _FULL
            and isinstance(store, File)
            and store.freeze()
        )
        if not goes_round:
            self._open_window(why)

    def _low(self) -> int:
        """Return the offset that the slowest attached reader has come to."""
        return min((self.end, *(reader.offset for reader in self.readers)))

    # The readers' side

    @property
    def patience_s(self) -> float:
        """How long the live reader is waited for, seconds."""
        return LIVE_PATIENCE_S if len(self.readers) > 1 else ALONE_PATIENCE_S

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
            self._settled.unpark_all()
            self._users -= 1
            if self._is_discarded and not self._users:
                self._close()

    @contextlib.contextmanager
    def handing_on_to(self, reader: Reader) -> Iterator[None]:
        """Have a reader that has taken everything live, until it is slower than that."""
        self.live = reader
        self._settled.unpark_all()
        try:
            yield
        finally:
            if self.live is reader:
                self.live = None

    def advanced(self) -> None:
        """Record that a reader has taken something."""
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

    def in_memory(self) -> list[bytes] | None:
        """Return all of an output that never left memory, the host's last word apart.

        None if some of it has.
        """
        kept = [one.whole() for one in self._stores if isinstance(one, Head | Note)]
        return kept if len(kept) == len(self._stores) else None

    def discard(self) -> None:
        """Give everything back, once no reader is attached."""
        self._is_discarded = True
        if not self._users:
            self._close()

    def _close(self) -> None:
        while self._stores:
            self._stores.pop().close()

    @property
    def has_idle_file(self) -> bool:
        """Whether a file comes back at once if it is discarded."""
        return not self._users and bool(self.descriptors())

    def descriptors(self) -> tuple[int, ...]:
        """Return what this holds of the host's descriptors."""
        return tuple(store.fd for store in self._stores if isinstance(store, File))


# Followers of a log (``log``): the one that it hands pieces to, and those that only
# hold it.


class Reader(Protocol):
    """A follower of a log.

    Attributes:
        offset: everything before it has been taken.
    """

    offset: int

    async def take(self, piece: memoryview) -> bool:
        """Take the next piece from memory; False if the log is to keep the rest.

        Only called while it is live, with what begins at ``offset``.
        """
        ...

    def frame(self, size: int) -> tuple[bytes, bytes]:
        """Begin the next piece of ``size`` bytes; return what goes before and after it.

        Only called while it is live, with what begins at ``offset``.
        """
        ...

    async def take_from(self, tap: Tap) -> bool:
        """Take that piece from where it was put aside, or False as ``take``."""
        ...

    def wake(self) -> None:
        """Look at the log: called while it is live and the log is finished."""
        ...


class Holder:
    """Holds a log from its beginning; it is never live."""

    offset = 0

    async def take(self, piece: memoryview) -> bool:
        """See ``Reader``."""
        return False

    def frame(self, size: int) -> tuple[bytes, bytes]:
        """See ``Reader``."""
        return b"", b""

    async def take_from(self, tap: Tap) -> bool:
        """See ``Reader``."""
        return False

    def wake(self) -> None:
        """See ``Reader``."""
