"""One HTTP/1.1 connection of a server, on h11: requests in, replies out.

Rules of this file.

1. Between requests a connection may idle.  A request that began must be complete within
   its deadline, and the client must take each piece of a reply within it.
2. A request that h11 refuses, or that two servers could read in two ways, is refused, and
   the connection ends (attack 33, RFC 9112 6.1).
3. Other tasks run each millisecond, however small the pieces of a body are.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

import h11
import trio

RECEIVE_BYTES = 65_536

TURN_S = 0.001
"""How long the pieces of a body are parsed before other tasks run."""


class FramingError(Exception):
    """A request that cannot be accepted.

    Attributes:
        status: the status of the reply, if a reply can still be sent.
        head: the request's head, if it could be read.
    """

    def __init__(
        self, text: str, status: int = 400, head: h11.Request | None = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.head = head


class Connection:
    """One connection of a server.

    Args:
        stream: its socket; the caller closes it.
        deadline_s: see rule 1.
        max_head_bytes: longest head of a request.
        ahead: bytes of a request that the program before this one has received.

    Attributes:
        stream: as above.
        scope: the scope of its service: cancelled to make room.
        idle_since: the end of the last request; None while a request is received or
            answered.
        received: received bytes of a request that is not answered yet; None while one
            is answered.
        is_head: the request is HEAD, so its reply has no body.
        is_sending: a piece of a reply is being sent.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        deadline_s: float,
        *,
        max_head_bytes: int = 16_384,
        ahead: bytes = b"",
    ) -> None:
        self.stream = stream
        self.scope = trio.CancelScope()
        self.idle_since: float | None = trio.current_time()
        self.received: bytearray | None = bytearray(ahead)
        self.is_head = False
        self.is_sending = False
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=max_head_bytes)
        self._deadline_s = deadline_s
        self._complete_by_s = math.inf
        self._turn_s = 0.0
        if ahead:
            self.http.receive_data(ahead)

    # The request

    async def receive_head(self) -> h11.Request | None:
        """Return the head of the next request; None at the end of the connection.

        Raises:
            FramingError: the bytes are no acceptable head.
            TooSlowError: the head did not come in time.
        """
        if self.http.trailing_data[0]:
            self._begin_deadline()
        event = self._next_event()
        while event is h11.NEED_DATA:
            if await self._receive():
                self._begin_deadline()
            event = self._next_event()
        if not isinstance(event, h11.Request):
            return None
        self.is_head = event.method == b"HEAD"
        if {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
            text = "both Content-Length and Transfer-Encoding"
            raise FramingError(text, head=event)
        return event

    async def receive_piece(self) -> bytes:
        """Return the next piece of the request's body; empty at its end.

        Raises:
            FramingError: the bytes are no body.
            TooSlowError: the piece did not come in time.
        """
        if time.monotonic() > self._turn_s:
            await trio.lowlevel.checkpoint()
            self._turn_s = time.monotonic() + TURN_S
        if self.http.they_are_waiting_for_100_continue:
            await self.send(h11.InformationalResponse(status_code=100, headers=[]))
        while (event := self._next_event()) is h11.NEED_DATA:
            await self._receive()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def discard(self, most_bytes: int) -> None:
        """Receive and drop the rest of a refused request.

        Raises:
            TooSlowError: the rest did not come in time.
        """
        if self.http.their_state is not h11.SEND_BODY:
            return
        self._complete_by_s = trio.current_time() + self._deadline_s
        with suppress(FramingError):  # the connection ends then, without a next request
            while most_bytes > 0 and (data := await self.receive_piece()):
                most_bytes -= len(data)

    def begin(self) -> None:
        """Mark that the request is being answered."""
        self.received = None

    def _begin_deadline(self) -> None:
        if self.idle_since is not None:
            self.idle_since = None
            self._complete_by_s = trio.current_time() + self._deadline_s

    def _next_event(self) -> Any:
        try:
            return self.http.next_event()
        except h11.RemoteProtocolError as why:
            raise FramingError(str(why), why.error_status_hint) from None
        except ValueError:  # a length of thousands of digits
            raise FramingError("bad Content-Length") from None

    async def _receive(self) -> bool:
        with trio.fail_at(self._complete_by_s):
            data = await self.stream.receive_some(RECEIVE_BYTES)
        self._turn_s = time.monotonic() + TURN_S  # other tasks ran meanwhile
        self.http.receive_data(data)
        if self.received is not None:
            self.received += data
        return bool(data)

    async def wait_gone(self) -> None:
        """Return when the client has closed the connection.

        Bytes that the client sends before are kept for its next request, at most
        ``RECEIVE_BYTES``: the end of a client that sends more is not noticed.
        """
        room_bytes = RECEIVE_BYTES
        while room_bytes > 0:
            data = await self.stream.receive_some(room_bytes)
            if not data:
                return
            self.http.receive_data(data)
            room_bytes -= len(data)
        await trio.sleep_forever()

    # The reply

    @property
    def can_reply(self) -> bool:
        """Whether no reply to the request has begun."""
        return self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    async def reply(
        self, status: int, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        """Send a whole reply; ``headers`` must give its length.

        Raises:
            TooSlowError: the client does not take it.
        """
        head = h11.Response(status_code=status, headers=headers)
        sent = () if self.is_head else (h11.Data(data=body),)
        await self.send(head, *sent, h11.EndOfMessage())

    async def send(self, *events: Any) -> None:
        """Send parts of a reply; short ones together, so that the client wakes once.

        Raises:
            TooSlowError: the client does not take them.
        """
        pieces = [data for one in events if (data := self.http.send(one))]
        if sum(map(len, pieces)) <= RECEIVE_BYTES:
            pieces = [b"".join(pieces)]
        for data in filter(None, pieces):
            self.is_sending = True
            with trio.fail_after(self._deadline_s):
                await self.stream.send_all(data)
            self.is_sending = False

    def next_cycle(self) -> bool:
        """Prepare for another request; return False if there can be none."""
        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()
            self.received = bytearray(self.http.trailing_data[0])
            self.idle_since = trio.current_time()
            self._complete_by_s = math.inf
            return True
        return False
