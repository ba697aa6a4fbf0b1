"""One request and its reply on a child's connection, for Trio; see ``connection``.

Rules of this file.

1. It never sets O_NONBLOCK, which would change the descriptor for every process that
   shares FD 3.  A read follows ``wait_readable``, and no other reader can take the bytes
   during our turn; a write uses RWF_NOWAIT (preadv2(2)).
2. A request that is cancelled before its first byte has no effect.  After that its reply
   will come, and gets ``CANCEL_GRACE_S``.  If it does not come in time, the connection is
   given up: every later call raises ``ConnectionLostError``.
3. A file that a cancelled OPEN has opened is closed by the next request.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import trio

from protocol import ClientConnection, ProtocolError, RemoteProtocolError
from protocol import messages as m
from vfs.client.connection import MAX_BODY_BYTES, RECEIVE_BYTES, Endpoint, check_end
from vfs.client.errors import connection_lost, from_reply
from vfs.client.waiting import receive_passed_nowait

if TYPE_CHECKING:
    from vfs.client.connection import Payload
    from vfs.client.errors import Name

CANCEL_GRACE_S = 0.25
"""How long a cancelled request may take: a file request takes about 50 us, so only a slow
model or a stalled host costs the connection, and no cancellation takes long."""

FIRST_PAUSE_S = 0.0005
LAST_PAUSE_S = 0.02
"""Pauses between tries to take the turn from another process: the kernel only wakes a
thread that waits in F_SETLKW, and a client has no threads."""

PIPE_PIECE_BYTES = 4096
"""Bytes that a writable pipe or socket takes without blocking (PIPE_BUF)."""


class AsyncEndpoint(Endpoint):
    """An endpoint that waits in Trio; tasks are served in order."""

    def __init__(
        self,
        fds: tuple[int, ...] | None = None,
        *,
        shared: bool = True,
        dialect: int | None = None,
    ) -> None:
        super().__init__(fds, shared=shared, dialect=dialect)
        self._tasks = trio.Lock()
        self._abandoned: list[int] = []

    def disconnect(self) -> None:
        """Close an attached connection; a task that waits on it gets an error."""
        if not self._shared and self._read_fd >= 0:
            for fd in {self._read_fd, self._write_fd}:
                trio.lowlevel.notify_closing(fd)
        super().disconnect()

    async def request(
        self, request: m.Request, payload: Payload = b""
    ) -> tuple[m.Reply, bytes]:
        """Send a request and return its reply and body, also of an error.

        For a proxy, which passes them on.
        """
        return await self._exchange(request, payload, (), MAX_BODY_BYTES, None)

    async def _ask(
        self,
        request: m.Request,
        payload: Payload = b"",
        *,
        names: tuple[Name, ...] = (),
        most: int = MAX_BODY_BYTES,
        passed: list[int] | None = None,
    ) -> tuple[m.Reply, bytes]:
        while self._abandoned:
            token = b"%d" % self._abandoned.pop()
            await self._exchange(m.Close(token), b"", (), 0, None)
        reply, body = await self._exchange(request, payload, names, most, passed)
        if not reply.ok:
            raise from_reply(reply.text, *names)
        return reply, body

    async def _exchange(
        self,
        request: m.Request,
        payload: Payload,
        names: tuple[Name, ...],
        most: int,
        passed: list[int] | None,
    ) -> tuple[m.Reply, bytes]:
        async with self._tasks:
            connection, line = self._begin(request, names)
            fds = (self._read_fd, self._write_fd, self._attach_fd)
            exchange = _Exchange(connection, line, payload, fds, most, passed)
            await self._take_turn()
            try:
                await self._finish(exchange)
            except trio.Cancelled:
                if exchange.done and exchange.reply.ok and isinstance(request, m.Open):
                    self._abandoned.append(exchange.reply.number)  # rule 3
                raise
            finally:
                self.turn.give_back(fds[1], usable=not exchange.is_open_ended)
            return exchange.reply, exchange.body

    async def _take_turn(self) -> None:
        pause = FIRST_PAUSE_S
        while not self.turn.take(self._write_fd, wait=False):
            await trio.sleep(pause)
            pause = min(pause * 2, LAST_PAUSE_S)

    async def _finish(self, exchange: _Exchange) -> None:
        try:
            try:
                await exchange.run()
            except trio.Cancelled:
                if exchange.is_open_ended:
                    with trio.move_on_after(CANCEL_GRACE_S, shield=True):
                        await exchange.run()
                raise
        except ProtocolError as why:
            self._lost = f"{why}; the connection is given up"
            raise connection_lost(self._lost) from why
        except (EOFError, ConnectionError) as why:
            # Other processes on the connection find this out themselves: no mark needed.
            exchange.is_open_ended = False
            self._lost = f"the host is gone: {why}"
            raise connection_lost(self._lost) from why
        finally:
            if exchange.is_open_ended and self._lost is None:
                self._lost = "a request was cancelled; the connection is given up"


class _Exchange:
    """One request and its reply.

    ``run`` can be cancelled wherever it waits, and called again to continue from there.

    Attributes:
        is_open_ended: it has begun, and its reply is not complete.
        done: ``reply`` and ``body`` are complete.
    """

    def __init__(
        self,
        connection: ClientConnection,
        line: bytes,
        payload: Payload,
        fds: tuple[int, int, int],
        most: int,
        passed: list[int] | None,
    ) -> None:
        self._connection = connection
        self._unsent: list[Payload] = [line, payload] if payload else [line]
        self._read_fd, self._write_fd, self._attach_fd = fds
        self._most = most
        self._passed = passed
        self._reply: m.Reply | None = None
        self._body: memoryview | None = None
        self._got = 0
        self.is_open_ended = False
        self.done = False

    @property
    def reply(self) -> m.Reply:
        """The reply.  Precondition: done."""
        assert self._reply is not None  # noqa: S101 - for the type checker
        return self._reply

    @property
    def body(self) -> bytes:
        """The reply's body."""
        return b"" if self._body is None else bytes(self._body)

    async def run(self) -> None:
        """Continue until the reply is complete.

        Raises:
            ProtocolError: the received bytes are no reply.
            EOFError: the host closed the connection.
        """
        try:
            await self._send()
        except ConnectionError as why:
            # The host may have sent an error before it closed (ATTACH by socket).
            try:
                await self._receive_line()
            except (EOFError, ConnectionError):
                raise why from None
        await self._receive_line()
        await self._receive_descriptor()
        await self._receive_body()
        check_end(self._connection)
        self.is_open_ended = False
        self.done = True

    async def _send(self) -> None:
        while self._unsent:
            try:
                sent = os.pwritev(self._write_fd, self._unsent, -1, os.RWF_NOWAIT)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._write_fd)
                continue
            except OSError as why:
                if why.errno != errno.EOPNOTSUPP:
                    raise
                # Pipes before Linux 6.4 do not know RWF_NOWAIT.
                await trio.lowlevel.wait_writable(self._write_fd)
                sent = os.write(self._write_fd, self._unsent[0][:PIPE_PIECE_BYTES])
            self.is_open_ended = True
            while self._unsent and sent >= len(self._unsent[0]):
                sent -= len(self._unsent.pop(0))
            if sent:
                self._unsent[0] = memoryview(self._unsent[0])[sent:]

    async def _receive_line(self) -> None:
        while self._reply is None:
            await trio.lowlevel.wait_readable(self._read_fd)
            if self._passed is not None and self._attach_fd == self._read_fd:
                piece = receive_passed_nowait(
                    self._read_fd, RECEIVE_BYTES, self._passed
                )
            else:
                piece = os.read(self._read_fd, RECEIVE_BYTES)
            if not piece:
                raise EOFError("it closed the connection")
            self._connection.receive_data(piece)
            self._reply = self._connection.next_reply()

    async def _receive_descriptor(self) -> None:
        if self._passed is None or not self.reply.ok or self._passed:
            return
        if self._attach_fd != self._read_fd:
            # It was sent before the reply, with one byte.
            await trio.lowlevel.wait_readable(self._attach_fd)
            receive_passed_nowait(self._attach_fd, 1, self._passed)
        if not self._passed:
            raise RemoteProtocolError("the host attached nothing")

    async def _receive_body(self) -> None:
        size = self.reply.body
        if not size:
            return
        if self._body is None:
            if size > self._most:
                raise RemoteProtocolError(
                    f"the host sends {size} bytes, at most {self._most} fit"
                )
            head = self._connection.take_body()
            self._got = len(head)
            self._body = memoryview(bytearray(size))
            self._body[: self._got] = head
        while self._got < size:
            await trio.lowlevel.wait_readable(self._read_fd)
            count = os.readv(self._read_fd, [self._body[self._got :]])
            if not count:
                raise EOFError("it closed the connection inside a reply")
            self._connection.body_received(count)
            self._got += count
