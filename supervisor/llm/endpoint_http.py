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
import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

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

NO_MEMORY = "other requests of this child take its memory; ask again"


class HttpRequest(NamedTuple):
    """A request that has come whole.

    Attributes:
        memory: what is reserved for it, until it is answered.
    """

    method: str
    path: str
    token: str
    body: bytearray
    memory: Reservation


class RefusedRequestError(Exception):
    """A request is answered with an error in the form of the OpenAI API.

    Attributes:
        status: of HTTP.
        kind: what the form calls ``type``.
        code: what it calls ``code``.
        headers: of the reply, beside the usual ones.

    Args:
        retry_after_s: when the client may ask again; None: it is told not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        code: str | None = None,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        # The official clients ask again by themselves unless they are told not to.
        self.headers: Mapping[str, str] = {"x-should-retry": "false"}
        if retry_after_s is not None:
            self.headers = {"retry-after": str(retry_after_s)}

    def body(self) -> bytes:
        """Return the error as JSON."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": str(self),
                    "type": self.kind,
                    "param": None,
                    "code": self.code,
                }
            }
        )


class TooManyBytesError(RefusedRequestError):
    """There is no memory for a request now; there may be in a second."""

    def __init__(self) -> None:
        super().__init__(
            429, NO_MEMORY, "overloaded", "too_many_bytes", retry_after_s=1
        )


class MalformedRequestError(RefusedRequestError):
    """What came is no valid request, or too long; the connection ends with it."""


class HttpConnection:
    """One connection.

    Args:
        stream: it; closed by whoever made it.
        ahead: what another program of this host has received of a request.

    Attributes:
        received: what has come of a request for which nothing is done; None while one
            is answered.
        is_sending: a piece of a reply is on its way.
        is_head: no body is sent for the request.
    """

    def __init__(self, stream: trio.SocketStream, ahead: bytes = b"") -> None:
        self.stream = stream
        self.received: bytearray | None = bytearray(ahead)
        self.is_sending = False
        self.is_head = False
        self._turn_s = 0.0
        self._http = h11.Connection(h11.SERVER)
        if ahead:
            self._http.receive_data(ahead)

    def begin(self) -> None:
        """Take note that the request is being answered from now on."""
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
        self.is_head = head.method == b"HEAD"
        declared = _check_length(head)
        method, path, token = _told(head)
        memory = await admit(token)
        try:
            if declared:
                _begin(memory, (FORMS + 1) * declared)
            body = bytearray()
            while data := await self._piece():
                body += data
                _check_size(len(body))
                if len(body) > declared:
                    reserve(memory, (FORMS + 1) * len(data))
        except BaseException:
            memory.close()
            raise
        return HttpRequest(method, path, token, body, memory)

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
        self._http.receive_data(data)
        if self.received is not None:
            self.received += data
        return bool(data)

    async def wait_gone(self) -> None:
        """Return when the client has closed the connection."""
        data = b""
        while not data:
            data = await self.stream.receive_some(RECEIVE_BYTES)
            if not data:
                return
            self._http.receive_data(data)
        # It has sent its next request already: it wants this one's answer.
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
        await self._send(
            h11.Response(status_code=status, headers=list(headers.items()))
        )
        if not self.is_head:
            await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def refuse(self, why: RefusedRequestError) -> None:
        """Send an error."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self.reply(why.status, why.body(), why.headers)

    async def begin_events(self) -> None:
        """Begin a reply of server-sent events."""
        headers = [("content-type", "text/event-stream"), ("cache-control", "no-store")]
        await self._send(h11.Response(status_code=200, headers=headers))

    async def event(self, data: bytes) -> None:
        """Send one event."""
        await self._send(h11.Data(data=b"data: " + data + b"\n\n"))

    async def end_events(self) -> None:
        """End the reply."""
        await self._send(h11.EndOfMessage())

    async def _send(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
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
            await self.event(why.body())
            await self.end_events()
        else:
            await self.refuse(why)


def _begin(memory: Reservation, size_bytes: int) -> None:
    try:
        memory.begin(size_bytes)
    except OSError:
        raise TooManyBytesError from None


def reserve(memory: Reservation, size_bytes: int) -> None:
    """Reserve so much more for a request, or refuse it."""
    try:
        memory.raise_to(memory.size_bytes + size_bytes)
    except OSError:
        raise TooManyBytesError from None


def _told(head: h11.Request) -> tuple[str, str, str]:
    """Return (method, path, token) of a request."""
    token = ""
    for name, value in head.headers:
        if name == b"authorization":
            scheme, _, rest = value.decode("latin-1").strip().partition(" ")
            # A second one, or another scheme, is no key (attack 34).
            token = "" if token or scheme.lower() != "bearer" else rest.strip()
    path = head.target.decode("latin-1").partition("?")[0]
    return head.method.decode("latin-1"), path, token


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
