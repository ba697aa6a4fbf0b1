"""Serves plain HTTP to a child, and calls a credential's host by TLS (NET15).

1. Each request is judged by the rules of its moment, and has a connection of its own.
2. Bytes are read from one side only as the other takes them: only a piece of a body, with
   a possible beginning of a secret, is held.
3. An answer that breaks off is a reset of the child's connection, never a clean end.
"""

from __future__ import annotations

import errno
import ssl
from contextlib import contextmanager
from typing import TYPE_CHECKING

import h11
import msgspec
import trio

from hostlib import http1
from hostlib.redact import StreamRedactor
from supervisor.network.access import DeniedError
from supervisor.network.connections import REPLY_TIMEOUT_S, UnreachableError
from supervisor.network.credential import PORT
from supervisor.network.credential_http import (
    AnswerRefusedError,
    RequestRefusedError,
    answer_for,
    request_for,
)
from supervisor.network.proxy_dialogue import ProxyTarget
from supervisor.network.proxy_http import denial
from supervisor.network.sockets import close_socket, reset_socket
from supervisor.network.tunnel import IDLE_S, MeterError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator

    from supervisor.network.connections import Connection, ConnectionMeter, Connections
    from supervisor.network.credential_file import Credential
    from supervisor.network.hosts import Address
    from supervisor.network.outbound import Outbound

ANSWER_TIMEOUT_S = 600.0
"""How long a server may be silent, before its answer and within it."""
HANDSHAKE_TIMEOUT_S = 30.0
"""As long as a connection may take."""
PIECE_BYTES = 16_384
"""Bytes that are searched for the secret at once: 0.2 ms, or 5 ms in the worst case."""
MAX_HEAD_BYTES = 65_536
"""Bytes of the head of an answer."""
MAX_LEFT_BYTES = 1024 * 1024
"""Bytes that are received of a request that was answered before it was complete."""


class CredentialServer:
    """Serves one child."""

    def __init__(
        self,
        connections: Connections,
        outbound: Outbound,
        credentials: Iterable[Credential] = (),
    ) -> None:
        self._connections = connections
        self._outbound = outbound
        self._credentials = {one.terms.inner_name: one for one in credentials}

    def answers_at(self, host: str | Address, port: int) -> bool:
        """Tell whether a host and a port are those of a credential."""
        return port == PORT and host in self._credentials

    async def serve(self, connection: Connection) -> None:
        """Answer the requests of a connection; it is closed, or left to be reset.

        Raises:
            DeniedError, UnreachableError, MeterError: as `Outbound.join` does; the
                connection has the reply as its last words.
        """
        credential = self._credentials[str(connection.host)]
        connection.server = credential.terms.rule
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection.inner))
        http = http1.Connection(stream, IDLE_S)
        may_follow = True
        try:
            while may_follow:
                head = None
                with trio.move_on_after(IDLE_S):
                    head = await http.receive_head()
                may_follow = head is not None and await self._answer(
                    connection, http, head, credential
                )
            if not connection.last_words:
                close_socket(connection.inner)
        except http1.FramingError as why:
            status = why.status if 400 <= why.status < 600 else 400
            connection.last_words = _refusal(http, status, "bad_request", str(why))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            reset_socket(connection.inner)

    async def _answer(
        self,
        connection: Connection,
        http: http1.Connection,
        head: h11.Request,
        credential: Credential,
    ) -> bool:
        """Answer one request; tell whether another one may follow."""
        try:
            request = request_for(head, credential)
        except RequestRefusedError as why:
            text = str(why)
            connection.last_words = _refusal(http, why.status, "bad_request", text)
            return False
        try:
            await self._exchange(connection, http, request, credential)
        except DeniedError as why:
            target = ProxyTarget(connection.host, connection.port)
            body = denial(target, why.refused)
            connection.last_words = _reply(http, 403, body)
            raise
        except UnreachableError as why:
            connection.last_words = _unreachable(http, connection, why)
            raise
        with trio.move_on_after(REPLY_TIMEOUT_S):
            await http.discard(MAX_LEFT_BYTES)
        return http.next_cycle()

    async def _exchange(
        self,
        connection: Connection,
        http: http1.Connection,
        request: h11.Request,
        credential: Credential,
    ) -> None:
        outer = await self._outbound.connect(connection)
        end = reset_socket
        try:
            await self._connections.pace.wait_turn()
            with self._connections.counted(connection) as meter:
                server = await _open_server(outer, credential, meter)
                await _Exchange(http, server, credential).run(request)
            end = close_socket
        finally:
            connection.outer.discard(outer)
            end(outer)


