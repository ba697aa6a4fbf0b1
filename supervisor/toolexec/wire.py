"""One connection as bytes: receives a request, sends a reply.

1. One request a connection; every reply says ``Connection: close``.
2. Times: ``HEAD_TIMEOUT_S``, ``BODY_TIMEOUT_S`` for a pause, ``BODY_DEADLINE_S`` for a
   whole body; sending has none (spec: no write time-out).
3. A client that is refused early can read that: the host half-closes and drains for
   ``DRAIN_S`` (RFC 9112, 9.6). No body is received if the head is refused.
4. Only the head and the decoded body are kept; both are bounded.
5. HEAD gets heads without bodies (RFC 9110, 9.3.2).
6. Input is parsed in pieces of ``RECEIVE_BYTES``, large ones in turns (``fairness``).
"""

from __future__ import annotations

import re
import socket
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import trio

from hostlib.readiness import wait_readable, wait_writable
from protocol.toolexec import requests
from protocol.toolexec.body import (
    BodyReader,
    BodyTooLargeError,
    FramingError,
    HeadReader,
    HeadTooLargeError,
)
from supervisor.toolexec import http_heads
from supervisor.toolexec.http_heads import RefusedAtOnceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostlib.fairness import Share
    from protocol.toolexec.body import Head
    from protocol.toolexec.requests import Refusal
    from supervisor.toolexec.http_heads import Headers

HEAD_TIMEOUT_S = 10.0
"""Longest time for a head: it is one packet."""

BODY_TIMEOUT_S = 30.0
"""Longest time between two pieces of a body."""

BODY_DEADLINE_S = 60.0
"""Longest time for a whole body: a MiB from another machine takes seconds, and single
bytes hold a connection for nothing."""

DRAIN_S = 2.0
"""How long a refused client may send before the connection is closed."""

RECEIVE_BYTES = 16_384
"""Bytes that are received at once: in chunks of a byte they take one to two
milliseconds."""

LOOK_PIECES = 64
"""Bytes that are dropped in one look for a client: a MiB, which takes less than a
millisecond."""

FIRST_BYTES = 4096
"""The part of a body that is received with its head before the token is checked: most
are that short, and a bad one is refused first (spec: order of checks)."""

SEND_BYTES = 256 * 1024
"""At most two pieces of output wait in a socket, for a client that is a little late."""

SMALL_HEAD_BYTES = 2048
"""Longest head that is parsed at once; h11 may take 0.2 us for a byte."""

_IS_HEAD = re.compile(rb"(?:\r?\n)?HEAD ")


class GoneError(Exception):
    """The client is gone or was too slow: it gets no reply."""


