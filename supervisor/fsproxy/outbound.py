"""Replies that the client did not take at once, and files that leave uncopied.

Rules of this file.

1. A reply is taken within the deadline, or its session ends (spec F8).
2. Nothing is sent once the session ends: replies before may be missing, and this one
   would be taken for one of them (spec T3).
3. ``sendfile`` lends the pages of a file: what was lent is taken before the same client
   changes a file (``wait_taken``).
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
from supervisor.fsproxy.transport import FileTransfer, bytes_unread, deepen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.fsproxy.pump import Pump
    from vfs.clients import OpenFile
    from vfs.policy import Ledger

TURN_BYTES = 1024 * 1024
"""The piece of a file that is sent before the others get their turn, 0.2 ms; a READ
that has more goes out by turns."""

Job = Callable[[], Awaitable[bytes | None]]
"""Slow work of one request; what it returns is the reply."""

_write = os.write
_yield_core = os.sched_yield


class Outbound:
    """Replies and files on their way to a client.

    Args:
        pump: counts the large files that wait for the loop.
        write_fd: replies go here; non-blocking, borrowed.
        deadline_s: for a reply to be taken (spec F8).
        ledger: the client's, whose threads load what is on disk.
        top: the ledger of its topmost child, which stands for that (spec S7).

    Attributes:
        bytes_out: sent to the client.
        unsent: of a reply, what the client has not taken; None while none waits.
        transfer: the READ that goes out by turns; None while none does.
        redo: makes the bytes of a request that waits and has done nothing yet.
        carried: (descriptor, reply) of an ATTACH that the client has not taken.
        zero_copy: a READ has lent pages of a file.
        is_deep: the descriptor holds a whole large reply.
        is_stopped: rule 2.
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
        """Whether it waits for the client to take something."""
        return self._waiting is not None

    def stop(self) -> None:
        """Send nothing more, and end what waits for the client."""
        self.is_stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Bound a wait for the client to take something (spec F8).

        Raises:
            TooSlowError: the deadline has passed, or the client is gone: nobody waits
                for a process that shares its descriptor.
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
        """Send as much of a session's last reply as fits."""
        if not self.is_stopped:
            with contextlib.suppress(OSError):
                _write(self._write_fd, reply)

    def begin_file(self, file: OpenFile, size: int) -> Job | None:
        """Answer a READ of ``size`` bytes that the file has, without copying them.

        Returns:
            The call that sends the rest of them; None: all are sent.

        Raises:
            OSError: the client is gone.
        """
        transfer = FileTransfer.begin(self._write_fd, file, size)
        if self.is_stopped:
            return None  # rule 2; the offset is where the READ has led it
        self.bytes_out += transfer.left  # of which a client that ends may take less
        self.zero_copy = True
        if not self.is_deep:
            self.is_deep = True
            deepen(self._write_fd)
        if not transfer.is_in_memory():
            return partial(self._load_and_send, transfer)
        if size > TURN_BYTES:
            return partial(self.send_file, transfer)
        misses = 0
        while not transfer.is_done:
            if transfer.push():
                misses = 0
            elif misses == POLLS:
                return partial(self.send_file, transfer)
            else:
                misses += 1
                _yield_core()
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
        """Send what is left of a READ, by turns, within the deadline (spec F8)."""
        self.transfer = transfer
        try:
            with self.patience():
                while not transfer.is_done:
                    if not await self._send_piece(transfer):
                        await wait_writable(self._write_fd)
        finally:
            self.transfer = None

    async def _send_piece(self, transfer: FileTransfer) -> bool:
        """Send what fits when it is this child's turn; tell whether anything did."""
        self._pump.sending += 1
        try:
            # Which waits for the loop's next turn at least.
            async with self._top.sends:
                return transfer.push()
        finally:
            self._pump.sending -= 1

    async def wait_taken(self, redo: Callable[[], bytes]) -> None:
        """Wait until the client has taken the bytes of files that READs lent it.

        Args:
            redo: makes the bytes of the request that waits for this, payload included.
        """
        self.redo = redo
        try:
            with trio.fail_after(self._deadline_s):
                while (  # noqa: ASYNC110 - no event tells that a socket's queue is empty
                    self.zero_copy
                    and not self.is_stopped
                    and bytes_unread(self._write_fd)
                ):
                    # Clients that send a WRITE before they read a reply are rare enough.
                    await trio.sleep(0.001)
            self.zero_copy = False
        finally:
            self.redo = None
