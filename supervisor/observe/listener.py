"""The listener of ``[metrics]``: ``/metrics`` for scrapers, a page for people if wanted.

HTTP/1.1 by h11 on Trio, read-only, on loopback.

Rules of this file.

1. Only GET and HEAD, only names of this machine in ``Host``: a web page that a browser
   on this machine has open cannot read the host's state through a name it controls.
2. Of ``MAX_CONNECTIONS`` the one that idles longest makes room; a request must be there
   within ``REQUEST_S``, an answer be taken within it.
3. Snapshots are made in the loop, text of them in a worker thread: a scrape of 1,000
   children holds the loop for half a millisecond.
4. ``/events`` sends the page's parts while they change; who does not take them within
   ``REQUEST_S`` is cut off.  With nobody there, nothing is looked at.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import h11
import trio

from hostlib.extras import check_packages
from hostlib.listener import accepted, make_room, only_this_one
from hostlib.threads import in_thread
from supervisor.config.metrics import parse_listen
from supervisor.observe.families import families
from supervisor.observe.registry import attach_metrics, build_here

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from hostlib.log import Log
    from supervisor.config.metrics import MetricsSection
    from supervisor.host import Host
    from supervisor.observe.registry import Metrics
    from supervisor.observe.status_facts import Watch

MAX_CONNECTIONS = 16
"""At once: a scraper or two, and browsers that keep some open."""

MAX_STREAMS = 8
"""Pages that are kept live at once."""

REQUEST_S = 10.0
"""For a request that began, and for an answer to be taken."""

REFRESH_S = 1.0
"""Between two looks for a live page."""

SILENCE_S = 15.0
"""After so long without news a live page gets a comment: one that is gone is noticed."""

MAX_HEAD_BYTES = 8192
_RECEIVE_BYTES = 4096
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_TEXT = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """What is sent back.

    Attributes:
        status: of HTTP.
        body: all of it.
        content_type: of the body.
        headers: more of them.
    """

    status: int
    body: bytes
    content_type: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


async def serve_metrics(
    host: Host,
    section: MetricsSection,
    task_status: trio.TaskStatus[Metrics] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Tell a host's figures until cancelled.

    Args:
        host: whose figures.
        section: where to listen; checked already.
        task_status: told when it can be connected to; ``address`` is where.

    Raises:
        OSError: nobody can listen there; ``strerror`` says where, why, what to do.
    """
    check_packages("serve [metrics]", "metrics")
    metrics = attach_metrics(host)
    # Its imports take 50 ms, which a client's READ should not wait for.
    render = await in_thread(_import_render)
    if section.page:
        await in_thread(_import_page)
    listener = await _listen(section.listen)
    server = _Server(metrics, listener, render, host.log, page=section.page)
    host.holders.add(server.descriptors)
    try:
        async with listener:
            name = listener.socket.getsockname()
            metrics.address = (name[0], name[1])
            where = f"[{name[0]}]" if ":" in name[0] else name[0]
            host.log.write("INFO", f"Metrics at http://{where}:{name[1]}/metrics")
            task_status.started(metrics)
            await server.run()
    finally:
        metrics.address = None
        host.holders.discard(server.descriptors)


async def _listen(text: str) -> trio.SocketListener:
    address = parse_listen(text)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind((address.host, address.port))
        sock.listen(MAX_CONNECTIONS)
    except OSError as why:
        sock.close()
        reason = why.strerror or str(why)
        raise OSError(
            why.errno or errno.EIO,
            f"cannot listen at {text}: {reason}; choose another metrics.listen",
        ) from None
    return trio.SocketListener(sock)


