"""The base of both lanes; a lane passes one nested client's requests upstream.

``vfs.relay.attached`` has the lane with a connection of its own, ``vfs.relay.serial`` the
lane that takes turns with all others.  Here are the restrictions of requests, the form of
replies, and the nested client's end of the connection.
"""

from __future__ import annotations

import math
import select
import socket
from copy import copy
from typing import TYPE_CHECKING, Any, cast

import trio
from loguru import logger

from protocol import COMMANDS, HostConnection, error, invalid, limits
from protocol import messages as m
from protocol.chat import SEPARATORS, ChatBody

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_BYTES = 65_536
"""Bytes that are received and passed on at once."""

SETTLE_S = 5.0
"""How long the end of a lane waits for the answers to its CLOSEs; a host takes about 50 us
for each."""

DEADLINE_S = 30.0
"""Longest time for a complete line (spec F8), since the host does not see its beginning.  In
a serial lane also for a payload and a reply, which are held here."""

WORDS = {row.message: word for word, row in COMMANDS.items()}
"""The command word of each message class."""


class TornError(Exception):
    """The nested client ended in the middle of a payload."""


class Lane:
    """One nested client: its requests, open files and end.

    Args:
        number: number of the lane in the log.
        near: the relay's end of the nested client's connection.
        dialect: the dialect of the nested client.
        knows: returns whether the host knows a command word.

    Attributes:
        filenos: the open files of the nested client (spec N2).
        scope: cancels the lane.
        finished: set when the lane has ended and its files are released.
    """

    def __init__(
        self,
        number: int,
        near: socket.socket,
        dialect: int,
        knows: Callable[[bytes], bool],
    ) -> None:
        self.number = number
        self.filenos: set[int] = set()
        self.scope = trio.CancelScope()
        self.finished = trio.Event()
        self._downstream = trio.socket.from_stdlib_socket(near)
        self._requests = HostConnection(dialect)
        self._knows = knows
        self._is_deaf = False

    async def run(self) -> None:
        """Serve the nested client until it is gone, then release its files."""
        raise NotImplementedError

    def end(self) -> None:
        """Mark the nested client as gone: its process has ended (spec S2).

        Requests that it has sent are still passed upstream, and their replies dropped; a
        grandchild with the same connection cannot use it any more.
        """
        try:
            self._downstream.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already

    # Restrictions

    def _restrict(self, message: m.Request) -> m.Request:
        """Return the message to pass upstream: with fewer rights, or a refusal.

        A host that does not know a command would read its payload as request lines,
        which may claim the top level, so the command is refused here.
        """
        if isinstance(message, m.Refusal):
            return message
        if isinstance(message, m.Chat) and self._is_gone():
            # A dead client makes no call of the model (spec S2, L10).
            return refuse(message, error(b"LLM not available"))
        if isinstance(message, m.Write) and message.fileno == m.NO_FILENO:
            return _without_fileno(message)
        if message.body and not self._knows(WORDS[type(message)]):
            return refuse_unknown(message)
        return _drop_claim(message)

    def _refuse(self, refusal: m.Refusal) -> bytes:
        """Return the reply line of a refusal (spec R2: a foreign fileno comes first).

        Precondition: the replies to all earlier requests have been noted.
        """
        if refusal.token is not None and int(refusal.token) not in self.filenos:
            return invalid("fileno", refusal.token)
        return refusal.reply

    def _note(self, message: m.Request, reply: m.Reply) -> None:
        """Update the table of open files (spec N2)."""
        if isinstance(message, m.Open) and reply.ok:
            self.filenos.add(reply.number)
        elif isinstance(message, m.Close):
            # Closed even after an error (spec C1).
            self.filenos.discard(message.fileno)

    # The nested client's connection

    async def _receive(self) -> bytes:
        """Receive from the nested client; empty at the end of its requests.

        After a client dies with unread replies, there is one ECONNRESET, and then the
        bytes that it had sent (unix(7)).
        """
        for _ in range(2):
            try:
                return await self._downstream.recv(PIECE_BYTES)
            except ConnectionResetError:
                continue
            except OSError:
                break
        return b""

    async def _receive_until(self, deadline: float) -> bytes:
        """Receive like ``_receive``; empty also after the deadline."""
        with trio.move_on_at(deadline):
            return await self._receive()
        logger.bind(event="relay.slow", lane=self.number).warning(
            "A nested client's line did not end in time: closing its connection"
        )
        return b""

    async def _next_message(self) -> m.Request | None:
        """Return the next message, None at the end; half a line is dropped (F7).

        A line that is not complete in time is an end as well (F8).
        """
        message = self._requests.next_message()
        deadline = math.inf
        while message is None:
            if self._requests.is_mid_message:
                deadline = min(deadline, trio.current_time() + DEADLINE_S)
                data = await self._receive_until(deadline)
            else:
                data = await self._receive()
            if not data:
                return None
            message = self._requests.receive_data(data)
        return message

    async def _next_body_piece(self) -> bytes:
        """Return the next piece of the message's payload.

        Raises:
            TornError: the nested client ended before the payload's end.
        """
        piece = self._requests.take_body()
        while not piece:
            data = await self._receive()
            if not data:
                raise TornError
            self._requests.receive_data(data)
            piece = self._requests.take_body()
        return piece

    def _look_at(self, piece: bytes, chat: ChatBody | None) -> None:
        """Feed the payload of an LLM_CHAT, which may be longer than declared (spec L1)."""
        if chat is None:
            return
        chat.feed(piece)
        if not self._requests.body_left and chat.wants_more:
            chat.is_extended = True
            self._requests.extend_body(SEPARATORS)

    async def _drain(self, message: m.Request) -> None:
        """Drop the message's payload (spec W4)."""
        chat = ChatBody.of(message)
        try:
            while self._requests.body_left:
                self._look_at(await self._next_body_piece(), chat)
        except TornError:
            self._requests.body_left = 0  # the end comes next

    async def _answer(self, data: bytes) -> None:
        """Send to the nested client, unless it does not receive any more."""
        view = memoryview(data)
        while view and not self._is_deaf:
            try:
                view = view[await self._downstream.send(view) :]
            except OSError:
                self._is_deaf = True

    def _is_gone(self) -> bool:
        """Return whether the nested client has closed both directions.

        After a half-close it still waits for its replies.
        """
        poll = select.poll()
        poll.register(self._downstream.fileno(), 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))


