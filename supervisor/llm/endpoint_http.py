"""One HTTP/1.1 connection of the endpoint: requests in, replies out, on h11.

Rules of this file.

1. A request that began is complete within ``DEADLINE_S``, and a reply is taken within
   it; between requests a connection may idle, until room is needed.
2. A body is bounded; what is longer is refused and the connection ends.
3. What h11 does not accept (attack 33) is answered 400, and the connection ends.
4. Of a body nothing is kept before its head was admitted: by its token (401), and by the
   memory that it may take (429, attack 42). What was refused so is received all the same,
   and nothing of it is kept: else the client might never read why.
5. However small the pieces of a body are, others have their turn each millisecond.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import h11
import trio

from supervisor.llm.apis import ASKABLE
from supervisor.llm.errors import (
    MalformedRequestError,
    TooLargeRequestError,
    TooManyBytesError,
)
from vfs.ledger import MOST_MEMORY_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from supervisor.llm.errors import RefusedRequestError
    from vfs.payload import Reservation

DEADLINE_S = 30.0
"""From the first byte of a request to its last; the same for a piece of a reply."""

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Longest request: twice what LLM_CHAT takes, for JSON escapes and base64 grow it."""

RECEIVE_BYTES = 65_536

TURN_S = 0.001
"""How long the pieces of a body are taken apart before others have their turn."""

FORMS = 4
"""In so many forms a body is there beside the decoded one: as it came, for the next program of
the host and alone, and as it is measured and sent."""


class HttpRequest(NamedTuple):
    """A request that has come whole.

    Attributes:
        path: without what stands behind a question mark.
        headers: those that belong to an API.
        is_upgrade: a WebSocket is asked for (RFC 6455 4.1).
        memory: what is reserved for it, until it is answered.
    """

    method: str
    path: str
    token: str
    headers: dict[str, str]
    is_upgrade: bool
    body: bytearray
    memory: Reservation


class ConnectionTestError(Exception):
    """A client asks whether something is there, with ``HEAD /`` and no token."""


