"""The connections to a provider, made by the HTTP library.

Rules of this file.

1. It is imported late, with the library: both take half a second.
2. There are no timeouts here: the gateway has one for the whole call (spec L11).
3. The library's trace tells when a request is prepared, when it was sent completely, and
   the socket of each connection, for the host's account of descriptors.
"""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

PIECE_BYTES = 65_536
"""The piece of a request that is sent at once: encrypting 16 MiB takes 15 ms (attack 43)."""

KEPT_CONNECTIONS = 20
"""Most idle connections of one provider."""

KEPT_S = 60.0
"""How long a connection stays idle.  A new one costs a handshake, some 100 ms to a distant
server; one that the server has closed is noticed before it is used."""

MAX_ERROR_BYTES = 65_536
"""Longest body of a refusal that is read."""

NOT_PACKED = "identity"
"""The one encoding of answers that is asked for and read."""

# Before the first byte of a request, and before waiting for the network.
_PREPARED = ("connection.connect_tcp.started", "http11.send_request_headers.started")


class Transport(httpx2.AsyncHTTPTransport):
    """The connections of one client.

    Args:
        base_url: the address of its requests.
        ready: called when a request is prepared, before waiting for the network.
        sent: called when a request was sent completely.

    Attributes:
        ready: as above.
        sent: as above.

    Raises:
        OSError: the proxy of the host's environment cannot be used.
    """

    def __init__(
        self, base_url: str, ready: Callable[[], None], sent: Callable[[], None]
    ) -> None:
        # One child must not use up the connections of another (spec S7).
        limits = httpx2.Limits(
            max_connections=None,
            max_keepalive_connections=KEPT_CONNECTIONS,
            keepalive_expiry=KEPT_S,
        )
        super().__init__(limits=limits, proxy=proxy_for(base_url))
        self.ready = ready
        self.sent = sent
        self._sockets: list[trio.socket.SocketType] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and return the head of its answer."""
        trace = _Trace(self)
        request.extensions = {**request.extensions, "trace": trace.note}
        if len(request.content) > PIECE_BYTES:
            request.stream = _Pieces(request.content)
        try:
            answer = await super().handle_async_request(request)
        except BaseException:
            # The library leaves one open that is cancelled in its handshake.
            for sock in trace.made:
                sock.close()
            raise
        most_bytes = sys.maxsize
        if answer.status_code >= 300:
            # The client library reads the whole body of a refusal, in the charset of its
            # head.  Some codecs of Python raise what no caller expects.
            most_bytes = MAX_ERROR_BYTES
            answer.headers["Content-Type"] = "application/json"
        # The library would unpack 400 bytes to gigabytes at once.
        packing = answer.headers.pop("Content-Encoding", NOT_PACKED)
        answer.stream = _Body(
            cast("httpx2.AsyncByteStream", answer.stream), most_bytes, packing
        )
        return answer

    def add(self, sock: trio.socket.SocketType) -> None:
        """Add the socket of a new connection, and forget closed ones."""
        self._sockets = [*self._open(), sock]

    def _open(self) -> list[trio.socket.SocketType]:
        return [sock for sock in self._sockets if sock.fileno() >= 0]

    def numbers(self) -> list[int]:
        """Return the descriptors of open connections."""
        return [sock.fileno() for sock in self._open()]


class _Trace:
    """The library's trace of one request.

    Its names are the library's; tests of charges fail where it renames one.

    Attributes:
        made: the sockets of connections that were made for the request.
    """

    def __init__(self, transport: Transport) -> None:
        self.made: list[trio.socket.SocketType] = []
        self._transport = transport
        self._is_tunnel = False  # a request to a proxy is none to the model

    async def note(self, event: str, info: Mapping[str, Any]) -> None:
        """Take in an event."""
        if event in _PREPARED:
            self._transport.ready()
        elif event == "http11.send_request_body.started":
            self._is_tunnel = info["request"].method == b"CONNECT"
        elif event == "http11.send_request_body.complete" and not self._is_tunnel:
            self._transport.sent()
        elif event == "connection.connect_tcp.complete":
            sock = info["return_value"].get_extra_info("socket")
            self.made.append(sock)
            self._transport.add(sock)


class _Pieces(httpx2.AsyncByteStream):
    """A long request, in pieces."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), PIECE_BYTES):
            yield self._body[start : start + PIECE_BYTES]


class _Body(httpx2.AsyncByteStream):
    """The body of an answer, up to a bound.

    Args:
        stream: the body.
        most_bytes: the bound.
        packing: its encoding, as its head tells it.
    """

    def __init__(
        self, stream: httpx2.AsyncByteStream, most_bytes: int, packing: str
    ) -> None:
        self._stream = stream
        self._most_bytes = most_bytes
        self._packing = packing

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield its pieces.

        Raises:
            httpx2.DecodingError: it is packed.
        """
        if self._packing.lower() != NOT_PACKED:
            text = f"the answer is packed ({self._packing}); {NOT_PACKED} was asked for"
            raise httpx2.DecodingError(text)
        left = self._most_bytes
        pieces = aiter(self._stream)
        try:
            async for piece in pieces:
                yield piece[:left]
                left -= len(piece)
                if left <= 0:
                    break
        finally:
            await break_off(pieces)

    async def aclose(self) -> None:
        """Close the body without reading the rest."""
        await self._stream.aclose()


def proxy_for(base_url: str) -> httpx2.Proxy | None:
    """Return the proxy for an address in the host's environment, if any.

    Raises:
        OSError: it is no address of an HTTP proxy.
    """
    parts = urlsplit(base_url)
    known = getproxies()
    found = known.get(parts.scheme) or known.get("all")
    if not found or proxy_bypass(parts.hostname or ""):
        return None
    address = found if "://" in found else f"http://{found}"
    try:
        proxy = httpx2.Proxy(address)
    except (ValueError, httpx2.InvalidURL):
        proxy = None
    if proxy is None or proxy.url.scheme not in ("http", "https") or not proxy.url.host:
        # Its text may hold a password.
        text = "cannot use the proxy of the environment: it is no HTTP proxy's address"
        advice = f"set {parts.scheme}_proxy or all_proxy to one, or set no_proxy"
        raise OSError(errno.EINVAL, f"{text}; {advice}")
    return proxy


async def break_off(pieces: AsyncIterator[bytes]) -> None:
    """Close an iterator over a body that is not needed any more.

    It is a chain of asynchronous generators, which may not be left to the garbage
    collector; a cancellation in the innermost one ends all of them.
    """
    # A fault in the rest does not matter any more.
    unwanted = suppress(httpx2.HTTPError, httpx2.StreamError)
    with trio.CancelScope() as scope, unwanted:
        scope.cancel()
        async for _ in pieces:
            pass  # buffered bytes, at most 64 KiB
