"""The transport to a provider, beneath the client library, on its connection pool.

Rules of this file.

1. It is imported late, with the library: both take half a second.
2. Written bytes are sent when the answer is read: head and body of a request are one
   segment, and wake the server once.  Together with omitted layers for the answer, a call
   takes an eighth less processor time.
3. There are no timeouts here: the gateway has one for the whole call (spec L11).
4. The socket of every connection is recorded, for the host's account of descriptors.
"""

from __future__ import annotations

import ssl
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpcore2
import httpx2
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

MAX_UNSENT_BYTES = 65_536
"""Most bytes that wait until the answer is read; a longer request is sent in such pieces."""

KEPT_CONNECTIONS = 20
"""Most idle connections of one provider."""

KEPT_S = 60.0
"""How long a connection stays idle.  A new one costs a handshake, some 100 ms to a distant
server; one that the server has closed is noticed before it is used."""

TUNNEL = b"CONNECT "
"""The beginning of a request to a proxy, which is no request to the model."""

STREAM = "sandhost.stream"
"""The extension of a response with its body, without the decoding layers."""

# Error of the pool -> error of the client with the same meaning.
_ERRORS: tuple[tuple[type[Exception], type[httpx2.TransportError]], ...] = (
    (httpcore2.ConnectError, httpx2.ConnectError),
    (httpcore2.ReadError, httpx2.ReadError),
    (httpcore2.WriteError, httpx2.WriteError),
    (httpcore2.ProxyError, httpx2.ProxyError),
    (httpcore2.UnsupportedProtocol, httpx2.UnsupportedProtocol),
    (httpcore2.LocalProtocolError, httpx2.LocalProtocolError),
    (httpcore2.RemoteProtocolError, httpx2.RemoteProtocolError),
    (httpcore2.TimeoutException, httpx2.TimeoutException),
    (httpcore2.NetworkError, httpx2.NetworkError),
    (ssl.SSLError, httpx2.ConnectError),
)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the pool's errors of a block into the client's."""
    try:
        yield
    except tuple(theirs for theirs, _ in _ERRORS) as why:
        ours = next(ours for theirs, ours in _ERRORS if isinstance(why, theirs))
        raise ours(str(why)) from why


class Sockets:
    """The sockets of a client."""

    def __init__(self) -> None:
        self._open: list[trio.socket.SocketType] = []

    def add(self, sock: trio.socket.SocketType) -> None:
        """Add a socket, and forget closed ones."""
        self.numbers()
        self._open.append(sock)

    def numbers(self) -> list[int]:
        """Return the descriptors of open sockets."""
        self._open = [sock for sock in self._open if sock.fileno() >= 0]
        return [sock.fileno() for sock in self._open]


class Line(httpcore2.AsyncNetworkStream):
    """One connection.

    Args:
        stream: the connection, encrypted or not.
        sock: its socket.
        ready: called when a request is prepared, before waiting for the network.
        sent: called when a request was sent completely.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        sock: trio.socket.SocketType,
        ready: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._sock = sock
        self._ready = ready
        self._sent = sent
        self._unsent = bytearray()
        self._is_asking = False

    async def write(
        self,
        buffer: bytes,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's word
    ) -> None:
        """Buffer bytes to send (rule 2)."""
        del timeout  # rule 3
        self._is_asking = True
        if len(self._unsent) + len(buffer) <= MAX_UNSENT_BYTES:
            self._unsent += buffer
            return
        self._ready()
        await self._send()
        # Without copies, in pieces: encrypting 16 MiB takes 15 ms (attack 43).
        view = memoryview(buffer)
        for start in range(0, len(view), MAX_UNSENT_BYTES):
            await self._send_piece(view[start : start + MAX_UNSENT_BYTES])

    async def _send(self) -> None:
        data = bytes(self._unsent)
        self._unsent.clear()
        await self._send_piece(data)

    async def _send_piece(self, data: bytes | memoryview) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as why:
            self._is_asking = False  # it is never sent completely
            raise httpcore2.WriteError(_text(why)) from why

    async def read(
        self,
        max_bytes: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's word
    ) -> bytes:
        """Send buffered bytes, and receive."""
        del timeout  # rule 3
        if self._is_asking:
            self._is_asking = False
            is_tunnel = self._unsent.startswith(TUNNEL)
            self._ready()
            # A server that refuses may have closed; its reply can still be read.
            with suppress(httpcore2.WriteError):
                await self._send()
                if not is_tunnel:
                    self._sent()
        try:
            return bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as why:
            raise httpcore2.ReadError(_text(why)) from why

    async def aclose(self) -> None:
        """Close it."""
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's word
    ) -> Line:
        """Return the connection with TLS."""
        del timeout  # rule 3
        stream = trio.SSLStream(
            self._stream,
            ssl_context,
            server_hostname=server_hostname,
            https_compatible=True,
        )
        try:
            await stream.do_handshake()
        except (trio.BrokenResourceError, ssl.SSLError) as why:
            await trio.aclose_forcefully(stream)
            raise httpcore2.ConnectError(_text(why)) from why
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return Line(stream, self._sock, self._ready, self._sent)

    def get_extra_info(self, info: str) -> Any:
        """Return a property of the connection for the pool."""
        if info == "is_readable":  # an idle connection that the server has closed
            return self._sock.fileno() < 0 or self._sock.is_readable()
        if info == "ssl_object" and isinstance(self._stream, trio.SSLStream):
            return self._stream
        return self._sock if info == "socket" else None


