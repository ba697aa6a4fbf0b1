"""The body of a message: received in pieces, within a budget, passed on whole.

Rules of this file.

1. A body is read to its end whatever happens to its request (spec W4).
2. A request gets its body once it is complete, never before (spec W2).
3. Its memory comes from its child's part of the host's budget; without memory or disk,
   the body is drained and the request gets an error (spec W3).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

from hostlib.handover import HandoverError
from protocol import format_request
from protocol.chat import SEPARATORS, ChatBody
from supervisor.fsproxy.replies import no_memory_error
from supervisor.fsproxy.session_state import BodyState, ChatState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protocol import HostConnection, messages
    from vfs.clients import OpenFile
    from vfs.ledger import Ledger
    from vfs.payload import MemoryReservation, Payload, PayloadBudget

T = TypeVar("T")


class Inbound:
    """The incoming body of a client, and the reservations of its request.

    Args:
        conn: knows the rest of a body.
        read_fd: source of bodies; non-blocking, borrowed.
        budget: memory for payloads.
        ledger: the client's, which is charged for payloads and reservations.

    Attributes:
        payload: the kept body; None if it is drained, or there is none.
        chat: parses the body of an LLM_CHAT, which may be longer than declared.
        drain_reply: the answer to a request whose body is drained.
        reserved: (file, bytes) of the growth of the present WRITE.
    """

    __slots__ = (
        "_budget",
        "_conn",
        "_finish",
        "_ledger",
        "_memory",
        "_read_fd",
        "chat",
        "drain_reply",
        "payload",
        "reserved",
    )

    def __init__(
        self,
        conn: HostConnection,
        read_fd: int,
        budget: PayloadBudget,
        ledger: Ledger,
    ) -> None:
        self._conn = conn
        self._read_fd = read_fd
        self._budget = budget
        self._ledger = ledger
        self._finish: Callable[[bytes | memoryview], bytes | None] | None = None
        self._memory: MemoryReservation | None = None
        self.payload: Payload | None = None
        self.chat: ChatBody | None = None
        self.drain_reply: bytes | None = None
        self.reserved: tuple[OpenFile, int] | None = None

    def collect(
        self,
        piece: bytes,
        finish: Callable[[bytes | memoryview], bytes | None],
        chat: ChatBody | None = None,
    ) -> bytes | None:
        """Receive the rest of the current body, then call ``finish`` with all of it.

        Args:
            piece: the part of it from ``take_body``.
            finish: answers the request, or starts a job and returns None.
            chat: parses the body of an LLM_CHAT, which may be longer than declared.
        """
        spare = 0
        if chat is not None:
            chat.feed(piece)
            spare = SEPARATORS
            if not self._conn.body_left and chat.wants_more:
                chat.is_extended = True
                self._conn.extend_body(SEPARATORS)
                piece += self._conn.take_body()
        left = self._conn.body_left
        if not left:
            return finish(piece)
        self.chat = chat
        self._finish = finish
        try:
            size = len(piece) + left + spare
            self.payload = self._budget.begin(size, self._ledger)
            if piece:
                self.payload.add(piece)
        except OSError as why:
            self._refuse_payload(why)
        return None

    def drain(self, reply: bytes, chat: ChatBody | None = None) -> bytes | None:
        """Read the whole body of the current message, then reply (W4).

        Args:
            reply: sent then.
            chat: parses the body of an LLM_CHAT, which may be longer than declared.
        """
        self.chat = chat
        piece = self._conn.take_body()
        if chat is not None:
            chat.feed(piece)
        self.drain_reply = reply
        return None if self._conn.body_left else self.finish()

    def receive(self) -> int:
        """Receive some of a body; return the number of bytes, 0 at the end of input.

        Raises:
            OSError: the connection failed; ``BlockingIOError``: no bytes wait.
        """
        conn, payload = self._conn, self.payload
        if payload is None:
            space = self._budget.scratch[: conn.body_left]
        else:
            space = payload.space()
            if self.chat is not None:  # it has room for separators
                space = space[: conn.body_left]
        count = os.readv(self._read_fd, [space])
        if not count:
            return 0
        conn.body_received(count)
        if self.chat is not None:
            self.chat.feed(space[:count])
        if payload is not None:
            try:
                payload.advance(count)
            except OSError as why:
                self._refuse_payload(why)
        return count

    def finish(self) -> bytes | None:
        """Answer the request with a complete body; None if more is to come, or for a job.

        An LLM_CHAT may turn out to be longer than declared: then some of it is left.
        """
        chat = self.chat
        if chat is not None:
            if chat.wants_more:
                self._extend(chat)
                if self._conn.body_left:
                    return None
            self.chat = None
        finish, self._finish = self._finish, None
        if self.payload is None:
            reply, self.drain_reply = self.drain_reply, None
            return reply
        if finish is None:
            raise RuntimeError("a body without an end")
        return finish(self.payload.view())

    def missing(self) -> bytes:
        """Return the error for an incomplete body, in the contract's words."""
        if self.chat is None:
            return b"data: unexpected EOF"
        return self.chat.first_incomplete() + b" data"

    def reserved_memory(self) -> MemoryReservation:
        """Return the current request's reservation, held until its answer is taken."""
        if self._memory is None:
            self._memory = self._budget.reservation(self._ledger)
        return self._memory

    def call_with_payload(self, call: Callable[[memoryview], T]) -> T:
        """Call a function with the whole payload, in the job's worker thread."""
        if self.payload is None:
            raise RuntimeError("there is no payload")
        return call(self.payload.view())

    def release_growth(self) -> None:
        """Give back the growth that a WRITE has reserved."""
        if self.reserved is not None:
            (file, growth), self.reserved = self.reserved, None
            file.give_back(growth)

    def release_payload(self) -> None:
        """Give back the memory of the payload, and the growth of its WRITE."""
        self.release_growth()
        payload, self.payload = self.payload, None
        if payload is not None:
            payload.close()

    def release(self) -> None:
        """Give back all that the request has reserved."""
        self.release_payload()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def snapshot(
        self, begun: messages.Request | None, dialect: int
    ) -> BodyState | bytes:
        """Return an incomplete body, or the bytes of its message, to be read again.

        Args:
            begun: its request, if its body is kept.
            dialect: of its line.

        Raises:
            HandoverError: the payload cannot be read back.
        """
        payload, chat = self.payload, self.chat
        if payload is None:
            return BodyState(
                left=self._conn.body_left,
                reply=self.drain_reply or b"",
                chat=None if chat is None else ChatState(*chat.progress),
            )
        if begun is None:
            raise HandoverError("cannot hand over a payload: it has no request")
        line = format_request(begun, dialect)
        if payload.is_spooled and chat is None:
            got = payload.size - payload.left
            return BodyState(line=line, spool=payload.spool, got=got)
        try:  # that of a chat has to go by once more
            return line + payload.read_received()
        except OSError as why:
            text = f"cannot read a payload back: {why.strerror}"
            raise HandoverError(text) from None

    def restore(self, state: BodyState) -> None:
        """Continue an incomplete body of the program before.

        Precondition: if the body is kept, its request was read again.
        """
        if state.line:
            self._adopt(state.spool, state.got)
            self._conn.body_received(state.got)
            return
        self._conn.extend_body(state.left)
        self.drain_reply = state.reply
        if state.chat is not None:
            self.chat = ChatBody.resume(*msgspec.structs.astuple(state.chat))

    def _adopt(self, spool_fd: int, got: int) -> None:
        """Continue a payload of which ``got`` bytes are spooled, and own its descriptor.

        The descriptor is closed if this program refuses the request.
        """
        begun = self.payload
        if begun is None:
            os.close(spool_fd)
            return
        begun.close()
        left = begun.size - got
        self.payload = self._budget.adopt(spool_fd, begun.size, left, self._ledger)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host, with a word for each."""
        if self.payload is not None:
            for fd in self.payload.descriptors():
                yield fd, "payload"

    def _extend(self, chat: ChatBody) -> None:
        """Continue with separators that an LLM_CHAT has not counted (spec L1)."""
        chat.is_extended = True
        self._conn.extend_body(SEPARATORS)
        piece = self._conn.take_body()
        if self.payload is not None and piece:
            try:
                self.payload.add(piece)
            except OSError as why:
                self._refuse_payload(why)

    def _refuse_payload(self, why: OSError) -> None:
        """Drain a payload for which there is neither memory nor disk."""
        self.release()
        self._finish = None
        self.drain_reply = no_memory_error(why)
