"""A lane with an upstream connection of its own, which ATTACH gave (spec N4).

Rules of this file.

1. Two tasks: ``_lead_up`` hands requests on, ``_lead_down`` replies.  Between them runs
   a bounded queue of what is to be answered, in order, so that what the relay refuses
   is answered at its place among what the host answers.
2. Memory is bounded by pieces of 64 KiB and the queue, whatever is declared.
3. A payload is handed on as it comes.  If the nested client dies in the middle of it,
   the upstream connection is in the middle of a request: no CLOSE can travel there, and
   closing it is what releases everything (the host drops the torn WRITE, spec W2, and
   closes the filenos, spec S3).  The same if the client is dead and a model is being
   asked for it, for only that ends the call (spec L10).  One that only says no more gets
   every reply that it is owed first, and the host's word for the payload.
4. Else every fileno is closed with a CLOSE (spec N2), then the connection.
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
from vfs.client.waiting import NO_ROOM, passed_in
from vfs.relay.lane import (
    PIECE_BYTES,
    SETTLE_S,
    Lane,
    TornError,
    reply_line,
    unsendable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

QUEUE_REQUESTS = 64
"""Requests on their way at once; a client that sends more waits for replies first."""

_NO_RIGHTS = b'{"read":[],"write":[]}'


class UpstreamLostError(Exception):
    """The host closed the attached connection, or sent what is no reply."""


class AttachedLane(Lane):
    """See the rules of this file.

    Args:
        number: as for ``Lane``.
        near: as for ``Lane``.
        upstream: the attached connection.
        dialects: what the nested client speaks, and what the host does.
        knows: as for ``Lane``.
        adopt: starts a lane for a connection that the nested client attached; takes it
            and this lane, and returns the nested client's end.

    Attributes:
        nested: the lanes of what the nested client attached.
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
        """Take the nested client for gone, and what it attached with it."""
        for lane in tuple(self.nested):
            lane.end()
        super().end()
        if self._chats:
            self.scope.cancel()  # rule 3

    async def run(self) -> None:
        """Serve the nested client until it is gone, then release what it held."""
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
        """End the upstream connection where the nested client's has ended (rule 3)."""
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
                wanted = unsendable(wanted)
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
                await self._flush()  # or the replies that make room would never come
                await self._queue.send(entry)
        except trio.BrokenResourceError as why:
            # `_lead_down` has heard of it, and we are cancelled with the next wait.
            raise UpstreamLostError from why

    async def _lead_body(self, message: m.Request) -> None:
        """Hand the payload on; a chat's may be three bytes longer (spec L1)."""
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
            # Always with room for a descriptor: a receive that began before an ATTACH
            # was sent may be the one that gets its reply.
            data, control, flags, _ = await self._upstream.recvmsg(
                PIECE_BYTES, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as why:
            raise UpstreamLostError from why
        self._passed.extend(passed_in(control, flags))
        if not data:
            raise UpstreamLostError
        return data

    async def _pass_on(self, reply: m.Reply) -> None:
        """Answer ATTACH: a lane for the new connection, its other end to the client."""
        if not self._passed:
            raise UpstreamLostError
        fd = self._passed.pop(0)
        if fd == NO_ROOM:
            await self._answer(_not_attached(errno.EMFILE))
            return
        attached = socket.socket(fileno=fd)
        try:
            far = self._adopt(attached, self)
        except OSError as why:  # closed, it is the host's to forget
            attached.close()
            await self._answer(_not_attached(why.errno))
            return
        line = reply_line(reply)
        with far:
            rights = array.array("i", [far.fileno()])
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            try:
                sent = await self._downstream.sendmsg([line], control)
            except OSError as why:
                if why.errno == errno.ETOOMANYREFS:
                    await self._answer(_not_attached(why.errno))
                else:
                    self._is_deaf = True
                return
        await self._answer(line[sent:])

    async def _close_files(self) -> bool:
        """Close upstream what the nested client left open; tell whether it is done."""
        closing = sorted(self.filenos)
        # A CLOSE publishes what is staged, and the nested client never asked for that:
        # without rights the host drops it, and the old content stands (spec A3b).
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


def _not_attached(number: int | None) -> bytes:
    """Return the host's words for an ATTACH that failed, when it fails here."""
    return error(b"failed to attach: " + os.strerror(number or 0).encode())
