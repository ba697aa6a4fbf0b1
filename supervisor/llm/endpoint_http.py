"""One HTTP/1.1 connection of the endpoint: requests of APIs in, replies out.

Rules of this file.

1. A body is bounded; a longer one is refused, and the connection ends.
2. A body is kept only after its head was admitted: by its token (401), and by the memory
   that it may take (429, attack 42).  A refused body is received and dropped, so that the
   client reads the refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import h11

from hostlib import http1
from supervisor.llm.apis import ASKABLE
from supervisor.llm.errors import (
    MalformedRequestError,
    TooLargeRequestError,
    TooManyBytesError,
)
from vfs.ledger import MOST_MEMORY_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import trio

    from supervisor.llm.errors import RefusedRequestError
    from vfs.payload import MemoryReservation

DEADLINE_S = 30.0
"""Longest time from the first byte of a request, or of a reply's piece, to its last."""

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Longest request: twice what LLM_CHAT takes, for JSON escapes and base64 grow it."""

FORMS = 4
"""Copies of a body beside the decoded one: the received bytes, for a hand-over and alone, and
the measured and the sent request."""


_API_HEADERS = frozenset(
    name.encode() for api in ASKABLE.values() for name in api.headers
)


class RequestHead:
    """The parts of a request's head that are used.

    Attributes:
        method: the method.
        path: the path, without a query.
        token: the child's token; empty if there is none, or more than one.
        headers: the headers of an API.
        is_upgrade: the client asks for a WebSocket (RFC 6455 4.1).
        form: the form of errors, of the API of the request.
    """

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
        # Repeated headers, two tokens or another scheme count as no token (attack 34).
        is_one = (
            len(dict(tokens)) == len(tokens) and len(set(dict(tokens).values())) == 1
        )
        self.token = tokens[0][1] if is_one else ""
        is_messages = self.path.startswith("/v1/messages") or (
            self.path.startswith("/v1/models") and "anthropic-version" in self.headers
        )
        self.form = "messages" if is_messages else "openai"


class HttpRequest(NamedTuple):
    """A complete request.

    Attributes:
        head: its head.
        body: its body.
        memory: the reservation for it, until it is answered.
    """

    head: RequestHead
    body: bytearray
    memory: MemoryReservation


class ConnectionTestError(Exception):
    """A client tests the connection with ``HEAD /`` and no token."""


class HttpConnection(http1.Connection):
    """One connection of the endpoint.

    Args:
        stream: its socket; the caller closes it.
        ahead: bytes of a request that the program before has received.

    Attributes:
        form: the form of errors, of the API of the request.
        failing: returns the frames of an error in a stream; None without a stream.
    """

    def __init__(self, stream: trio.SocketStream, ahead: bytes = b"") -> None:
        super().__init__(stream, DEADLINE_S, ahead=ahead)
        self.form = "openai"
        self.failing: Callable[[RefusedRequestError], list[bytes]] | None = None

    async def request(
        self, admit: Callable[[str], Awaitable[MemoryReservation]]
    ) -> HttpRequest | None:
        """Return the next request; None at the end of the connection.

        Args:
            admit: returns the reservation of memory for the token of a request, or raises
                a refusal.

        Raises:
            RefusedRequestError: the request is refused, too long or malformed.
            TooSlowError: the request did not come in time.
        """
        try:
            head = await self.receive_head()
            return None if head is None else await self._whole(head, admit)
        except http1.FramingError as why:
            if why.head is not None:
                self.form = RequestHead(why.head).form
            raise _malformed(str(why), why.status) from None

    async def _whole(
        self, head: h11.Request, admit: Callable[[str], Awaitable[MemoryReservation]]
    ) -> HttpRequest:
        told = RequestHead(head)
        self.form = told.form
        self.failing = None
        for name, value in told.headers.items():
            if not value.isascii():  # it could not be passed on
                raise _malformed(f"the header {name} has characters beyond ASCII", 400)
        declared = int(dict(head.headers).get(b"content-length", b"0"))
        _check_size(declared)
        if self.is_head and told.path == "/":
            raise ConnectionTestError
        memory = await admit(told.token)
        try:
            if declared:
                reserve(memory, (FORMS + 1) * declared)
            body = bytearray()
            while data := await self.receive_piece():
                body += data
                _check_size(len(body))
                if len(body) > declared:
                    reserve(memory, (FORMS + 1) * len(data))
        except BaseException:
            memory.close()
            raise
        return HttpRequest(told, body, memory)

    async def answer(
        self, status: int, body: bytes, more: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole reply in JSON."""
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **(more or {}),
        }
        await self.reply(status, list(headers.items()), body)

    async def refuse(self, why: RefusedRequestError) -> None:
        """Send an error."""
        if self.can_reply:
            await self.answer(why.status, why.body(self.form), why.headers)

    async def begin_events(
        self, frames: bytes, failing: Callable[[RefusedRequestError], list[bytes]]
    ) -> None:
        """Begin a reply of server-sent events.

        Args:
            frames: the frames of the first events.
            failing: returns the frames of an error.
        """
        self.failing = failing
        headers = [("content-type", "text/event-stream"), ("cache-control", "no-store")]
        head = h11.Response(status_code=200, headers=headers)
        await self.send(head, h11.Data(data=frames))

    async def events(self, frames: bytes) -> None:
        """Send frames of events."""
        await self.send(h11.Data(data=frames))

    async def end_events(self, frames: bytes = b"") -> None:
        """Send the last events, and end the reply."""
        await self.send(h11.Data(data=frames), h11.EndOfMessage())

    async def interrupt(self, why: RefusedRequestError) -> None:
        """End the present reply with an error, if one can still be sent."""
        if self.is_sending:  # an unknown part of a piece was sent
            return
        if self.http.our_state is h11.SEND_BODY:
            for frame in () if self.failing is None else self.failing(why):
                await self.events(frame)
            await self.end_events()
        else:
            await self.refuse(why)


def reserve(memory: MemoryReservation, size_bytes: int) -> None:
    """Reserve more memory for a request, or raise its refusal.

    A request that is larger than the whole bound gets a final refusal.
    """
    size_bytes += memory.size_bytes
    if size_bytes > MOST_MEMORY_BYTES:
        raise TooLargeRequestError(size_bytes, MOST_MEMORY_BYTES)
    try:
        memory.raise_to(size_bytes)
    except OSError:
        raise TooManyBytesError from None


def reserve_answer(memory: MemoryReservation, size_bytes: int) -> None:
    """Reserve more memory for an answer, or raise the refusal of its request."""
    try:
        memory.add(size_bytes)
    except OSError:
        raise TooManyBytesError from None


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_BODY_BYTES:
        raise _malformed(f"more than {MAX_BODY_BYTES} bytes", 413)


def _malformed(text: str, status: int) -> MalformedRequestError:
    return MalformedRequestError(status or 400, text, "invalid_request_error")
