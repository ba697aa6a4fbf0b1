"""One reader of an execution's output: it sends the log in HTTP chunks.

Rules of this file.

1. A chunk is a piece of output as it came, or as much as is sent at once.
2. A live reader gets each piece from the log and sends it; if its client is slower, it
   continues from the log alone. The rest of a chunk is remembered, so the stream stays
   whole.
3. Sending has no time-out: a client that does not read harms no other.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import TYPE_CHECKING

import trio

from hostlib.readiness import wait_writable
from supervisor.toolexec.output.log import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.toolexec.output.log import OutputLog
    from supervisor.toolexec.output.splice import Tap


class ChunkedReader:
    """Sends one log to one client.

    Args:
        log: the output.
        sock: a non-blocking stream socket; the caller closes it.
        offset: the beginning.
        before: sent first: the head of the reply.

    Attributes:
        offset: all bytes before it are in the kernel.
    """

    def __init__(
        self, log: OutputLog, sock: socket.socket, offset: int = 0, before: bytes = b""
    ) -> None:
        self.offset = offset
        self._log = log
        self._sock = sock
        # The rest of the present chunk: size line, output, end.
        self._head = before
        self._left = 0
        self._tail = b""
        self._failure: OSError | None = None
        self._woken = trio.Event()

    async def run(self) -> None:
        """Send all output until the log is finished.

        Raises:
            OSError: the client is gone, or the log cannot be read.

        Cancellation: at once; a part may have been sent.
        """
        log = self._log
        # Else it continues a chunk of another program of this host.
        if not (self._left or self._tail) and self.offset < self._next_end():
            self._begin(min(self._next_end() - self.offset, PIECE_BYTES))
        while True:
            if self._is_open():
                await self._send_from_log()
            elif self.offset < log.end:
                await trio.lowlevel.checkpoint()
                self._begin(min(self._next_end() - self.offset, PIECE_BYTES))
            elif log.is_finished:
                return
            else:
                await self._wait()
            if self._failure is not None:
                raise self._failure

    async def take(self, piece: memoryview) -> bool:
        """Send the next piece; return False if the client is too slow."""

        def push() -> None:
            nonlocal piece
            piece = self._send(piece)

        self._begin(len(piece))
        return await self._push(push)

    def frame(self, size: int) -> tuple[bytes, bytes]:
        """Begin a piece; see ``log.Reader``."""
        self._begin(size)
        return self._head, self._tail

    async def take_from(self, tap: Tap) -> bool:
        """Send that piece from the pipe aside; see ``log.Reader``."""

        def push() -> None:
            owed = len(self._head) + self._left + len(self._tail)
            self._count_sent(tap.send(self._sock, owed))

        return await self._push(push)

    async def _push(self, push: Callable[[], None]) -> bool:
        """Send the present chunk; return False if the client is too slow."""
        deadline_s = 0.0
        try:
            while self._is_open():
                try:
                    push()
                except BlockingIOError:
                    now_s = time.monotonic()
                    deadline_s = deadline_s or now_s + self._log.patience_s
                    if not await self._is_writable(deadline_s - now_s):
                        break
        except (OSError, trio.ClosedResourceError) as why:
            self._failure = why if isinstance(why, OSError) else BrokenPipeError()
        self._log.record_progress()
        if self._is_open() or self._failure is not None:
            self.wake()
            return False
        return True

    def wake(self) -> None:
        """Look at the log again: it is finished, or this reader is not live any more."""
        self._woken.set()

    def held(self) -> tuple[int, bytes, int, bytes]:
        """Return its position: (offset, head, left, tail), for ``at``."""
        return self.offset, self._head, self._left, self._tail

    @classmethod
    def at(
        cls, log: OutputLog, sock: socket.socket, held: tuple[int, bytes, int, bytes]
    ) -> ChunkedReader:
        """Return a reader that continues at another one's position."""
        offset, head, left, tail = held
        reader = cls(log, sock, offset, before=head)
        reader._left, reader._tail = left, tail
        return reader

    def _next_end(self) -> int:
        """Return the latest end of the next chunk: the note has its own."""
        log = self._log
        return log.note_at if self.offset < log.note_at else log.end

    def _is_open(self) -> bool:
        return bool(self._head or self._left or self._tail)

    def _begin(self, size: int) -> None:
        self._head += b"%x\r\n" % size
        self._left, self._tail = size, b"\r\n"

    async def _send_from_log(self) -> None:
        data = b""
        if self._left:
            await self._log.wait_beyond(self.offset)  # a chunk that was begun early
            data = await self._log.read(self.offset, min(self._left, PIECE_BYTES))
            if not data:
                raise OSError(errno.EIO, "the log has lost output")
        view = memoryview(data)
        while view or (self._is_open() and not self._left):
            try:
                view = self._send(view)
            except BlockingIOError:
                await wait_writable(self._sock)
        self._log.record_progress()

    def _send(self, view: memoryview) -> memoryview:
        """Send bytes of the chunk; ``view`` is its next output.

        Returns:
            The rest of ``view``.

        Raises:
            BlockingIOError: the client takes nothing now.
        """
        tail = self._tail if len(view) == self._left else b""
        parts: tuple[bytes | memoryview, ...] = (self._head, view, tail)
        sent = self._sock.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        return view[self._count_sent(sent) :]

    def _count_sent(self, size: int) -> int:
        """Count sent bytes; return how many of them were output."""
        of_head = min(size, len(self._head))
        self._head = self._head[of_head:]
        of_output = min(size - of_head, self._left)
        self.offset += of_output
        self._left -= of_output
        self._tail = self._tail[size - of_head - of_output :]
        return of_output

    async def _wait(self) -> None:
        """Wait for more, as the live reader if there is none."""
        log = self._log
        if log.live is not None or self.offset != log.end:
            await log.wait_beyond(self.offset)
            return
        self._woken = trio.Event()
        with log.handing_on_to(self):
            await self._woken.wait()

    async def _is_writable(self, patience_s: float) -> bool:
        if patience_s <= 0:
            return False
        with trio.move_on_after(patience_s) as patience:
            await wait_writable(self._sock)
        return not patience.cancelled_caught