class NetworkBackend(httpcore2.AsyncNetworkBackend):
    """Makes connections.

    Args:
        ready: see ``Line``.
        sent: see ``Line``.
        sockets: gets the socket of each connection.
    """

    def __init__(
        self, ready: Callable[[], None], sent: Callable[[], None], sockets: Sockets
    ) -> None:
        self._ready = ready
        self._sent = sent
        self._sockets = sockets

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's word
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> Line:
        """Connect; the last two arguments are never used here."""
        del timeout, local_address, socket_options
        self._ready()
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError as why:
            raise httpcore2.ConnectError(_text(why)) from why
        self._sockets.add(stream.socket)
        return Line(stream, stream.socket, self._ready, self._sent)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await trio.sleep(seconds)


class Body(httpx2.AsyncByteStream):
    """A response's body, for the client library."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._stream)
        try:
            with translate_errors():
                async for piece in pieces:
                    yield piece
        finally:
            await break_off(pieces)

    async def aclose(self) -> None:
        """Close the body without reading the rest."""
        await self._stream.aclose()


class BoundedBody(httpx2.AsyncByteStream):
    """A body that ends at a bound.

    Args:
        stream: the body.
        size_bytes: the bound.
    """

    def __init__(self, stream: httpx2.AsyncByteStream, size_bytes: int) -> None:
        self._stream = stream
        self._size_bytes = size_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._size_bytes
        pieces = aiter(self._stream)
        async for piece in pieces:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                break
        await break_off(pieces)

    async def aclose(self) -> None:
        """End it."""
        await self._stream.aclose()


class Transport(httpx2.AsyncBaseTransport):
    """The transport of one client.

    Args:
        base_url: the address of its requests.
        ready: see ``Line``.
        sent: see ``Line``.
        sockets: gets the socket of each connection.
    """

    def __init__(
        self,
        base_url: str,
        ready: Callable[[], None],
        sent: Callable[[], None],
        sockets: Sockets,
    ) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpx2.create_ssl_context(),
            proxy=proxy_for(base_url),
            # One child must not use up the connections of another (spec S7).
            max_connections=None,
            max_keepalive_connections=KEPT_CONNECTIONS,
            keepalive_expiry=KEPT_S,
            network_backend=NetworkBackend(ready, sent, sockets),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and return the head of its answer."""
        url = request.url
        asked = httpcore2.Request(
            request.method,
            httpcore2.URL(
                scheme=url.raw_scheme,
                host=url.raw_host,
                port=url.port,
                target=url.raw_path,
            ),
            headers=request.headers.raw,
            content=request.stream,
        )
        with translate_errors():
            answer = await self._pool.handle_async_request(asked)
        return httpx2.Response(
            answer.status,
            headers=answer.headers,
            stream=Body(answer.stream),
            extensions={**answer.extensions, STREAM: answer.stream},
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._pool.aclose()


def proxy_for(base_url: str) -> httpcore2.Proxy | None:
    """Return the proxy for an address in the host's environment, if any."""
    parts = urlsplit(base_url)
    known = getproxies()
    found = known.get(parts.scheme) or known.get("all")
    if not found or proxy_bypass(parts.hostname or ""):
        return None
    proxy = urlsplit(found if "://" in found else f"http://{found}")
    auth = None
    if proxy.username is not None:
        auth = (unquote(proxy.username), unquote(proxy.password or ""))
    host = proxy.netloc.rpartition("@")[2]
    return httpcore2.Proxy(f"{proxy.scheme}://{host}", auth=auth)


async def break_off(pieces: AsyncIterator[bytes]) -> None:
    """Close an iterator over a body that is not needed any more.

    It is a chain of asynchronous generators, which may not be left to the garbage
    collector; a cancellation in the innermost one ends all of them.
    """
    with trio.CancelScope() as scope:
        scope.cancel()
        async for _ in pieces:
            pass  # buffered bytes, at most 64 KiB


def _text(why: BaseException) -> str:
    """Return the first text of an error or its causes."""
    seen: BaseException | None = why
    while seen is not None:
        if text := str(seen):
            return text
        seen = seen.__cause__ or seen.__context__
    return type(why).__name__
