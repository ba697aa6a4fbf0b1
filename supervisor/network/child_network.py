"""The network of one child at run time: its DNS, its connections, its figures.

    network = ChildNetwork(identity, settings, sockets, outside)
    network.start(nursery)
    ...
    await network.aclose()  # ends its connections by reset, and closes the sockets

All children of a host share one `Outside`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_network
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import trio
from msgspec import UNSET, UnsetType

from hostlib.accounts import Account
from hostlib.listener import contain_fault
from hostlib.listener_set import ListenerSet
from supervisor.fleet.fence import Fence
from supervisor.fsproxy.ports import NetworkFigure
from supervisor.network.access import Access
from supervisor.network.connections import MAX_CONNECTIONS, Connections
from supervisor.network.credential_server import CredentialServer
from supervisor.network.dns_sockets import DnsSockets
from supervisor.network.forwarder import Forwarder
from supervisor.network.hosts import shorten
from supervisor.network.network_state import (
    ChildNetworkState,
    restore_rule,
    snapshot_rule,
)
from supervisor.network.notices import Notices
from supervisor.network.outbound import Outbound
from supervisor.network.own_addresses import read_own_addresses
from supervisor.network.pace import Pace
from supervisor.network.ports import Ports
from supervisor.network.publisher import Publisher
from supervisor.network.refusals import OTHERS
from supervisor.network.resolver import Resolver
from supervisor.network.rule import RuleError
from supervisor.network.rule_changes import narrow
from supervisor.network.rules import Rules
from supervisor.network.statistics import (
    NetworkRow,
    NetworkStatistics,
    name_row,
    refused_row,
)
from supervisor.network.traffic import ChildTraffic, ConnectionCounts
from supervisor.network.tunnel import Pipes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from hostlib.journal import Journal
    from hostlib.log import Log
    from supervisor.network.addresses import Network
    from supervisor.network.credential_file import Credential
    from supervisor.network.hosts import Address
    from supervisor.network.inner_sockets import InnerSockets, SocketsState
    from supervisor.network.rule import Rule
    from supervisor.network.settings import NetworkSettings


class ChildIdentity(NamedTuple):
    """Which child it is; `name` is None if it has none."""

    child_id: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Outside:
    """The parts that the networks of all children of a host share.

    Attributes:
        journal: where events go.
        log: told what the host itself lacks.
        resolver: of the host.
        own_addresses: reads the host's addresses, for each judgement.
        pipes: through which bytes move; closed with the host.
        pace: of all that begins.
        credentials: by name.
        fence: of the host.
        listeners: of all children, which `run` serves.
    """

    journal: Journal
    log: Log
    resolver: Resolver = field(default_factory=Resolver)
    own_addresses: Callable[[], AbstractSet[Address]] = read_own_addresses
    pipes: Pipes = field(default_factory=Pipes)
    pace: Pace = field(default_factory=Pace)
    credentials: Mapping[str, Credential] = field(default_factory=dict)
    fence: Fence = field(default_factory=Fence)
    listeners: ListenerSet = field(default_factory=lambda: ListenerSet("network"))

    async def run(self) -> NoReturn:
        """Accept connections of all children, and let them go on, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pace.run)
            nursery.start_soon(self.pipes.pace.run)
            await self.listeners.run(self.log)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what is held for all children, with a word for each."""
        for number in self.listeners.descriptors():
            yield number, "listeners of the network"
        for number in self.pipes.descriptors():
            yield number, "pipe of the network"
        for number in self.resolver.descriptors():
            yield number, "look-up of a name"


@dataclass(frozen=True, slots=True)
class NetworkBounds:
    """The bounds of one child's network, beside its rules.

    Attributes:
        connections: account of open connections; None for `MAX_CONNECTIONS` of its own.
        net_bytes: account of bytes in both directions; None for no bound.
        add_routes: makes networks local in the namespace, and raises OSError where that
            fails; None where it cannot be done any more.
    """

    connections: Account[int] | None = None
    net_bytes: Account[int] | None = None
    add_routes: Callable[[Sequence[Network]], Awaitable[None]] | None = None


class ChildNetwork:
    """Serves what one child sends to the sockets in its namespace.

    Args:
        settings: of mode `rules` or `learn`.
        sockets: of its namespace; owned.
        state: of a child that is taken over, with its sockets.

    Raises:
        OSError: a port of the host that is to be published is taken; its `filename` is
            the port, and the sockets are the caller's still.
    """

    def __init__(
        self,
        identity: ChildIdentity,
        settings: NetworkSettings,
        sockets: InnerSockets,
        outside: Outside,
        bounds: NetworkBounds | None = None,
        state: ChildNetworkState | None = None,
    ) -> None:
        state = state or ChildNetworkState()
        if state.rules is not None:
            settings = replace(settings, rules=Rules(map(restore_rule, state.rules)))
        self._identity = identity
        self._settings = settings
        self._sockets = sockets
        self._bounds = bounds = bounds or NetworkBounds()
        self._traffic = ChildTraffic(state.traffic)
        self._notices = Notices(outside.journal, identity.child_id, state.notices)
        self._access = Access(
            settings,
            outside.own_addresses,
            state.names,
            partial(outside.fence.keeps_from, identity.child_id),
        )
        routes = map(ip_network, state.routes)
        self._routes = frozenset([*settings.rules.networks(), *routes])
        if bounds.net_bytes is not None:
            bounds.net_bytes.record(state.net_bytes)
        self._connections = Connections(
            self._traffic,
            self._notices,
            outside.log,
            outside.pace,
            bounds.connections or Account(limit=MAX_CONNECTIONS),
            bounds.net_bytes,
        )
        self._connections.check_effect = partial(outside.fence.check, identity.child_id)
        self._outbound = Outbound(
            settings,
            self._access,
            self._connections,
            outside.resolver,
            outside.pipes,
            state.learned,
        )
        self._log = outside.log
        self._dns = DnsSockets(
            self._access,
            self._notices,
            outside.log,
            outside.pace,
            has_v6=sockets.has_v6,
        )
        self._forwarder = Forwarder(
            self._access,
            self._connections,
            self._outbound,
            self._dns,
            CredentialServer(
                self._connections,
                self._outbound,
                [outside.credentials[terms.name] for terms in settings.credentials],
            ),
        )
        self._publisher = Publisher(
            settings.publish,
            sockets,
            self._connections,
            outside.pipes,
            outside.listeners,
            state.published,
        )
        self._ports = Ports(
            sockets, self._forwarder, outside.listeners, state.closed_ports
        )
        if state.open:
            self._notices.tell_reset(state.open)
        self._changing = trio.Lock()
        self._scope = trio.CancelScope()
        self._has_ended: trio.Event | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Begin to serve, in a nursery of the caller's, until `aclose`."""
        self._has_ended = trio.Event()
        nursery.start_soon(self._run, self._has_ended)

    async def aclose(self) -> None:
        """Reset what is open, end all tasks and close the sockets."""
        self._scope.cancel()
        self._stop_accepting()
        try:
            if self._has_ended is not None:
                await self._has_ended.wait()
        finally:
            self._publisher.close()
            self._sockets.close()

    def snapshot(self) -> ChildNetworkState:
        """Return what is handed over."""
        learned, size = self._outbound.learned, self._bounds.net_bytes
        return ChildNetworkState(
            closed_ports=[*self._ports.closed()],
            published=self._publisher.snapshot(),
            rules=[*map(snapshot_rule, self._access.rules)],
            routes=[*map(str, self._routes)],
            names=[*self._access.pool.names()],
            traffic=self._traffic.snapshot(),
            notices=self._notices.snapshot(),
            learned=None if learned is None else learned.snapshot(),
            net_bytes=0 if size is None else size.used,
            open=len(self._connections),
        )

    def snapshot_sockets(self) -> SocketsState:
        """Return what is handed over of the namespace's sockets."""
        return self._sockets.snapshot(self._publisher.sockets_in_use())

    def handed_over(self) -> tuple[int, ...]:
        """Return the descriptors that are handed over: all but those of connections."""
        return (*self._sockets.descriptors(), *self._publisher.descriptors())

    @property
    def rules(self) -> Rules:
        """The rules in force."""
        return self._access.rules

    async def change(
        self, allow: Sequence[Rule], deny: Sequence[Rule], *, cut: bool = False
    ) -> None:
        """Change the rules; the next connection obeys (spec NET12).

        Args:
            allow: rules to add, none of them a refusal.
            deny: rules to refuse, none of them a refusal.
            cut: reset what is open and not allowed any more.

        Raises:
            RuleError: nothing is changed, for the reason in the text.
        """
        async with self._changing:
            rules = self._access.changed(allow, deny)
            await self._add_routes(allow)
            await self._prepare(rules, allow)
            # Anew, for the child may have narrowed them; nothing waits from here on.
            rules = self._access.changed(allow, deny)
            self._listen(rules, allow)
            self._access.rules = rules
        if cut:
            for connection in self._connections:
                # A connection that is not dialled yet is judged by the new rules then.
                if connection.outer and not self._outbound.is_allowed(connection):
                    connection.scope.cancel()
        texts = ([rule.written for rule in rules] for rules in (allow, deny))
        self._notices.tell_changed(*texts, cut=cut)

    def narrow(self, asked: Sequence[Rule]) -> None:
        """Leave the child a part of its rules (spec NET2).

        Raises:
            RuleError: it has one of them not; nothing is changed.
        """
        rules = narrow(self._access.rules, asked)
        self._ports.change(rules.ports())  # there are no new ones
        self._access.rules = rules
        self._notices.tell_narrowed(rules.texts())

    def learned_rules(self) -> tuple[str, ...] | None:
        """Return the smallest list of rules that would have sufficed, sorted.

        Returns:
            None if the child's network is not in the mode `learn`.
        """
        learned = self._outbound.learned
        return None if learned is None else tuple(map(str, learned.rules()))

    def statistics(self, most: int | None = None) -> NetworkStatistics:
        """Return all figures.

        Args:
            most: names, and refusals, the newest; None for all.
        """
        total, learned = self._traffic.total, self._outbound.learned
        newest = slice(None if most is None else -most, None)
        return NetworkStatistics(
            child_id=self._identity.child_id,
            name=self._identity.name,
            mode=self._settings.mode,
            rules=self._access.rules.texts(),
            names=tuple(name_row(*row) for row in self._traffic.rows()[newest]),
            refused=tuple(map(refused_row, self._notices.rows()[newest])),
            published=self._publisher.rows(),
            connections=total.connections,
            open=total.open,
            bytes_in=total.bytes_in,
            bytes_out=total.bytes_out,
            upstream=self._upstream,
            not_learned=(0 if learned is None else learned.left_out) or UNSET,
        )

    def row(self) -> NetworkRow:
        """Return what a row of `ps` tells."""
        total = self._traffic.total
        return NetworkRow(
            mode=self._settings.mode,
            rules=self._access.rules.texts(),
            connections=total.connections,
            open=total.open,
            bytes_in=total.bytes_in,
            bytes_out=total.bytes_out,
            refused=self.refused,
            published=self._publisher.rows(),
            upstream=self._upstream,
        )

    @property
    def _upstream(self) -> str | UnsetType:
        upstream = self._settings.upstream
        return UNSET if upstream is None else str(upstream)

    def granted_figures(self) -> Iterator[NetworkFigure]:
        """Yield what went through connections, by names that rules grant by themselves."""
        child = self._identity.name or self._identity.child_id
        granted = {
            name
            for rule in self._access.rules
            if not rule.is_refusal and (name := _name_in_figures(rule.target))
        }
        sums: dict[str, ConnectionCounts] = {}
        for name, _, counts in self._traffic.rows():
            total = sums.setdefault(
                name if name in granted else OTHERS, ConnectionCounts()
            )
            total.connections += counts.connections
            total.bytes_in += counts.bytes_in
            total.bytes_out += counts.bytes_out
        for name, total in sums.items():
            yield NetworkFigure(
                child, name, total.connections, total.bytes_in, total.bytes_out
            )

    @property
    def refused(self) -> int:
        """How much was refused."""
        return self._notices.refused

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield each descriptor that this holds of the host's, and a word for it."""
        for number in self._sockets.descriptors():
            yield number, "network of a child"
        for connection in self._connections:
            for sock in (connection.inner, *connection.outer):
                if sock.fileno() >= 0:
                    yield sock.fileno(), "connection of a child"
        for number in self._dns.descriptors():
            yield number, "DNS of a child"
        for number in self._publisher.descriptors():
            yield number, "published port of a child"

    async def _run(self, has_ended: trio.Event) -> None:
        try:
            # A fault here is one child's: its network ends, and no other.
            with contain_fault(self._log, "a child's network"), self._scope:
                async with trio.open_nursery() as nursery:
                    try:
                        self._ports.start(nursery)
                        self._publisher.start(nursery)
                        await self._dns.serve_datagrams(self._sockets.dns_datagram)
                    finally:  # before the nursery closes
                        self._stop_accepting()
        finally:
            has_ended.set()

    def _stop_accepting(self) -> None:
        self._ports.stop()
        self._publisher.stop()

    async def _add_routes(self, allow: Sequence[Rule]) -> None:
        targets = (rule.target for rule in allow)
        networks = [
            target
            for target in targets
            if not isinstance(target, str) and target not in self._routes
        ]
        if not networks:
            return
        add_routes = self._bounds.add_routes
        if add_routes is None:
            raise RuleError(
                f"cannot allow '{networks[0]}': no address can be added to the network"
                " of this child; start it anew with the rule"
            )
        try:
            await add_routes(networks)
        except OSError as why:
            raise RuleError(
                f"cannot allow '{networks[0]}': no route to it in the child's network:"
                f" {why.strerror}; start the child anew with the rule"
            ) from None
        self._routes |= frozenset(networks)

    async def _prepare(self, rules: Rules, allow: Sequence[Rule]) -> None:
        try:
            await self._ports.prepare(rules.ports())
        except OSError as why:
            raise _no_listener(allow, why) from None

    def _listen(self, rules: Rules, allow: Sequence[Rule]) -> None:
        try:
            self._ports.change(rules.ports())
        except OSError as why:
            raise _no_listener(allow, why) from None


def _no_listener(allow: Sequence[Rule], why: OSError) -> RuleError:
    text = shorten(allow[0].written if allow else "")
    is_taken = why.errno == errno.EADDRINUSE
    reason = "the child listens on it itself" if is_taken else why.strerror
    return RuleError(
        f"cannot allow '{text}': no listener on port {why.filename}:"
        f" {reason}; free the port, or start the child anew with the rule"
    )


def _name_in_figures(target: str | Network) -> str | None:
    """Return the name of a rule's target in figures; None for a range, which has none."""
    if isinstance(target, str):
        return target
    return str(target.network_address) if target.num_addresses == 1 else None
