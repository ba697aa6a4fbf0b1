"""A lane that takes turns with all others on one upstream connection (spec N4).

For hosts without ATTACH.

1. A request goes upstream completely or not at all: its payload is collected first (spec
   W2), since a client that dies in it must not tear the shared connection.  So payloads
   are bounded; a longer one is drained and refused.
2. The host sees one client, so the relay checks filenos: one that is not the client's own
   is refused here (spec N3), and its payload drained (spec W4).
3. NARROW and ATTACH would affect all clients, so they are unknown here.
4. A reply is received completely before it is passed on: a slow client stalls itself only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from loguru import logger

from protocol import error, invalid, limits
from protocol import messages as m
from protocol.chat import ChatBody
from vfs.client.errors import FsProxyError, UnsendableError
from vfs.relay.lane import (
    DEADLINE_S,
    SETTLE_S,
    Lane,
    TornError,
    refuse_unknown,
    refuse_unsendable,
    reply_line,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from vfs.client.aio import AsyncClient

MAX_PAYLOAD_BYTES = limits.MAX_WRITE_BYTES
"""Longest collected payload."""


class SerialLane(Lane):
    """A lane on the shared connection; see the rules of this file.

    Args:
        number: as for ``Lane``.
        near: as for ``Lane``.
        upstream: the shared connection.
        dialect: the dialect of the nested client.
        knows: as for ``Lane``.
    """

    def __init__(
        self,
        number: int,
        near: socket.socket,
        upstream: AsyncClient,
        dialect: int,
        knows: Callable[[bytes], bool],
    ) -> None:
        super().__init__(number, near, dialect, knows)
        self._upstream = upstream

    async def run(self) -> None:
        """Serve the nested client until it is gone, then release its files."""
        try:
            with self.scope:
                try:
                    while (message := await self._next_message()) is not None:
                        with trio.fail_after(DEADLINE_S):
                            payload = await self._collect_or_answer(message)
                        reply = await self._serve(self._restrict(message), payload)
                        with trio.fail_after(DEADLINE_S):
                            await self._answer(reply)
                except (TornError, trio.TooSlowError):
                    pass  # its files are closed below
            with trio.move_on_after(SETTLE_S, shield=True):
                await self._close_files()
        except FsProxyError as why:
            logger.bind(event="relay.lost", lane=self.number).error(
                "Upstream connection lost: {}", why
            )
        finally:
            self._downstream.close()
            self.finished.set()

    async def _collect_or_answer(self, message: m.Request) -> bytes:
        """Return the payload as ``_collect``; answer an error to a half-closed client."""
        try:
            return await self._collect(message)
        except TornError:
            if not isinstance(message, m.Chat):  # its errors name a part
                await self._answer(error(b"failed to read data: unexpected EOF"))
            raise

    async def _collect(self, message: m.Request) -> bytes:
        """Return the payload; empty if it is only drained."""
        if message.body > MAX_PAYLOAD_BYTES or isinstance(message, m.Refusal):
            await self._drain(message)
            return b""
        chat = ChatBody.of(message)
        pieces = []
        while self._requests.body_left:
            pieces.append(await self._next_body_piece())
            self._look_at(pieces[-1], chat)
        return b"".join(pieces)

    async def _serve(self, wanted: m.Request, payload: bytes) -> bytes:
        """Return the reply to a complete request."""
        match wanted:
            case m.Refusal():
                return self._refuse(wanted)
            case m.Attach() | m.Narrow():
                return self._refuse(refuse_unknown(wanted))
            case _ if wanted.body > MAX_PAYLOAD_BYTES:
                text = b"%d exceeds limit %d" % (wanted.body, MAX_PAYLOAD_BYTES)
                return invalid("size", text)
            case m.FileRequest() if wanted.fileno not in self.filenos:
                return invalid("fileno", wanted.token)
            case m.Read():
                wanted = m.Read(wanted.token, min(wanted.size, limits.MAX_READ_BYTES))
            case _:
                pass
        try:
            reply, body = await self._upstream.request(wanted, payload)
        except UnsendableError:
            return self._refuse(refuse_unsendable(wanted))
        self._note(wanted, reply)
        return reply_line(reply) + body

    async def _close_files(self) -> None:
        for fileno in sorted(self.filenos):
            await self._upstream.request(m.Close(b"%d" % fileno))
            self.filenos.discard(fileno)
            logger.bind(event="relay.closed", lane=self.number).info(
                "Sent close request for fileno {} (downstream EOF)", fileno
            )
