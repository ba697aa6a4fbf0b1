"""Replies that the client did not take at once, and files that leave uncopied.

Rules of this file.

1. A reply is taken within the deadline, or its session ends (spec F8).
2. Nothing is sent once the session ends: replies before may be missing, and this one
   would be taken for one of them (spec T3).
3. ``sendfile`` lends the pages of a file: what was lent is taken before the same client
   changes a file (``wait_taken``).
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import trio

from protocol import error
from supervisor.session.received import Receiving
from supervisor.session.replies import reason
from supervisor.session.transport import FileTransfer, bytes_unread, deepen
from supervisor.watches import wait_writable
from vfs.hostio import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfs.openfile import OpenFile

POLLS = 2
"""Times that the core is yielded and polled after a reply before the pump parks."""

TURN_BYTES = 1024 * 1024
"""What of a file is sent before the others get their turn, 0.2 ms; a READ that has more
goes out by turns."""

_write = os.write
_yield_core = os.sched_yield


class Sending(Receiving):
    """The part of a session that sends what takes its time."""

    __slots__ = ()

    async def send(self, reply: bytes | memoryview) -> None:
        """Send a reply that did not fit at once, within the deadline (spec F8)."""
        if self._stop:
            return  # rule 2
        self.unsent = memoryview(reply)
        try:
            with self.patience():
                while self.unsent:
                    try:
                        sent = _write(self.write_fd, self.unsent)
                        self.bytes_out += sent
                        self.unsent = self.unsent[sent:]
                    except BlockingIOError:
                        await wait_writable(self.write_fd)
        finally:
            self.unsent = None

    def send_file(self, file: OpenFile, size: int) -> bytes | None:
        """Answer a READ of ``size`` bytes that the file has, without copying them."""
        transfer = FileTransfer(self.write_fd, file, size)
        if self._stop:
            return b""  # rule 2; the offset is where the READ has led it
        self.bytes_out += transfer.left  # of which a client that ends may take less
        self.zero_copy = True
        if not self._is_deep:
            self._is_deep = True
            deepen(self.write_fd)
        if not transfer.is_in_memory():
            self.start(partial(self._send_file_waiting, transfer))
            return None
        if size > TURN_BYTES:
            self.start(partial(self._send_file, transfer))
            return None
        misses = 0
        while not transfer.is_done:
            if transfer.push():
                misses = 0
            elif misses == POLLS:
                self.start(partial(self._send_file, transfer))
                return None
            else:
                misses += 1
                _yield_core()
        return b""

    async def _send_file_waiting(self, transfer: FileTransfer) -> bytes | None:
        try:
            await in_thread(transfer.load, share=self.client.ledger.threads)
        except OSError as why:
            transfer.give_up()
            return error(b"failed to read: " + reason(why))
        await self._send_file(transfer)
        return None

    async def _send_file(self, transfer: FileTransfer) -> None:
        self.transfer = transfer
        try:
            with self.patience():
                while not transfer.is_done:
                    if not await self._send_piece(transfer):
                        await wait_writable(self.write_fd)
        finally:
            self.transfer = None

    async def _send_piece(self, transfer: FileTransfer) -> bool:
        """Send what fits when it is this child's turn; tell whether anything did."""
        self.pump.sending += 1
        try:
            # Which waits for the loop's next turn at least.
            async with self.top.sends:
                return transfer.push()
        finally:
            self.pump.sending -= 1

    async def wait_taken(self, redo: Callable[[], bytes]) -> None:
        """Wait until the client has taken the bytes of files that READs lent it.

        Args:
            redo: makes the bytes of the request that waits for this, payload included.
        """
        self.redo = redo
        try:
            with trio.fail_after(self.deadline_s):
                while self.zero_copy and not self._stop and bytes_unread(self.write_fd):  # noqa: ASYNC110
                    # No event tells that a socket's queue is empty; clients that send a
                    # WRITE before they read a reply are rare enough to look.
                    await trio.sleep(0.001)
            self.zero_copy = False
        finally:
            self.redo = None
