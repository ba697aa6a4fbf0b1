"""Replies that the client has not taken yet, and files that are sent uncopied.

Rules of this file.

1. A reply is taken within the deadline, or its session ends (spec F8).
2. Nothing is sent once the session ends: a missing reply before would make this one
   look like it (spec T3).
3. ``sendfile`` lends the pages of a file: they are taken before the same client changes
   a file (``wait_taken``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from hostlib.readiness import wait_writable
from hostlib.threads import in_thread
from protocol import error
from supervisor.fsproxy.pump import POLLS
from supervisor.fsproxy.replies import reason
from supervisor.fsproxy.session_state import OutboundState
from supervisor.fsproxy.transport import PIECE_BYTES, FileTransfer, bytes_unread, deepen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from supervisor.fsproxy.pump import Pump
    from vfs.clients import OpenFile
    from vfs.ledger import Ledger

Job = Callable[[], Awaitable[bytes | None]]
"""Slow work of one request; it returns the reply."""

_write = os.write
yield_core = os.sched_yield


class Outbound:
    """Replies and files that are being sent to a client.

    Args:
        pump: counts the large files that wait for the loop.
        write_fd: gets the replies; non-blocking, borrowed.
        deadline_s: for a reply to be taken (spec F8).
        ledger: the client's, whose threads load data from the disk.
        top: the ledger of its topmost child (spec S7).

    Attributes:
        bytes_out: sent to the client.
        unsent: the rest of a reply that waits; None if none does.
        transfer: the READ that is sent in turns; None if there is none.
        redo: returns the bytes of a waiting request without effects so far.
        carried: (descriptor, reply) of an ATTACH that the client has not taken.
        zero_copy: whether a READ has lent pages of a file.
        is_deep: whether the descriptor holds a whole large reply.
        is_stopped: whether rule 2 applies.
    """

    __slots__ = (
        "_deadline_s",
        "_ledger",
        "_pump",
        "_top",
        "_waiting",
        "_write_fd",
        "bytes_out",
        "carried",
        "is_deep",
        "is_stopped",
        "redo",
        "transfer",
        "unsent",
        "zero_copy",
    )

    def __init__(
        self,
        pump: Pump,
        write_fd: int,
        deadline_s: float,
        ledger: Ledger,
        top: Ledger,
    ) -> None:
        self._pump = pump
        self._write_fd = write_fd
        self._deadline_s = deadline_s
        self._ledger = ledger
        self._top = top
        self._waiting: trio.CancelScope | None = None
        self.bytes_out = 0
        self.unsent: memoryview | None = None
        self.transfer: FileTransfer | None = None
        self.redo: Callable[[], bytes] | None = None
        self.carried: tuple[int, bytes] | None = None
        self.zero_copy = False
        self.is_deep = False
        self.is_stopped = False

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for the client to take bytes."""
        return self._waiting is not None

    @property
    def can_continue(self) -> bool:
        """Whether the next program can wait for the client in place of this one."""
        waits = (self.unsent, self.transfer, self.redo, self.carried)
        return any(wait is not None for wait in waits)

    def snapshot(self) -> OutboundState:
        """Return what is on its way, without ``redo``, for the next program."""
        return OutboundState(
            zero_copy=self.zero_copy,
            is_deep=self.is_deep,
            bytes_out=self.bytes_out,
            unsent=b"" if self.unsent is None else bytes(self.unsent),
            transfer=None if self.transfer is None else self.transfer.snapshot(),
            carried=self.carried,
        )

    def restore(
        self, state: OutboundState, files: Mapping[int, OpenFile]
    ) -> Job | None:
        """Restore what was on its way, but for ``carried``, which its owner sends.

        Args:
            state: of the program before.
            files: of the client.

        Returns:
            The call that sends the rest; None if there is none.
        """
        self.zero_copy = state.zero_copy
        self.is_deep = state.is_deep
        self.bytes_out = state.bytes_out
        if state.unsent:
            return partial(self.send, state.unsent)
        if state.transfer is not None:
            file = files[state.transfer.fileno]
            transfer = FileTransfer(self._write_fd, file, state.transfer)
            return partial(self.send_file, transfer)
        return None

    def stop(self) -> None:
        """Send nothing more, and end the waits for the client."""
        self.is_stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Bound a wait for the client (spec F8).

        Raises:
            TooSlowError: the deadline has passed, or the client is gone and only a
                process that shares its descriptor is left.
        """
        with trio.fail_after(self._deadline_s) as scope:
            self._waiting = scope
            if self.is_stopped:
                scope.cancel()
            try:
                yield
            finally:
                self._waiting = None

    async def send(self, reply: bytes | memoryview) -> None:
        """Send a reply that did not fit at once, within the deadline (spec F8)."""
        if self.is_stopped:
            return  # rule 2
        self.unsent = memoryview(reply)
        try:
            with self.patience():
                while self.unsent:
                    try:
                        sent = _write(self._write_fd, self.unsent)
                        self.bytes_out += sent
                        self.unsent = self.unsent[sent:]
                    except BlockingIOError:
                        await wait_writable(self._write_fd)
        finally:
            self.unsent = None

    def send_last(self, reply: bytes) -> None:
        """Send as much of a session's last reply as the descriptor takes."""
        if not self.is_stopped:
            with contextlib.suppress(OSError):
                _write(self._write_fd, reply)

    def begin_file(self, file: OpenFile, size: int) -> Job | None:
        """Answer a READ of ``size`` bytes that the file has, without copying them.

        Returns:
            The call that sends the rest of them; None if all are sent.

        Raises:
            OSError: the client is gone.
        """
        transfer = FileTransfer.begin(self._write_fd, file, size)
        if self.is_stopped:
            return None  # rule 2; the READ has moved the offset
        self.bytes_out += transfer.left  # a client that ends may take less
        self.zero_copy = True
        if not self.is_deep:
            self.is_deep = True
            deepen(self._write_fd)
        if not transfer.is_in_memory():
            return partial(self._load_and_send, transfer)
        if size > PIECE_BYTES:  # of one turn
            return partial(self.send_file, transfer)
        misses = 0
        while not transfer.is_done:
            if transfer.push():
                misses = 0
            elif misses == POLLS:
                return partial(self.send_file, transfer)
            else:
                misses += 1
                yield_core()
        return None

    async def _load_and_send(self, transfer: FileTransfer) -> bytes | None:
        try:
            await in_thread(transfer.load, share=self._ledger.threads)
        except OSError as why:
            transfer.give_up()
            return error(b"failed to read: " + reason(why))
        await self.send_file(transfer)
        return None

    async def send_file(self, transfer: FileTransfer) -> None:
        """Send the rest of a READ, by turns, within the deadline (spec F8)."""
        self.transfer = transfer
        try:
            with self.patience():
                while not transfer.is_done:
                    if not await self._send_piece(transfer):
                        await wait_writable(self._write_fd)
        finally:
            self.transfer = None

    async def _send_piece(self, transfer: FileTransfer) -> bool:
        """Send a piece when it is this child's turn; return whether any byte was sent."""
        self._pump.sending += 1
        try:
            # The next turn of the loop at the earliest.
            async with self._top.sends:
                return transfer.push()
        finally:
            self._pump.sending -= 1

    async def wait_taken(self, redo: Callable[[], bytes]) -> None:
        """Wait until the client has taken the pages that READs have lent it.

        Args:
            redo: returns the bytes of the request that waits, payload included.
        """
        self.redo = redo
        try:
            with trio.fail_after(self._deadline_s):
                while (  # noqa: ASYNC110 - no event tells that a socket's queue is empty
                    self.zero_copy
                    and not self.is_stopped
                    and bytes_unread(self._write_fd)
                ):
                    # Few clients send a WRITE before they read a reply.
                    await trio.sleep(0.001)
            self.zero_copy = False
        finally:
            self.redo = None