class Wire:
    """A connection.

    Args:
        sock: non-blocking; owned.
        turn: for parsing large heads.

    Attributes:
        received: the bytes that bring another wire to this stage of its request, while
            it is being received: its head, then the rest in the body's reader.
        unsent: the bytes that the client has not taken yet.
    """

    def __init__(self, sock: socket.socket, turn: Share) -> None:
        self.sock = sock
        self._turn = turn
        self._ahead = b""  # received and not parsed
        self._is_head = False
        self._wants_100 = False
        self.received: list[bytes | bytearray] = []
        self.unsent = memoryview(b"")

    # The request

    async def receive(
        self, first_look: Callable[[Head], Refusal | Share]
    ) -> tuple[Head, bytes]:
        """Return a whole request.

        Args:
            first_look: called with a head before its body is received: returns a
                refusal, or the turn for the body.

        Raises:
            RefusedAtOnceError: it is no request, too large, or has bytes behind it.
            GoneError: it was not received.
            OSError: the connection failed.
        """
        head = None
        with trio.move_on_after(HEAD_TIMEOUT_S):
            head = await self._receive_head()
        if head is None:
            raise GoneError
        try:
            body = BodyReader(head.headers, head.version)
            first, self._ahead = self._ahead[:FIRST_BYTES], self._ahead[FIRST_BYTES:]
            body.feed(first)
            self.received[1:] = body.replay()
            if not body.is_complete:
                await self._receive_body(head, body, first_look)
        except FramingError as why:
            raise RefusedAtOnceError(requests.bad_request(str(why))) from None
        except BodyTooLargeError:
            raise RefusedAtOnceError(requests.PAYLOAD_TOO_LARGE) from None
        except HeadTooLargeError:
            raise RefusedAtOnceError(requests.HEAD_TOO_LARGE) from None
        has_more = bool(body.rest or self._ahead)
        with suppress(OSError):  # empty, or its end: ``check_there`` reports that
            has_more = has_more or bool(self.sock.recv(1, socket.MSG_PEEK))
        if has_more:
            refusal = requests.bad_request("bytes after the body")
            raise RefusedAtOnceError(refusal)
        return head, bytes(body.body)

    def held(self) -> bytes:
        """Return the bytes of a request that is being received."""
        return b"".join(self.received) + self._ahead

    def hold(self, data: bytes) -> None:
        """Receive first the bytes of another program of this host."""
        self._ahead = data

    async def _receive_head(self) -> Head:
        reader = HeadReader()
        so_far = bytearray()
        self.received = [so_far]
        while True:
            data = await self._receive()
            if not data:
                if not so_far:
                    raise GoneError
                refusal = requests.bad_request("the head ended early")
                raise RefusedAtOnceError(refusal)
            so_far += data
            # Also refused clients get it, before the head is whole (rule 5).
            self._is_head = _IS_HEAD.match(so_far) is not None
            try:
                cut = reader.feed(data)
            except HeadTooLargeError:
                raise RefusedAtOnceError(requests.HEAD_TOO_LARGE) from None
            if cut is not None:
                text, self._ahead = cut  # later bytes are the body's
                self._is_head = _IS_HEAD.match(text) is not None
                self.received = [text]
                is_small = len(text) <= SMALL_HEAD_BYTES
                async with nullcontext() if is_small else self._turn.hold():
                    head, self._wants_100 = http_heads.read(text)
                    return head
            await trio.lowlevel.checkpoint()

    async def _receive_body(
        self,
        head: Head,
        body: BodyReader,
        first_look: Callable[[Head], Refusal | Share],
    ) -> None:
        turn = first_look(head)
        if isinstance(turn, requests.Refusal):
            raise RefusedAtOnceError(turn)
        with trio.move_on_after(BODY_DEADLINE_S) as deadline:
            if self._wants_100 and not self._ahead:
                await self.send(http_heads.continue_reply())
            while not body.is_complete:
                # Where another program can find it until its turn has come.
                self._ahead = await self._receive_more()
                async with turn.hold():
                    data, self._ahead = self._ahead, b""
                    body.feed(data)
                    self.received[1:] = body.replay()
        if deadline.cancelled_caught:
            raise RefusedAtOnceError(requests.BODY_TIMEOUT)

    async def _receive_more(self) -> bytes:
        with trio.move_on_after(BODY_TIMEOUT_S):
            data = await self._receive()
            if not data:
                refusal = requests.bad_request("the body ended early")
                raise RefusedAtOnceError(refusal)
            return data
        raise GoneError

    async def _receive(self) -> bytes:
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return ahead
        while True:
            try:
                return self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                await wait_readable(self.sock)

    def check_there(self) -> None:
        """Raise ``GoneError`` if the client is gone, as ``wait_gone`` would see it.

        A client that sends faster than this reads is there.
        """
        with suppress(BlockingIOError):
            for _ in range(LOOK_PIECES):
                if not self.sock.recv(RECEIVE_BYTES):
                    raise GoneError

    async def wait_gone(self) -> None:
        """Wait until the client has closed its side or is gone.

        Later bytes are read and dropped: one request a connection.
        """
        with suppress(OSError):
            while await self._receive():
                await trio.lowlevel.checkpoint()

    async def cancel_when_gone(self, scope: trio.CancelScope) -> None:
        """Cancel a scope once the client is gone."""
        await self.wait_gone()
        scope.cancel()

    # The reply

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send bytes whole.

        Raises:
            OSError: the client is gone.
        """
        view = self.unsent = memoryview(b"".join(parts))
        while view:
            try:
                sent = self.sock.send(view, socket.MSG_NOSIGNAL)
                view = self.unsent = view[sent:]
            except BlockingIOError:
                await wait_writable(self.sock)

    def make_room(self) -> None:
        """Enlarge the kernel's buffer beyond a small reply, as far as wmem_max allows.

        A piece of output should fit, or the host waits in the middle of each.
        """
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)

    async def reply(
        self, status: int, body: bytes, exit_code: int, headers: Headers | None = None
    ) -> None:
        """Send a whole reply."""
        head = self.head(status, len(body), exit_code, headers or [])
        await self.send(head, b"" if self._is_head else body)

    async def reply_nothing(self) -> None:
        """Send a 204."""
        await self.send(http_heads.reply_head(204, [http_heads.CLOSE]))

    async def refuse(self, refusal: Refusal) -> None:
        """Send a refusal."""
        headers = list(refusal.headers)
        await self.reply(refusal.status, refusal.body, refusal.exit_code, headers)

    def head(self, status: int, length: int, exit_code: int, headers: Headers) -> bytes:
        """Return the head of a reply of known length."""
        headers = [
            http_heads.CONTENT_TYPE,
            (b"X-Exit-Code", b"%d" % exit_code),
            *headers,
            (b"Content-Length", b"%d" % length),
            http_heads.CLOSE,
        ]
        return http_heads.reply_head(status, headers)

    async def drain(self) -> None:
        """Send the end, and read on for a while (rule 3)."""
        with trio.move_on_after(DRAIN_S), suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            await self.wait_gone()

    def close(self) -> None:
        """Close the connection; sent bytes are delivered. Safe to call twice."""
        if self.sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()
