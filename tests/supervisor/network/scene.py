"""A child's network between two namespaces: the child's, and one for the world."""

import socket
import struct
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Self

import trio

from hostlib.journal import Journal
from hostlib.log import Log
from supervisor.network.child_network import (
    ChildIdentity,
    ChildNetwork,
    NetworkBounds,
    Outside,
)
from supervisor.network.credential_file import Credential
from supervisor.network.hosts import Address
from supervisor.network.network_state import ChildNetworkState
from supervisor.network.own_addresses import read_own_addresses
from supervisor.network.resolver import Resolver, ResolverError
from supervisor.network.rule import parse_rule
from supervisor.network.section import NetworkSection
from supervisor.network.settings import settings_from
from supervisor.network.statistics import NetworkStatistics
from tests.supervisor.network import dnsclient as dns
from tests.supervisor.network.netns import (
    CHILD,
    OUTSIDE,
    Namespace,
    inner_sockets,
    threads_leave,
)

Handler = Callable[[trio.SocketStream], Awaitable[None]]
IPV6_FREEBIND = 78  # ipv6(7): an address that is local by its route alone
RESET = struct.pack("ii", 1, 0)


@dataclass
class Names:
    """The names that the host's resolver knows.

    Attributes:
        answers: addresses by name, or how the resolver fails.
        asked: every name that it was asked for.
        may_answer: cleared, it is silent.
    """

    answers: dict[str, list[str] | ResolverError] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    def look_up(self, name: str) -> tuple[Address, ...]:
        """Answer as `resolver.ask_system` does."""
        self.asked.append(name)
        self.may_answer.wait()
        answer = self.answers.get(name, [])
        if isinstance(answer, ResolverError):
            raise answer
        return tuple(map(ip_address, answer))


@dataclass
class Event:
    """The events of the journal."""

    name: str
    fields: dict[str, object]


class Scene:
    """A child's network that runs; the test's thread is in the outer namespace.

    Attributes:
        child: the child's namespace.
        names: the host's resolver.
        credentials: the host's.
        events: those of the journal.
        own_addresses: reads those of the host.
        network: the one under test.
    """

    def __init__(
        self,
        child: Namespace,
        names: Names,
        nursery: trio.Nursery,
        credentials: Mapping[str, Credential],
    ) -> None:
        self.child = child
        self.credentials = credentials
        self.names = names
        self.events: list[Event] = []
        self.own_addresses: Callable[[], frozenset[Address]] = read_own_addresses
        self.outside = self._outside()
        self._nursery = nursery
        self._change = trio.Event()
        self._streams: list[trio.SocketStream] = []

    def _outside(self) -> Outside:
        journal = Journal(-1, lambda _: None)
        journal.taps.append(self._note)
        resolver = Resolver(self.names.look_up)
        return Outside(
            journal,
            Log("ERROR"),
            resolver,
            self._read_own,
            credentials=self.credentials,
        )

    def _read_own(self) -> frozenset[Address]:
        return self.own_addresses()

    def open(
        self,
        section: NetworkSection,
        bounds: NetworkBounds | None = None,
        stock: int = 8,
        state: ChildNetworkState | None = None,
    ) -> Self:
        """Start the network."""
        terms = {name: one.terms for name, one in self.credentials.items()}
        settings = settings_from(section, terms)
        sockets = inner_sockets(self.child, settings.rules.ports(), stock)
        identity = ChildIdentity("c1", "alice")
        self.network = ChildNetwork(
            identity, settings, sockets, self.outside, bounds, state
        )
        self.network.start(self._nursery)
        return self

    @property
    def figures(self) -> NetworkStatistics:
        """The figures of the child."""
        return self.network.statistics()

    def serve(
        self, address: str, port: int, handler: Handler
    ) -> list[trio.SocketStream]:
        """Serve at an address of the world; return the list of what was accepted."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        sock.bind((address, port))
        sock.listen(1024)
        return self.serve_in(sock, handler)

    def serve_in(
        self, sock: socket.socket, handler: Handler
    ) -> list[trio.SocketStream]:
        """Serve at a listener that is there; return the list of what was accepted."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        accepted: list[trio.SocketStream] = []

        async def handle(stream: trio.SocketStream) -> None:
            accepted.append(stream)
            self._streams.append(stream)
            async with stream:
                await handler(stream)

        self._nursery.start_soon(trio.serve_listeners, handle, [listener])
        return accepted

    async def event(self, name: str) -> dict[str, object]:
        """Wait for an event, and take it."""
        while True:
            for event in self.events:
                if event.name == name:
                    self.events.remove(event)
                    return event.fields
            await self._change.wait()

    def told(self, name: str = "network.refused") -> list[tuple[object, ...]]:
        """Return (name, port, reason, rule) of the events of a kind."""
        keys = ("name", "port", "reason", "rule")
        return [
            tuple(event.fields.get(key) for key in keys)
            for event in self.events
            if event.name == name
        ]

    async def ask(self, name: str, kind: int = dns.A) -> dns.Reply:
        """Ask the child's DNS by UDP."""
        sock = self.child.make_socket(kind=socket.SOCK_DGRAM)
        udp = trio.socket.from_stdlib_socket(sock)
        with udp:
            await udp.connect(("127.0.0.1", 53))
            await udp.send(dns.question(name, kind))
            return dns.read(await udp.recv(4096))

    async def connect(
        self, host: str, port: int, kind: int = dns.A
    ) -> trio.SocketStream:
        """Connect as a program in the child does: the name's address, then that."""
        try:
            address = str(ip_address(host))
        except ValueError:
            (address,) = (await self.ask(host, kind)).texts
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = trio.socket.from_stdlib_socket(self.child.make_socket(family))
        try:
            await sock.connect((address, port))
        except BaseException:
            sock.close()
            raise
        stream = trio.SocketStream(sock)
        self._streams.append(stream)
        return stream

    def close_streams(self) -> None:
        """Close what the test has left open on both sides."""
        for stream in self._streams:
            stream.socket.close()

    def _note(self, name: str, fields: dict[str, object]) -> None:
        self.events.append(Event(name, fields))
        self._change.set()
        self._change = trio.Event()

    async def change(
        self, allow: Iterable[str] = (), deny: Iterable[str] = (), *, cut: bool = False
    ) -> None:
        """Change the child's rules."""
        rules = ([parse_rule(text) for text in texts] for texts in (allow, deny))
        await self.network.change(*rules, cut=cut)


