"""The body of a message: received piece by piece, held to a budget, handed on whole.

Rules of this file.

1. A body is taken off the line whatever becomes of its request (spec W4).
2. A request sees its body once it is complete, never before (spec W2).
3. Memory for it comes from the host's one budget; where there is none left, and no
   disk, the body is drained and the request gets an error (spec W3).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, TypeVar

from protocol import error
from protocol.chat import SEPARATORS, ChatBody
from supervisor.session.base import EOF, SessionBase
from supervisor.session.replies import no_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfs.payload import Reservation

T = TypeVar("T")

_write = os.write


class Receiving(SessionBase):
    """The part of a session that receives bodies."""

    __slots__ = ()

    def collect(
        self,
        piece: bytes,
        finish: Callable[[bytes | memoryview], bytes | None],
        chat: ChatBody | None = None,
    ) -> bytes | None:
        """Receive the rest of the current body, then call ``finish`` with all of it.

        Args:
            piece: what ``take_body`` gave of it so far.
            finish: answers the request, or starts a job and returns None.
            chat: follows the body of an LLM_CHAT, which may be longer than declared.
        """
        spare = 0
        if chat is not None:
            chat.feed(piece)
            spare = SEPARATORS
            if not self.conn.body_left and chat.wants_more:
                chat.is_extended = True
                self.conn.extend_body(SEPARATORS)
                piece += self.conn.take_body()
        left = self.conn.body_left
        if not left:
            return finish(piece)
        self._chat = chat
        self._finish = finish
        try:
            self._payload = self.budget.begin(len(piece) + left + spare)
            if piece:
                self._payload.add(piece)
        except OSError as why:
            self._refuse_payload(why)
        return None

    def drain(self, reply: bytes, chat: ChatBody | None = None) -> bytes | None:
        """Take the whole body of the current message off the line, then reply (W4).

        Args:
            reply: what is sent then.
            chat: follows the body of an LLM_CHAT, which may be longer than declared.
        """
        self._chat = chat
        piece = self.conn.take_body()
        if chat is not None:
            chat.feed(piece)
        self._drain_reply = reply
        return None if self.conn.body_left else self._end_body()

    def reserved_memory(self) -> Reservation:
        """Return what the current request reserves until its answer is taken."""
        if self.memory is None:
            self.memory = self.budget.reservation(self.client.ledger)
        return self.memory

    def with_payload(self, call: Callable[[memoryview], T]) -> T:
        """Do something with the whole payload, in a worker thread of the job's."""
        if self._payload is None:
            raise RuntimeError("there is no payload")
        return call(self._payload.view())

    def payload_done(self) -> None:
        """Give the memory of the payload back before the job that got it ends."""
        self._drop_payload()

    def _receive_body(self) -> bytes | None:
        """Receive some of a body; return the reply once it is complete."""
        conn = self.conn
        payload = self._payload
        if payload is None:
            space = self.budget.scratch[: conn.body_left]
        else:
            space = payload.space()
            if self._chat is not None:  # it has room for separators
                space = space[: conn.body_left]
        count = os.readv(self.read_fd, [space])
        if not count:
            what = b"data: unexpected EOF"
            if self._chat is not None:
                what = self._chat.incomplete() + b" data"
            self._send_last(error(b"failed to read " + what))
            self.close_soon(EOF)
            return None
        self.bytes_in += count
        conn.body_received(count)
        if self._chat is not None:
            self._chat.feed(space[:count])
        if payload is not None:
            try:
                payload.advance(count)
            except OSError as why:
                self._refuse_payload(why)
        return None if conn.body_left else self._end_body()

    def _end_body(self) -> bytes | None:
        chat = self._chat
        if chat is not None:
            if chat.wants_more:
                self._extend(chat)
                if self.conn.body_left:
                    return None
            self._chat = None
        finish, self._finish = self._finish, None
        if self._payload is None:
            reply, self._drain_reply = self._drain_reply, None
            return reply
        if finish is None:
            raise RuntimeError("a body without an end")
        try:
            reply = finish(self._payload.view())
        finally:
            if self._job is None:
                self._drop_payload()
                self._release_memory()
        return reply

    def _extend(self, chat: ChatBody) -> None:
        """Go on with the separators that an LLM_CHAT has not counted (spec L1)."""
        chat.is_extended = True
        self.conn.extend_body(SEPARATORS)
        piece = self.conn.take_body()
        if self._payload is not None and piece:
            try:
                self._payload.add(piece)
            except OSError as why:
                self._refuse_payload(why)

    def _refuse_payload(self, why: OSError) -> None:
        """Drain a payload for which there is no room, neither in memory nor on disk."""
        self._drop_payload()
        self._release_memory()
        self._finish = None
        self._drain_reply = no_memory(why)

    def release_growth(self) -> None:
        """Give back what the header of a WRITE has reserved, or what came of it."""
        if self.reserved is not None:
            (file, growth), self.reserved = self.reserved, None
            file.give_back(growth)

    def _release_memory(self) -> None:
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()

    def _drop_payload(self) -> None:
        self.release_growth()
        payload, self._payload = self._payload, None
        if payload is not None:
            payload.close()

    def _send_last(self, reply: bytes) -> None:
        if self._stop:
            return  # nothing is sent once the session ends (spec T3)
        with contextlib.suppress(OSError):
            _write(self.write_fd, reply)