class _Connection:
    """One connection; ``idle_since`` is None while a request is under way."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.scope = trio.CancelScope()
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.idle_since: float | None = trio.current_time()


class _Server:
    """One listener's connections and answers."""

    def __init__(
        self,
        metrics: Metrics,
        listener: trio.SocketListener,
        render: Callable[..., tuple[bytes, str]],
        log: Log,
        *,
        page: bool,
    ) -> None:
        self._metrics = metrics
        self._listener = listener
        self._render = render
        self._log = log
        self._connections: set[_Connection] = set()
        self._streams = 0
        self._watch: Watch | None = None
        self._answers: dict[str, Callable[[h11.Request], Awaitable[Answer]]] = {
            "/metrics": self._figures
        }
        if page:
            from supervisor.observe.status_facts import Watch  # noqa: PLC0415 - where it is on

            self._watch = Watch(metrics)
            self._answers["/"] = self._page

    def descriptors(self) -> Iterable[tuple[int, str]]:
        """Yield what the server holds of the host's descriptors."""
        yield self._listener.socket.fileno(), "metrics listener"
        for connection in self._connections:
            fd = connection.stream.socket.fileno()
            if fd >= 0:
                yield fd, "metrics connection"

    async def run(self) -> None:
        """Accept connections and serve them until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                stream = await accepted(self._listener)
                self._make_room()
                connection = _Connection(stream)
                self._connections.add(connection)
                nursery.start_soon(self._serve, connection)

    def _make_room(self) -> None:
        if len(self._connections) < MAX_CONNECTIONS:
            return
        longest = make_room(self._connections)
        if longest is None:  # all are being served; one of them it has to be
            longest = next(iter(self._connections))
            longest.scope.cancel()
        self._connections.discard(longest)

    async def _serve(self, connection: _Connection) -> None:
        try:
            with only_this_one(self._log, "metrics"), connection.scope:
                async with connection.stream:
                    # What is no HTTP was told so where it could be.
                    with suppress(h11.ProtocolError):
                        while await self._exchange(connection):
                            connection.idle_since = trio.current_time()
        finally:
            self._connections.discard(connection)

    async def _exchange(self, connection: _Connection) -> bool:
        """Answer one request; return whether another may follow."""
        http = connection.http
        try:
            request = await self._receive(connection)
        except h11.RemoteProtocolError as why:
            if http.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                status = why.error_status_hint
                answer = Answer(status, f"{why}\n".encode())
                await self._send(connection, answer, is_last=True)
            return False
        if request is None:
            return False
        is_head = request.method == b"HEAD"
        refusal = self._refusal(request)
        if refusal is not None:
            await self._send(connection, refusal, is_head=is_head, is_last=True)
            return False
        path = _path(request)
        if path == "/events" and self._watch is not None:
            await self._stream_events(connection, self._watch, is_head=is_head)
            return False
        answer_of = self._answers.get(path)
        if answer_of is None:
            answer = Answer(404, b"there is no such page\n")
        else:
            answer = await answer_of(request)
        await self._send(connection, answer, is_head=is_head)
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            return False
        http.start_next_cycle()
        return True

    async def _receive(self, connection: _Connection) -> h11.Request | None:
        """Receive a request; None at the end of the stream."""
        http, stream = connection.http, connection.stream
        request: h11.Request | None = None
        deadline = trio.CancelScope()
        with deadline:
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    data = await stream.receive_some(_RECEIVE_BYTES)
                    if connection.idle_since is not None:
                        connection.idle_since = None
                        deadline.deadline = trio.current_time() + REQUEST_S
                    http.receive_data(data)
                elif isinstance(event, h11.Request):
                    request = event
                    if event.method not in {b"GET", b"HEAD"}:
                        return event  # its body is not waited for
                elif isinstance(event, h11.EndOfMessage):
                    return request
                elif isinstance(event, h11.ConnectionClosed | h11.PAUSED):
                    return None
        raise trio.TooSlowError

    def _refusal(self, request: h11.Request) -> Answer | None:
        if request.method not in {b"GET", b"HEAD"}:
            text = b"only GET and HEAD: nothing can be changed here\n"
            return Answer(405, text, headers=(("Allow", "GET, HEAD"),))
        if not self._is_ours(dict(request.headers).get(b"host", b"")):
            return Answer(421, b"ask for 127.0.0.1, [::1] or localhost\n")
        return None

    def _is_ours(self, header: bytes) -> bool:
        name = header.decode("latin-1").lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name
        own = self._metrics.address[0] if self._metrics.address else ""
        return name in _LOCAL_NAMES or name in {own, f"[{own}]"}

    async def _send(
        self,
        connection: _Connection,
        answer: Answer,
        *,
        is_head: bool = False,
        is_last: bool = False,
    ) -> None:
        http = connection.http
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            *_ALWAYS,
            *answer.headers,
        ]
        if is_last:
            headers.append(("Connection", "close"))
        data = (
            http.send(h11.Response(status_code=answer.status, headers=headers)) or b""
        )
        if not is_head:
            data += http.send(h11.Data(data=answer.body)) or b""
        data += http.send(h11.EndOfMessage()) or b""
        with trio.fail_after(REQUEST_S):
            await connection.stream.send_all(data)

    # The answers

    async def _figures(self, request: h11.Request) -> Answer:
        accept = dict(request.headers).get(b"accept", b"").decode("latin-1")
        host = self._metrics.host
        await host.sizes.look([child.spec for child in host.children.values()])
        snapshot = families(self._metrics)
        body, content_type = await in_thread(self._render, snapshot, accept)
        return Answer(200, body, content_type)

    async def _page(self, request: h11.Request) -> Answer:
        from supervisor.observe.status_page import (  # noqa: PLC0415 - where it is on
            POLICY,
            page,
            view_of,
        )

        if self._watch is None:
            raise RuntimeError("a page without somebody who looks")
        view = view_of(request.target.decode("latin-1").partition("?")[2])
        body = (await in_thread(page, await self._watch.look(), view)).encode()
        headers = (("Content-Security-Policy", POLICY),)
        return Answer(200, body, "text/html; charset=utf-8", headers)

    async def _stream_events(
        self, connection: _Connection, watch: Watch, *, is_head: bool
    ) -> None:
        if self._streams >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages are live already\n".encode()
            answer = Answer(503, text)
            await self._send(connection, answer, is_head=is_head, is_last=True)
            return
        if is_head:
            head = connection.http.send(_EVENTS_BEGIN) or b""
            with trio.fail_after(REQUEST_S):
                await connection.stream.send_all(head)
            return
        self._streams += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_at_end, connection, nursery.cancel_scope)
                await self._send_events(connection, watch)
        finally:
            self._streams -= 1

    async def _send_events(self, connection: _Connection, watch: Watch) -> None:
        from supervisor.observe.status_page import live_part  # noqa: PLC0415 - where it is on

        http, stream = connection.http, connection.stream
        data = http.send(_EVENTS_BEGIN) or b""
        before, said_s = "", trio.current_time()
        while True:
            part = await in_thread(live_part, await watch.look())
            now_s = trio.current_time()
            if part != before:
                before, said_s = part, now_s
                data += http.send(h11.Data(data=_event(part))) or b""
            elif now_s - said_s > SILENCE_S:
                said_s = now_s
                data += http.send(h11.Data(data=b":\n\n")) or b""
            if data:
                with trio.fail_after(REQUEST_S):
                    await stream.send_all(data)
            data = b""
            await trio.sleep(REFRESH_S)


_ALWAYS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""Headers of every answer: it is kept by nobody, and used by no other page."""


_EVENTS_BEGIN = h11.Response(
    status_code=200, headers=[("Content-Type", "text/event-stream"), *_ALWAYS]
)


def _path(request: h11.Request) -> str:
    return request.target.decode("latin-1").partition("?")[0]


def _event(part: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in part.splitlines())
    return f"event: state\n{lines}\n".encode()


async def _cancel_at_end(connection: _Connection, scope: trio.CancelScope) -> None:
    try:
        while await connection.stream.receive_some(_RECEIVE_BYTES):
            pass
    except trio.BrokenResourceError:
        pass
    scope.cancel()


def _import_page() -> None:
    import supervisor.observe.status_facts  # noqa: PLC0415 - see ``serve_metrics``
    import supervisor.observe.status_page  # noqa: F401, PLC0415


def _import_render() -> Callable[..., tuple[bytes, str]]:
    from supervisor.observe.text import render  # noqa: PLC0415 - see ``serve_metrics``

    build_here()
    return render