@asynccontextmanager
async def _namespaces(routes: Iterable[str]) -> AsyncIterator[Namespace]:
    lines = "".join(f"route add local {route} dev lo\n" for route in routes)
    child, outside = Namespace(CHILD + lines), Namespace(OUTSIDE)
    try:
        with outside.entered():
            yield child
    finally:
        child.close()
        outside.close()


@asynccontextmanager
async def scene(
    *rules: str,
    names: dict[str, list[str]] | None = None,
    section: NetworkSection | None = None,
    bounds: NetworkBounds | None = None,
    routes: Iterable[str] = (),
    stock: int = 8,
    credentials: Mapping[str, Credential] | None = None,
    state: ChildNetworkState | None = None,
) -> AsyncIterator[Scene]:
    """Run a child's network.

    Args:
        rules: of the child.
        names: the answers of the host's resolver.
        section: all of the child's settings, in the place of rules.
        bounds: of the child.
        routes: networks of rules for addresses, local in its namespace.
        stock: unbound sockets of each family.
        credentials: the host's.
        state: of a child that is taken over.
    """
    async with threads_leave(), _namespaces(routes) as child:
        async with trio.open_nursery() as nursery:
            stage = Scene(child, Names({**(names or {})}), nursery, credentials or {})
            wanted = section or NetworkSection(list(rules))
            nursery.start_soon(stage.outside.run)
            stage.open(wanted, bounds, stock, state)
            try:
                yield stage
            finally:
                stage.names.may_answer.set()
                await stage.network.aclose()
                stage.close_streams()
                nursery.cancel_scope.cancel()
        stage.outside.pipes.close()


async def echo(stream: trio.SocketStream) -> None:
    """Send everything back, then the end; a reset ends it as well."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async for data in stream:
            await stream.send_all(data)
        await stream.send_eof()


async def read_all(stream: trio.SocketStream) -> bytes:
    """Return all that comes until the end."""
    return b"".join([data async for data in stream])


async def is_reset(stream: trio.SocketStream) -> bool:
    """Tell whether a connection ends by reset, and not by its end."""
    try:
        await read_all(stream)
    except trio.BrokenResourceError:
        return True
    return False


async def reset(stream: trio.SocketStream) -> None:
    """Close a connection by RST."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    await stream.aclose()