class ServerError(UnreachableError):
    """A server that breaks off, is silent, or speaks no HTTP.

    Attributes:
        detail: why, in words; what the server said is no part of them.
        status: of the reply, where one can still be sent.
    """

    def __init__(self, reason: str, detail: str, status: int = 502) -> None:
        super().__init__(reason)
        self.detail = detail
        self.status = status


class _Server:
    """The connection to the server of a credential."""

    def __init__(
        self, stream: trio.SSLStream[trio.SocketStream], meter: ConnectionMeter
    ) -> None:
        self._stream = stream
        self._meter = meter
        self._http = h11.Connection(
            h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES
        )

    async def send(self, event: h11.Event) -> None:
        """Send a part of a request.

        Raises:
            MeterError: the child may send no more.
            ServerError: the server takes no more.
        """
        data = self._http.send(event)
        if data:
            self._meter.add_sent(len(data))
            with _server_errors(ANSWER_TIMEOUT_S):
                await self._stream.send_all(data)

    async def next_event(self) -> h11.Event:
        """Return the next part of the answer.

        Raises:
            MeterError: the child may receive no more.
            ServerError: there is none.
        """
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                raise ServerError("EPROTO", "the server's answer is broken") from None
            if isinstance(event, h11.Event):
                return event
            if event is not h11.NEED_DATA:
                raise ServerError("EPROTO", "the server speaks another protocol")
            with _server_errors(ANSWER_TIMEOUT_S):
                data = await self._stream.receive_some(PIECE_BYTES)
            self._meter.add_received(len(data))
            self._http.receive_data(bytes(data))


class _Exchange:
    """One request, and its answer."""

    def __init__(
        self, http: http1.Connection, server: _Server, credential: Credential
    ) -> None:
        self._http = http
        self._server = server
        self._credential = credential
        self._failure: Exception | None = None

    async def run(self, request: h11.Request) -> None:
        """Pass both on.

        Raises:
            FramingError: the child's body is none.
            MeterError, ServerError: as above.
            BrokenResourceError, TooSlowError: the child is gone, or does not read.
        """
        await self._server.send(request)
        # Sent here: of two tasks that send to the child one would have to wait.
        if self._http.http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self._http.send(go_on)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_body, nursery.cancel_scope)
            with self._failures(nursery.cancel_scope):
                await self._pass_answer(request.method == b"HEAD")
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _failures(self, both: trio.CancelScope) -> Iterator[None]:
        """End both directions where one of them fails inside."""
        try:
            yield
        except (
            *(http1.FramingError, MeterError, ServerError, AnswerRefusedError),
            *(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError),
        ) as why:
            self._failure = self._failure or _as_server_error(why)
            both.cancel()

    async def _send_body(self, both: trio.CancelScope) -> None:
        with self._failures(both):
            try:
                while data := await self._http.receive_piece():
                    await self._server.send(h11.Data(data=data))
                await self._server.send(h11.EndOfMessage())
            except ServerError:
                # It may have answered already, and wants no more of the body. The rest
                # is dropped, for behind it the child's end is seen.
                while await self._http.receive_piece():
                    pass
            await self._http.wait_gone()
            raise trio.BrokenResourceError("the child has gone")

    async def _pass_answer(self, is_head: bool) -> None:
        event = await self._server.next_event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._server.next_event()
        if not isinstance(event, h11.Response):
            raise ServerError("EPROTO", "the server's answer is broken")
        has_body = not is_head and event.status_code not in {204, 304}
        head = answer_for(event, self._credential, has_body=has_body)
        await self._http.send(head)
        redactor = StreamRedactor(self._credential.redactor)
        while not isinstance(
            event := await self._server.next_event(), h11.EndOfMessage
        ):
            if isinstance(event, h11.Data):
                # Each byte a character: secrets are ASCII, and other bytes stay as they are.
                await self._pass_piece(redactor.feed(str(event.data, "latin-1")))
        await self._pass_piece(redactor.rest())
        await self._http.send(h11.EndOfMessage())

    async def _pass_piece(self, text: str) -> None:
        if text:
            await self._http.send(h11.Data(data=text.encode("latin-1")))


