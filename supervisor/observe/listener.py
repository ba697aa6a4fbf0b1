"""The listener of ``[metrics]``: ``/metrics`` for scrapers, a page for people.

HTTP/1.1, read-only, on loopback.

1. Only GET and HEAD, and only names of this machine in ``Host``: a web page in a local
   browser cannot read the host's state through a name that it controls.
2. Of ``MAX_CONNECTIONS`` the one that idles longest is closed for a new one; a request
   and the taking of an answer have ``REQUEST_S`` each.
3. Snapshots are made in the loop, text in a worker thread: a scrape of 1,000 children
   holds the loop for half a millisecond.
4. ``/events`` sends changed parts of the page while a reader takes them in
   ``REQUEST_S``.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import h11
import trio

from hostlib import http1
from hostlib.extras import check_packages
from hostlib.listener import Server, make_room
from hostlib.threads import in_thread
from supervisor.config.metrics import parse_listen
from supervisor.observe.families import families
from supervisor.observe.registry import attach_metrics, find_build

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from hostlib.log import Log
    from supervisor.config.metrics import MetricsSection
    from supervisor.host import Host
    from supervisor.observe.registry import Metrics
    from supervisor.observe.status_facts import Watch

MAX_CONNECTIONS = 16
"""Most connections: a scraper or two, and browsers that keep some open."""

MAX_STREAMS = 8
"""Most live pages."""

REQUEST_S = 10.0
"""Longest time for a request that began, and for taking an answer."""

REFRESH_S = 1.0
"""Time between two looks for a live page."""

SILENCE_S = 15.0
"""A silent live page gets a comment after this time: a closed one is noticed."""

MAX_HEAD_BYTES = 8192
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_TEXT = "text/plain; charset=utf-8"


class Response(NamedTuple):
    """A response.

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
    """Serve a host's figures until cancelled.

    Args:
        host: has the figures.
        section: the checked address.
        task_status: started when it accepts connections; ``address`` is set.

    Raises:
        OSError: the address cannot be used; ``strerror`` has the reason and the remedy.
    """
    check_packages("serve [metrics]", "metrics")
    metrics = attach_metrics(host)
    # Its imports take 50 ms, and a client's READ would wait for them.
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
        self._server = Server(listener, self._enter, self._serve, log, "metrics")
        self._streams = 0
        self._watch: Watch | None = None
        self._answers: dict[str, Callable[[h11.Request], Awaitable[Response]]] = {
            "/metrics": self._figures
        }
        if page:
            from supervisor.observe.status_facts import Watch  # noqa: PLC0415 - where it is on

            self._watch = Watch(metrics)
            self._answers["/"] = self._page

    def descriptors(self) -> Iterable[tuple[int, str]]:
        """Yield the server's descriptors of the host."""
        yield self._listener.socket.fileno(), "metrics listener"
        for fd in self._server.descriptors():
            yield fd, "metrics connection"

    async def run(self) -> None:
        """Accept connections and serve them until cancelled."""
        await self._server.run()

    def _enter(self, stream: trio.SocketStream) -> http1.Connection:
        connections = self._server.connections
        if len(connections) >= MAX_CONNECTIONS:
            longest = make_room(connections)
            if longest is None:  # all are being served: close one of them
                longest = next(iter(connections))
                longest.scope.cancel()
            connections.discard(longest)
        return http1.Connection(stream, REQUEST_S, max_head_bytes=MAX_HEAD_BYTES)

    async def _serve(self, connection: http1.Connection) -> None:
        try:
            while await self._exchange(connection) and connection.next_cycle():
                pass
        except http1.FramingError as why:
            if connection.can_reply:
                answer = Response(why.status, f"{why}\n".encode())
                await _send(connection, answer, is_last=True)

    async def _exchange(self, connection: http1.Connection) -> bool:
        """Answer one request; return whether another may follow."""
        request = await connection.receive_head()
        if request is None:
            return False
        connection.begin()
        refusal = self._refusal(request)
        if refusal is not None:  # without waiting for a body
            await _send(connection, refusal, is_last=True)
            return False
        while await connection.receive_piece():
            pass
        path = _path(request)
        if path == "/events" and self._watch is not None:
            await self._stream_events(connection, self._watch)
            return False
        answer_of = self._answers.get(path)
        if answer_of is None:
            answer = Response(404, b"there is no such page\n")
        else:
            answer = await answer_of(request)
        await _send(connection, answer)
        return True

    def _refusal(self, request: h11.Request) -> Response | None:
        if request.method not in {b"GET", b"HEAD"}:
            text = b"only GET and HEAD: nothing can be changed here\n"
            return Response(405, text, headers=(("Allow", "GET, HEAD"),))
        if not self._is_ours(dict(request.headers).get(b"host", b"")):
            return Response(421, b"ask for 127.0.0.1, [::1] or localhost\n")
        return None

    def _is_ours(self, header: bytes) -> bool:
        name = header.decode("latin-1").lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name
        own = self._metrics.address[0] if self._metrics.address else ""
        return name in _LOCAL_NAMES or name in {own, f"[{own}]"}

    # The answers

    async def _figures(self, request: h11.Request) -> Response:
        accept = dict(request.headers).get(b"accept", b"").decode("latin-1")
        host = self._metrics.host
        await host.sizes.look([child.spec for child in host.children.values()])
        snapshot = families(self._metrics)
        body, content_type = await in_thread(self._render, snapshot, accept)
        return Response(200, body, content_type)

    async def _page(self, request: h11.Request) -> Response:
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
        return Response(200, body, "text/html; charset=utf-8", headers)

    async def _stream_events(self, connection: http1.Connection, watch: Watch) -> None:
        if self._streams >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages are live already\n".encode()
            await _send(connection, Response(503, text), is_last=True)
            return
        if connection.is_head:
            await connection.send(_EVENTS_BEGIN)
            return
        self._streams += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_at_end, connection, nursery.cancel_scope)
                await self._send_events(connection, watch)
        finally:
            self._streams -= 1

    async def _send_events(self, connection: http1.Connection, watch: Watch) -> None:
        from supervisor.observe.status_page import live_part  # noqa: PLC0415 - where it is on

        await connection.send(_EVENTS_BEGIN)
        before, said_s = "", trio.current_time()
        while True:
            part = await in_thread(live_part, await watch.look())
            now_s = trio.current_time()
            if part != before:
                before, said_s = part, now_s
                await connection.send(h11.Data(data=_event(part)))
            elif now_s - said_s > SILENCE_S:
                said_s = now_s
                await connection.send(h11.Data(data=b":\n\n"))
            await trio.sleep(REFRESH_S)


