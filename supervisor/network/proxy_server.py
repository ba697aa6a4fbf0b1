"""The proxy of a child's namespace, for programs that can use one (spec NET8).

`proxy_http` and `proxy_socks` speak the protocols; the first byte of a connection tells
which. This module waits and connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from supervisor.network import proxy_socks
from supervisor.network.access import DeniedError
from supervisor.network.connections import UnreachableError
from supervisor.network.outbound import CONNECT_TIMEOUT_S
from supervisor.network.proxy_dialogue import ProxyError
from supervisor.network.proxy_http import HttpDialogue
from supervisor.network.proxy_socks import SocksDialogue
from supervisor.network.settings import PROXY_PORT
from supervisor.network.sockets import receive, reset_socket, send_all
from supervisor.network.tunnel import READ_BYTES, FilterError

if TYPE_CHECKING:
    import socket

    from supervisor.network.access import Access
    from supervisor.network.connections import Connection
    from supervisor.network.outbound import Outbound
    from supervisor.network.proxy_dialogue import Dialogue
    from supervisor.network.rules import Grant

TIMEOUT_S = 10.0
"""How long a program may take to say what it wants."""

_SOCKS4 = 4
_SOCKS4_REJECTED = b"\0\x5b" + bytes(6)


class ProxyServer:
    """Serves one child.

    Attributes:
        port: where it listens.
    """

    port = PROXY_PORT

    def __init__(self, access: Access, outbound: Outbound) -> None:
        self._access = access
        self._outbound = outbound

    async def serve(self, connection: Connection) -> None:
        """Do what a program asks for on a connection.

        Raises:
            DeniedError, UnreachableError, TunnelError: as `Outbound` does.
            OSError: the program has reset the connection.
        """
        dialogue = None
        try:
            with trio.move_on_after(TIMEOUT_S):
                dialogue = await self._listen(connection)
        except ProxyError as why:
            connection.last_words = why.reply
            return
        if dialogue is None:
            return
        deadline_s = trio.current_time() + CONNECT_TIMEOUT_S
        is_tunnel = bool(dialogue.accept())  # else a URL, and the server answers
        outer = None
        try:
            grant = self._decide(connection)
            # A ClientHello comes behind the answer only, and is read before dialling.
            if is_tunnel and grant.checks_tls:
                await self._outbound.check(connection, deadline_s)
            else:
                outer = await self._outbound.connect(connection, deadline_s)
        except DeniedError as why:
            connection.last_words = dialogue.refuse(why.refused)
            raise
        except UnreachableError:
            connection.last_words = dialogue.fail()
            raise
        if outer is None:
            await self._open_tls(connection, grant, dialogue, deadline_s)
        elif is_tunnel:
            await self._open_tunnel(connection, outer, dialogue)
        else:
            request = _Request(dialogue)
            await self._outbound.join(connection, outer, outgoing=request)

    async def _listen(self, connection: Connection) -> Dialogue | None:
        """Return a dialogue in which a host was asked for; None if the program left."""
        dialogue: Dialogue | None = None
        target = None
        while target is None:
            data = await receive(connection.inner, READ_BYTES)
            if not data:
                return None
            dialogue = dialogue or open_dialogue(data[0])
            try:
                target = dialogue.receive(data)
            except ProxyError as why:
                raise ProxyError(str(why), dialogue.take_reply() + why.reply) from None
            await send_all(connection.inner, dialogue.take_reply())
        connection.host, connection.port = target.host, target.port
        return dialogue

    def _decide(self, connection: Connection) -> Grant:
        """Return what allows a connection, to a name where its address stands for one."""
        if not isinstance(connection.host, str):
            host = self._access.host_at(connection.host, connection.port)
            connection.host = host
        return self._access.decide(connection.host, connection.port)

    async def _open_tls(
        self,
        connection: Connection,
        grant: Grant,
        dialogue: Dialogue,
        deadline_s: float,
    ) -> None:
        await send_all(connection.inner, dialogue.accept())
        first = dialogue.forward()
        hello = await self._outbound.read_hello(connection, grant, first)
        outer = await self._outbound.connect(connection, deadline_s)
        await self._outbound.join(connection, outer, hello)

    async def _open_tunnel(
        self, connection: Connection, outer: socket.socket, dialogue: Dialogue
    ) -> None:
        try:
            await send_all(connection.inner, dialogue.accept())
        except BaseException:
            reset_socket(outer)
            raise
        await self._outbound.join(connection, outer, dialogue.forward())


def open_dialogue(first: int) -> Dialogue:
    """Return what speaks the protocol of a connection.

    Args:
        first: the first byte that came; `receive` gets it as well.

    Raises:
        ProxyError: the protocol is SOCKS4.
    """
    if first == _SOCKS4:
        raise ProxyError("cannot speak SOCKS4: use SOCKS5", _SOCKS4_REJECTED)
    return SocksDialogue() if first == proxy_socks.VERSION else HttpDialogue()


class _Request:
    """The one request of a connection in absolute form, as its server gets it."""

    is_needed = True

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue

    def forward(self, data: bytes) -> bytes:
        """Return what the server gets for some bytes."""
        try:
            return self._dialogue.forward(data)
        except ProxyError as why:
            raise FilterError(str(why)) from None