def refuse(message: m.Request, reply: bytes) -> m.Refusal:
    """Return a refusal that keeps the length of a request's payload."""
    return m.Refusal(reply, message.body, parts=message.parts)


def refuse_unknown(message: m.Request) -> m.Refusal:
    """Return the refusal of a command, as of a host that does not know it."""
    return refuse(message, error(b"unknown command: " + WORDS[type(message)]))


def _drop_claim(message: m.Request) -> m.Request:
    """Return a request without its claim of the top level (spec N3, A5).

    Precondition: a request that can claim it has the attribute ``flag`` for that alone.
    """
    if getattr(message, "flag", False) is False:
        return message
    without: Any = copy(message)
    without.flag = False
    return cast("m.Request", without)


def _without_fileno(message: m.Write) -> m.Refusal:
    """Return the refusal of a WRITE whose fileno is no number (spec W6)."""
    if message.size > limits.MAX_WRITE_BYTES:
        text = b"%d exceeds limit %d" % (message.size, limits.MAX_WRITE_BYTES)
        return refuse(message, invalid("size", text))
    return refuse(message, invalid("fileno", message.token))


def refuse_unsendable(message: m.Request) -> m.Refusal:
    """Return the refusal of a name that parses, but cannot be formatted again.

    For example ``STAT true a CR SPACE``: the host would strip the CR, too.
    """
    return refuse(message, invalid("filename", getattr(message, "name", b"")))


def reply_line(reply: m.Reply) -> bytes:
    """Return the line of a host's reply."""
    if not reply.ok:
        return error(reply.text)
    return b"OK " + reply.text + b"\n" if reply.text else b"OK\n"