async def _send(
    connection: http1.Connection, answer: Response, *, is_last: bool = False
) -> None:
    headers = [
        ("Content-Type", answer.content_type),
        ("Content-Length", str(len(answer.body))),
        *_ALWAYS,
        *answer.headers,
    ]
    if is_last:
        headers.append(("Connection", "close"))
    await connection.reply(answer.status, headers, answer.body)


_ALWAYS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""Headers of every answer: no caching, no use by other pages."""


_EVENTS_BEGIN = h11.Response(
    status_code=200, headers=[("Content-Type", "text/event-stream"), *_ALWAYS]
)


def _path(request: h11.Request) -> str:
    return request.target.decode("latin-1").partition("?")[0]


def _event(part: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in part.splitlines())
    return f"event: state\n{lines}\n".encode()


async def _cancel_at_end(connection: http1.Connection, scope: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError):
        await connection.wait_gone()
    scope.cancel()


def _import_page() -> None:
    import supervisor.observe.status_facts  # noqa: PLC0415 - see ``serve_metrics``
    import supervisor.observe.status_page  # noqa: F401, PLC0415


def _import_render() -> Callable[..., tuple[bytes, str]]:
    from supervisor.observe.text import render  # noqa: PLC0415 - see ``serve_metrics``

    find_build()
    return render
