"""The way to a provider: connections that are kept, and requests that go out whole.

The transport beneath the client library's own HTTP client, on its connection pool.

Rules of this file.

1. It is imported late, with the library: both take half a second.
2. What is written goes out when an answer is wanted: head and body of a request are one
   segment and wake the server once.  With the layers that are left out on the way back a
   call takes an eighth less processor time, and the host makes those of all children.
3. There are no time limits here: the gateway has one for the whole call (spec L11).
4. Every connection is known by its socket, for the host's account of its descriptors.
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
"""What is held until an answer is wanted; a longer request goes out in such pieces."""

KEPT_CONNECTIONS = 20
"""Connections that wait for the next call, of one provider."""

KEPT_S = 60.0
"""How long they do.  A new one costs a handshake, some 100 ms to a server far away; one
that the server has closed meanwhile is seen before it is used."""

TUNNEL = b"CONNECT "
"""How a request to a proxy begins that asks for a way, and nothing of a model."""

STREAM = "sandhost.stream"
"""A response's extension: its body, without the layers that decode it."""

# The one library's errors are not the other's, and mean the same.
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
def errors_translated() -> Iterator[None]:
    """Raise the client's errors for the pool's."""
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
        """Add one."""
        self.numbers()  # forgets what is closed
        self._open.append(sock)

    def numbers(self) -> list[int]:
        """Return those that are open."""
        self._open = [sock for sock in self._open if sock.fileno() >= 0]
        return [sock.fileno() for sock in self._open]


class Line(httpcore2.AsyncNetworkStream):
    """One connection.

    Args:
        stream: it, encrypted or not.
        sock: what is beneath it.
        ready: called when a request is made, and the network is waited for.
        sent: called when a request has gone out whole.
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
        """Take what is to be sent (rule 2)."""
        del timeout  # rule 3
        self._is_asking = True
        if len(self._unsent) + len(buffer) <= MAX_UNSENT_BYTES:
            self._unsent += buffer
            return
        self._ready()
        await self._send()
        # Not copied, and a piece at a time: to encrypt 16 MiB takes 15 ms (attack 43).
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
            self._is_asking = False  # it never goes out whole
            raise httpcore2.WriteError(_text(why)) from why

    async def read(
        self,
        max_bytes: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's word
    ) -> bytes:
        """Send what was written, and receive."""
        del timeout  # rule 3
        if self._is_asking:
            self._is_asking = False
            is_tunnel = self._unsent.startswith(TUNNEL)
            self._ready()
            # One that refuses may have hung up by now: what it said can still be read.
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
        """Return it encrypted."""
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
        """Return what the pool asks about."""
        if info == "is_readable":  # of one that waits: the server has closed it
            return self._sock.fileno() < 0 or self._sock.is_readable()
        if info == "ssl_object" and isinstance(self._stream, trio.SSLStream):
            return self._stream
        return self._sock if info == "socket" else None


class Network(httpcore2.AsyncNetworkBackend):
    """Makes connections.

    Args:
        ready: see ``Line``.
        sent: as above.
        sockets: is told of each.
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
        """Connect; the last two arguments are never given here."""
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
    """A response's body as the client library reads it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._stream)
        try:
            with errors_translated():
                async for piece in pieces:
                    yield piece
        finally:
            await break_off(pieces)

    async def aclose(self) -> None:
        """End it; what is left of it is not wanted."""
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
    """Beneath one client.

    Args:
        base_url: where its requests go.
        ready: see ``Line``.
        sent: as above.
        sockets: is told of each connection.
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
            network_backend=Network(ready, sent, sockets),
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
        with errors_translated():
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
    """Return the proxy that the host's environment names for an address, if any."""
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
    """End an iterator over a body that is not wanted any more.

    It is a chain of asynchronous generators, none of which may be left to the garbage
    collector; a cancellation where the innermost one receives ends every one of them.
    """
    with trio.CancelScope() as scope:
        scope.cancel()
        async for _ in pieces:
            pass  # what is buffered, 64 KiB at most


def _text(why: BaseException) -> str:
    """Return the first words that an error, or what caused it, has to say."""
    seen: BaseException | None = why
    while seen is not None:
        if text := str(seen):
            return text
        seen = seen.__cause__ or seen.__context__
    return type(why).__name__