async def _open_server(
    outer: socket.socket, credential: Credential, meter: ConnectionMeter
) -> _Server:
    """Return a connection over which TLS is spoken, and the certificate was checked."""
    raw = trio.SocketStream(trio.socket.from_stdlib_socket(outer))
    stream = trio.SSLStream(
        raw,
        credential.tls,
        server_hostname=credential.terms.server,
        # A bare FIN is no end: it could have been put in by anybody on the way (rule 3).
        https_compatible=False,
    )
    with _server_errors(HANDSHAKE_TIMEOUT_S):
        await stream.do_handshake()
    return _Server(stream, meter)


@contextmanager
def _server_errors(timeout_s: float) -> Iterator[None]:
    """Raise a `ServerError` for what goes wrong with a server inside."""
    try:
        with trio.fail_after(timeout_s):
            yield
    except trio.TooSlowError:
        text = "the server does not go on"
        raise ServerError("ETIMEDOUT", text, 504) from None
    except (trio.BrokenResourceError, trio.ClosedResourceError) as why:
        cause = why.__cause__
        if isinstance(cause, ssl.SSLError) and not _is_bare_end(cause):
            raise ServerError("EPROTO", _tls_fault(cause)) from None
        raise ServerError("ECONNRESET", "the server has ended the connection") from None


def _is_bare_end(why: ssl.SSLError) -> bool:
    return isinstance(why, ssl.SSLEOFError | ssl.SSLSyscallError)


def _tls_fault(why: ssl.SSLError) -> str:
    """Return why there is no TLS with a server, in OpenSSL's words of a fixed list."""
    if isinstance(why, ssl.SSLCertVerificationError):
        return f"the server's certificate is refused: {why.verify_message}"
    reason = (why.reason or "unknown").replace("_", " ").lower()
    if reason == "wrong version number":  # the bytes are no record of TLS
        return "the server speaks no TLS"
    if " alert " in reason:
        return f"the server refuses TLS by an alert: {reason}"
    return f"TLS with the server fails: {reason}"


def _as_server_error(why: Exception) -> Exception:
    if isinstance(why, AnswerRefusedError):
        return ServerError(errno.errorcode[errno.EPROTO], str(why))
    return why


def _unreachable(
    http: http1.Connection, connection: Connection, why: UnreachableError
) -> bytes:
    body = {
        "error": "unreachable",
        "name": str(connection.host),
        "port": connection.port,
    }
    status = 502
    if isinstance(why, ServerError):
        body["detail"], status = why.detail, why.status
    return _reply(http, status, msgspec.json.encode(body))


def _refusal(http: http1.Connection, status: int, error: str, detail: str) -> bytes:
    return _reply(http, status, msgspec.json.encode({"error": error, "detail": detail}))


def _reply(http: http1.Connection, status: int, body: bytes) -> bytes:
    """Return a reply after which the connection ends; nothing if one was begun."""
    if not http.can_reply:
        return b""
    head = h11.Response(
        status_code=status,
        headers=[
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ],
    )
    events: list[h11.Event] = [head, h11.Data(data=b"" if http.is_head else body)]
    return b"".join(
        http.http.send(event) or b"" for event in (*events, h11.EndOfMessage())
    )
