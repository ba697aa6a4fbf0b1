"""A relay between nested clients and a host in memory, for the tests of the relay."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import pytest
import trio
from loguru import logger

from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from tests.vfs.fakeline import Gate, Peer
from vfs.client.aio import AsyncClient
from vfs.relay import NestedClient, Relay, open_relay

SERIAL = frozenset({b"ATTACH", b"NARROW"})
"""A path unknown to the host, so that requests take turns."""

MIB = 1024 * 1024

Kind = TypeVar("Kind", bound=m.Request)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect what is logged meanwhile, a line each."""
    lines: list[str] = []
    number = logger.add(
        lambda line: lines.append(str(line).rstrip("\n")), format="{message}"
    )
    try:
        yield lines
    finally:
        logger.remove(number)


class Scene:
    """A host, the process that relays, and what a test needs to look at them.

    Attributes:
        host: the host.
        relay: the proxy.
        own: the relaying process's own client.
    """

    def __init__(self, host: FakeHost, relay: Relay, own: AsyncClient) -> None:
        self.host = host
        self.relay = relay
        self.own = own
        self.ends: list[socket.socket] = []

    async def connect(self, rights: dict[str, object] | None = None) -> NestedClient:
        """Return a nested client, whose end is closed when the scene is over."""
        nested = await self.relay.new_client(rights)
        self.ends.append(nested.child_end)
        return nested

    async def nested(self) -> tuple[NestedClient, AsyncClient]:
        """Return a nested client and its own view of its connection."""
        nested = await self.connect()
        return nested, AsyncClient((nested.child_end.fileno(),))

    def upstream_of(self, number: int) -> Peer:
        """Return the connection that the n-th nested client has at the host."""
        return self.host.peers[0 if self.relay.is_serial else number]


@asynccontextmanager
async def scene(
    unknown: frozenset[bytes] = frozenset(), dialect: int = 2
) -> AsyncIterator[Scene]:
    """Open a scene; at its end everybody is gone.

    Args:
        unknown: commands that the host does not know.
        dialect: the one that nested clients speak.
    """
    with FakeHost(unknown=unknown) as host, host.connect() as line:
        own = AsyncClient((line.fileno(),), dialect=2)
        async with open_relay(own, dialect=dialect) as relay:
            scene = Scene(host, relay, own)
            try:
                yield scene
            finally:
                for end in scene.ends:
                    end.close()


both = pytest.mark.parametrize(
    "unknown", [frozenset(), SERIAL], ids=["attach", "serial"]
)


async def wait(event_owner: Peer | Gate) -> None:
    """Wait until a connection is gone at the host, or a gate is reached."""
    event = event_owner.gone if isinstance(event_owner, Peer) else event_owner.reached
    await trio.to_thread.run_sync(event.wait)


async def dialogue(line: socket.socket, request: bytes, size: int) -> bytes:
    """Send bytes and return the next ``size`` ones that come."""
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(line.dup()))
    async with stream:
        await stream.send_all(request)
        reply = b""
        while len(reply) < size and (more := await stream.receive_some(65_536)):
            reply += more
    line.setblocking(True)
    return reply


async def send(nested: NestedClient, data: bytes) -> None:
    """Send more than the line holds, so not in this thread."""
    await trio.to_thread.run_sync(nested.child_end.sendall, data)


def seen(peer: Peer, kind: type[Kind]) -> list[Kind]:
    """Return the requests of one class that a connection brought."""
    return [request for request in peer.seen if isinstance(request, kind)]