class HttpConnection:
    """One connection.

    Args:
        stream: it; closed by its maker.
        ahead: what another program of this host has received of a request.

    Attributes:
        received: what has come of a request for which nothing is done; None while one
            is answered.
        is_sending: a piece of a reply is on its way.
        is_head: no body is sent for the request.
        form: of errors: that of the API that is asked by.
        failing: returns what is sent where a stream ends with an error; None: no stream.
    """

    def __init__(self, stream: trio.SocketStream, ahead: bytes = b"") -> None:
        self.stream = stream
        self.received: bytearray | None = bytearray(ahead)
        self.is_sending = False
        self.is_head = False
        self.form = "openai"
        self.failing: Callable[[RefusedRequestError], list[bytes]] | None = None
        self._turn_s = 0.0
        self._http = h11.Connection(h11.SERVER)
        if ahead:
            self._http.receive_data(ahead)

    def begin(self) -> None:
        """Mark the request as one that is being answered."""
        self.received = None

    async def request(
        self, admit: Callable[[str], Awaitable[Reservation]]
    ) -> HttpRequest | None:
        """Return the next request; None at the end of the connection.

        Args:
            admit: returns, for the token of a request, where its memory is reserved; it
                may raise a refusal.

        Raises:
            RefusedRequestError: it is refused, too long or malformed.
            TooSlowError: it did not come in time.
        """
        try:
            event = self._http.next_event()
            while event is h11.NEED_DATA and not self._http.trailing_data[0]:
                if not await self._receive():  # idle: no deadline
                    return None
                event = self._http.next_event()
            with trio.fail_after(DEADLINE_S):
                return await self._whole(event, admit)
        except h11.RemoteProtocolError as why:
            raise _malformed(str(why), why.error_status_hint) from None
        except ValueError:  # a length of thousands of digits
            raise _malformed("bad Content-Length") from None

    async def _whole(
        self, event: Any, admit: Callable[[str], Awaitable[Reservation]]
    ) -> HttpRequest | None:
        while event is h11.NEED_DATA:
            await self._receive()
            event = self._http.next_event()
        if not isinstance(event, h11.Request):
            return None
        head = event
        told = _Head(head)
        self.is_head = told.method == "HEAD"
        self.form = told.form
        self.failing = None
        declared = _check_length(head)
        if self.is_head and told.path == "/":
            raise ConnectionTestError
        memory = await admit(told.token)
        try:
            if declared:
                reserve(memory, (FORMS + 1) * declared)
            body = bytearray()
            while data := await self._piece():
                body += data
                _check_size(len(body))
                if len(body) > declared:
                    reserve(memory, (FORMS + 1) * len(data))
        except BaseException:
            memory.close()
            raise
        return HttpRequest(
            method=told.method,
            path=told.path,
            token=told.token,
            headers=told.headers,
            is_upgrade=told.is_upgrade,
            body=body,
            memory=memory,
        )

    async def _piece(self) -> bytes:
        """Return the next piece of the current request's body; nothing at its end."""
        if time.monotonic() > self._turn_s:
            await trio.lowlevel.checkpoint()
            self._turn_s = time.monotonic() + TURN_S
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        while (event := self._http.next_event()) is h11.NEED_DATA:
            await self._receive()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def discard(self) -> None:
        """Receive what is left of a refused request, and keep nothing of it."""
        http = self._http
        if (
            http.their_state is h11.SEND_BODY
            and not http.they_are_waiting_for_100_continue
        ):
            left = MAX_BODY_BYTES
            with trio.fail_after(DEADLINE_S):
                while left > 0 and (data := await self._piece()):
                    left -= len(data)

    async def _receive(self) -> bool:
        data = await self.stream.receive_some(RECEIVE_BYTES)
        self._turn_s = time.monotonic() + TURN_S  # others had theirs meanwhile
        self._http.receive_data(data)
        if self.received is not None:
            self.received += data
        return bool(data)

    async def wait_gone(self) -> None:
        """Return when the client has closed the connection.

        What it sends before is kept for its next request. Of that no more is kept than
        ``RECEIVE_BYTES``: a client that sends more is not seen to go.
        """
        room_bytes = RECEIVE_BYTES
        while room_bytes > 0:
            data = await self.stream.receive_some(room_bytes)
            if not data:
                return
            self._http.receive_data(data)
            room_bytes -= len(data)
        await trio.sleep_forever()

    async def reply(
        self, status: int, body: bytes, more: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole reply."""
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **(more or {}),
        }
        head = h11.Response(status_code=status, headers=list(headers.items()))
        sent = () if self.is_head else (h11.Data(data=body),)
        await self._send(head, *sent, h11.EndOfMessage())

    async def refuse(self, why: RefusedRequestError) -> None:
        """Send an error."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self.reply(why.status, why.body(self.form), why.headers)

    async def begin_events(
        self, frames: bytes, failing: Callable[[RefusedRequestError], list[bytes]]
    ) -> None:
        """Begin a reply of server-sent events.

        Args:
            frames: the first events, as they are framed.
            failing: returns what is sent where it ends with an error.
        """
        self.failing = failing
        headers = [("content-type", "text/event-stream"), ("cache-control", "no-store")]
        head = h11.Response(status_code=200, headers=headers)
        await self._send(head, h11.Data(data=frames))

    async def events(self, frames: bytes) -> None:
        """Send events, as they are framed."""
        await self._send(h11.Data(data=frames))

    async def end_events(self, frames: bytes = b"") -> None:
        """Send the last events, and end the reply."""
        await self._send(h11.Data(data=frames), h11.EndOfMessage())

    async def _send(self, *events: Any) -> None:
        """Send parts of a reply; short ones together, so that the client wakes once."""
        pieces = [data for one in events if (data := self._http.send(one))]
        if sum(map(len, pieces)) <= RECEIVE_BYTES:
            pieces = [b"".join(pieces)]
        for data in filter(None, pieces):
            self.is_sending = True
            with trio.fail_after(DEADLINE_S):
                await self.stream.send_all(data)
            self.is_sending = False

    def next_cycle(self) -> bool:
        """Make ready for another request; False if there can be none."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self.received = bytearray(self._http.trailing_data[0])
            return True
        return False

    async def interrupt(self, why: RefusedRequestError) -> None:
        """End the reply under way with an error, where one can still be said."""
        if self.is_sending:  # who knows how much of it
            return
        if self._http.our_state is h11.SEND_BODY:
            for frame in () if self.failing is None else self.failing(why):
                await self.events(frame)
            await self.end_events()
        else:
            await self.refuse(why)


def reserve(memory: Reservation, size_bytes: int) -> None:
    """Reserve so much more for a request, or refuse it.

    What would not fit even if nothing else were there is refused for good.
    """
    size_bytes += memory.size_bytes
    if size_bytes > MOST_MEMORY_BYTES:
        raise TooLargeRequestError(size_bytes, MOST_MEMORY_BYTES)
    try:
        memory.raise_to(size_bytes)
    except OSError:
        raise TooManyBytesError from None


def reserve_answer(memory: Reservation, size_bytes: int) -> None:
    """Reserve so much more for an answer, or refuse its request."""
    try:
        memory.add(size_bytes)
    except OSError:
        raise TooManyBytesError from None


class _Head:
    """What the head of a request says."""

    def __init__(self, head: h11.Request) -> None:
        self.method = head.method.decode("latin-1")
        self.path = head.target.decode("latin-1").partition("?")[0]
        self.headers: dict[str, str] = {}
        self.is_upgrade = False
        tokens: list[tuple[bytes, str]] = []
        for name, value in head.headers:
            text = value.decode("latin-1").strip()
            if name == b"authorization":
                scheme, _, rest = text.partition(" ")
                is_bearer = scheme.lower() == "bearer"
                tokens.append((name, rest.strip() if is_bearer else ""))
            elif name == b"x-api-key":
                tokens.append((name, text))
            elif name == b"upgrade":
                offered = [one.strip() for one in text.lower().split(",")]
                self.is_upgrade |= self.method == "GET" and "websocket" in offered
            elif name in _API_HEADERS:
                known = self.headers.get(name.decode())
                self.headers[name.decode()] = f"{known}, {text}" if known else text
        # A header that comes twice, two tokens, or another scheme, are none (attack 34).
        is_one = (
            len(dict(tokens)) == len(tokens) and len(set(dict(tokens).values())) == 1
        )
        self.token = tokens[0][1] if is_one else ""
        is_messages = self.path.startswith("/v1/messages") or (
            self.path.startswith("/v1/models") and "anthropic-version" in self.headers
        )
        self.form = "messages" if is_messages else "openai"


_API_HEADERS = frozenset(
    name.encode() for api in ASKABLE.values() for name in api.headers
)


def _check_length(head: Any) -> int:
    """Return the length that a request declares; 0 if it declares none.

    What says its length twice may be two requests to others (RFC 9112 6.1).
    """
    told = dict(head.headers)
    if {b"content-length", b"transfer-encoding"} <= told.keys():
        raise _malformed("both Content-Length and Transfer-Encoding")
    length = int(told.get(b"content-length", b"0"))
    _check_size(length)
    return length


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_BODY_BYTES:
        raise _malformed(f"more than {MAX_BODY_BYTES} bytes", 413)


def _malformed(text: str, status: int = 400) -> MalformedRequestError:
    return MalformedRequestError(status or 400, text, "invalid_request_error")
