"""A lane with an upstream connection of its own, which ATTACH gave (spec N4).

1. Two tasks: ``_lead_up`` passes requests on, ``_lead_down`` replies.  Between them is a
   bounded queue of requests in order, so that a refusal by the relay takes its place
   among the host's replies.  Pieces of 64 KiB and the queue bound the memory.
2. A payload is passed on as it comes.  If the nested client dies in the middle of it, no
   CLOSE can follow, so the upstream connection is closed: the host drops the torn WRITE
   and closes the filenos (spec W2, S3).  A call of the model for a dead client is ended
   in the same way (spec L10).
3. A client that only shuts down its sending side gets all replies first.
4. Otherwise every fileno is closed with a CLOSE (spec N2), then the connection.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from typing import TYPE_CHECKING

import trio
from loguru import logger

from protocol import ClientConnection, ProtocolError, error
from protocol import messages as m
from protocol.chat import ChatBody
from vfs.client.waiting import NO_ROOM, passed_descriptors
from vfs.relay.lane import (
    PIECE_BYTES,
    SETTLE_S,
    Lane,
    TornError,
    refuse_unsendable,
    reply_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable

QUEUE_REQUESTS = 64
"""Most requests without a reply; a client that sends more waits for replies first."""

_NO_RIGHTS = b'{"read":[],"write":[]}'


class UpstreamLostError(Exception):
    """The host closed the attached connection, or sent bytes that are no reply."""


class AttachedLane(Lane):
    """A lane on an attached connection; see the rules of this file.

    Args:
        number: as for ``Lane``.
        near: as for ``Lane``.
        upstream: the attached connection.
        dialects: the dialects of the nested client and of the host.
        knows: as for ``Lane``.
        adopt: takes a connection that the nested client attached, and this lane; starts
            a lane for it, and returns the nested client's end.

    Attributes:
        nested: the lanes of connections that the nested client attached.
    """

    def __init__(
        self,
        number: int,
        near: socket.socket,
        upstream: socket.socket,
        dialects: tuple[int, int],
        knows: Callable[[bytes], bool],
        adopt: Callable[[socket.socket, AttachedLane], socket.socket],
    ) -> None:
        super().__init__(number, near, dialects[0], knows)
        self.nested: set[Lane] = set()
        self._upstream = trio.socket.from_stdlib_socket(upstream)
        self._replies = ClientConnection(dialects[1])
        self._adopt = adopt
        self._passed: list[int] = []
        self._out = bytearray()
        self._chats = 0
        self._is_torn = False
        self._queue, self._queued = trio.open_memory_channel[m.Request](QUEUE_REQUESTS)

    def end(self) -> None:
        """Mark the nested client as gone, with the connections that it attached."""
        for lane in tuple(self.nested):
            lane.end()
        super().end()
        if self._chats:
            self.scope.cancel()  # rule 2

    async def run(self) -> None:
        """Serve the nested client until it is gone, then release its files."""
        settled = False
        try:
            with self.scope:
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._lead_up)
                        nursery.start_soon(self._lead_down)
                except* TornError:
                    pass
                except* UpstreamLostError:
                    self.filenos.clear()  # the host has released them
                    logger.bind(event="relay.lost", lane=self.number).warning(
                        "Upstream connection lost, closing the nested client's"
                    )
                else:
                    settled = not self._is_torn and await self._close_files()
        finally:
            self._upstream.close()
            self._downstream.close()
            for fd in self._passed:
                if fd != NO_ROOM:
                    os.close(fd)
            if self.filenos and not settled:
                logger.bind(event="relay.dropped", lane=self.number).info(
                    "Released filenos {} by closing their connection (downstream EOF"
                    " inside a request)",
                    ", ".join(map(str, sorted(self.filenos))),
                )
            self.finished.set()

    # Up

    async def _lead_up(self) -> None:
        async with self._queue:
            while True:
                message = await self._next_message_flushed()
                if message is None:
                    if self._chats and self._is_gone():
                        raise TornError
                    return
                try:
                    await self._lead_one(message)
                except TornError:
                    if self._is_gone():
                        raise
                    await self._tear()
                    return

    async def _tear(self) -> None:
        """Close the upstream connection of a torn request (rule 2)."""
        self._is_torn = True
        await self._flush()
        try:
            self._upstream.shutdown(socket.SHUT_WR)
        except OSError as why:
            raise UpstreamLostError from why

    async def _next_message_flushed(self) -> m.Request | None:
        message = self._requests.next_message()
        if message is None:
            await self._flush()
            message = await self._next_message()
        return message

    async def _lead_one(self, message: m.Request) -> None:
        wanted = self._restrict(message)
        line = b""
        if not isinstance(wanted, m.Refusal):
            try:
                line = self._replies.send(wanted)
            except ValueError:
                wanted = refuse_unsendable(wanted)
        if isinstance(wanted, m.Refusal):
            await self._drain(wanted)
        self._chats += isinstance(wanted, m.Chat)
        await self._enqueue(wanted)
        self._out += line
        if line:
            await self._lead_body(wanted)

    async def _enqueue(self, entry: m.Request) -> None:
        try:
            try:
                self._queue.send_nowait(entry)
            except trio.WouldBlock:
                await self._flush()  # only replies make room in the queue
                await self._queue.send(entry)
        except trio.BrokenResourceError as why:
            # `_lead_down` has seen it, and cancels this task at its next wait.
            raise UpstreamLostError from why

    async def _lead_body(self, message: m.Request) -> None:
        """Pass the payload on; a chat's may be three bytes longer (spec L1)."""
        chat = ChatBody.of(message)
        while self._requests.body_left:
            if len(self._out) >= PIECE_BYTES:
                await self._flush()
            piece = self._requests.take_body()
            if not piece:
                await self._flush()
                piece = await self._next_body_piece()
            self._out += piece
            self._look_at(piece, chat)

    async def _flush(self) -> None:
        view = memoryview(bytes(self._out))
        self._out.clear()
        while view:
            try:
                view = view[await self._upstream.send(view) :]
            except OSError as why:
                raise UpstreamLostError from why

    # Down

    async def _lead_down(self) -> None:
        async with self._queued:
            async for entry in self._queued:
                if isinstance(entry, m.Refusal):
                    await self._answer(self._refuse(entry))
                else:
                    await self._lead_reply(entry)

    async def _lead_reply(self, message: m.Request) -> None:
        reply = await self._next_reply()
        self._note(message, reply)
        self._chats -= isinstance(message, m.Chat)
        if isinstance(message, m.Attach) and reply.ok:
            await self._pass_on(reply)
            return
        line = reply_line(reply)
        left = reply.body
        while left:
            piece = self._replies.take_body()
            if not piece:
                self._replies.receive_data(await self._receive_upstream())
                continue
            left -= len(piece)
            await self._answer(line + piece)
            line = b""
        if line:
            await self._answer(line)

    async def _next_reply(self) -> m.Reply:
        try:
            reply = self._replies.next_reply()
            while reply is None:
                self._replies.receive_data(await self._receive_upstream())
                reply = self._replies.next_reply()
        except ProtocolError as why:
            raise UpstreamLostError from why
        return reply

    async def _receive_upstream(self) -> bytes:
        try:
            # Always with room for a descriptor: a receive that began before an ATTACH was
            # sent may get its reply.
            data, control, flags, _ = await self._upstream.recvmsg(
                PIECE_BYTES, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as why:
            raise UpstreamLostError from why
        self._passed.extend(passed_descriptors(control, flags))
        if not data:
            raise UpstreamLostError
        return data

    async def _pass_on(self, reply: m.Reply) -> None:
        """Answer ATTACH: start a lane for the new connection, and send its other end."""
        if not self._passed:
            raise UpstreamLostError
        fd = self._passed.pop(0)
        if fd == NO_ROOM:
            await self._answer(_attach_error(errno.EMFILE))
            return
        attached = socket.socket(fileno=fd)
        try:
            far = self._adopt(attached, self)
        except OSError as why:  # the host sees the end of the closed connection
            attached.close()
            await self._answer(_attach_error(why.errno))
            return
        line = reply_line(reply)
        with far:
            rights = array.array("i", [far.fileno()])
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            try:
                sent = await self._downstream.sendmsg([line], control)
            except OSError as why:
                if why.errno == errno.ETOOMANYREFS:
                    await self._answer(_attach_error(why.errno))
                else:
                    self._is_deaf = True
                return
        await self._answer(line[sent:])

    async def _close_files(self) -> bool:
        """Close the nested client's files upstream; return whether all are closed."""
        closing = sorted(self.filenos)
        # A CLOSE would publish staged files, which the nested client did not close:
        # without rights the host drops them, and the old content stays (spec A3b).
        gives_up = bool(closing) and self._knows(b"NARROW")
        with trio.move_on_after(SETTLE_S):
            try:
                if gives_up:
                    self._out += self._replies.send(m.Narrow(len(_NO_RIGHTS)))
                    self._out += _NO_RIGHTS
                for fileno in closing:
                    self._out += self._replies.send(m.Close(b"%d" % fileno))
                    await self._flush()
                    logger.bind(event="relay.closed", lane=self.number).info(
                        "Sent close request for fileno {} (downstream EOF)", fileno
                    )
                for _ in range(len(closing) + gives_up):
                    await self._next_reply()
            except UpstreamLostError:
                return True  # the host has released them
            return True
        return False


def _attach_error(number: int | None) -> bytes:
    """Return the error line for an ATTACH that fails in the relay."""
    return error(b"failed to attach: " + os.strerror(number or 0).encode())
