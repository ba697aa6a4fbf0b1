"""The network by name as a service of a host: asked before a child is spawned.

It says what is to be made in the child's net namespace and what stands in its
environment, and gives what was made to a `ChildNetwork`, which serves it until the child
has ended (see `inner_sockets`).
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from hostlib.accounts import Account
from hostlib.handover import state_from
from hostlib.threads import in_thread
from supervisor.fsproxy.ports import NO_NAMES
from supervisor.network.additions import (
    ADDRESSES,
    V4,
    V6,
    Additions,
    routes_to,
    unbound,
)
from supervisor.network.child_network import (
    ChildIdentity,
    ChildNetwork,
    NetworkBounds,
    Outside,
)
from supervisor.network.credential_file import open_credentials
from supervisor.network.hosts import CREDENTIAL_SUFFIX
from supervisor.network.inner_sockets import InnerSockets
from supervisor.network.network_state import NetworkState
from supervisor.network.rule import parse_rule
from supervisor.network.rule_changes import narrow
from supervisor.network.settings import (
    DNS_PORT,
    OWN_PORTS,
    PROXY_PORT,
    SettingError,
    settings_from,
)

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Callable,
        Collection,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from contextlib import AsyncExitStack

    from hostlib.journal import Journal
    from hostlib.keys import FileIdentity
    from hostlib.log import Log
    from supervisor.fleet.fence import Fence
    from supervisor.fsproxy.ports import ChildView, NetworkFigure, Services
    from supervisor.network.credential_file import Credential
    from supervisor.network.inner_sockets import SocketsState
    from supervisor.network.network_state import ChildNetworkState
    from supervisor.network.section import CredentialSection, NetworkSection
    from supervisor.network.settings import NetworkSettings
    from supervisor.spawn.launcher import Launcher
    from supervisor.spawn.launchpad.layers.loopback import LoopbackOrder, SocketOrder
    from supervisor.spec import ChildSpec
    from vfs.clients import Client
    from vfs.filesystem import Filesystem

NO_SECTIONS: Mapping[str, CredentialSection] = MappingProxyType({})
"""The credentials of a host that has none."""

STOCK = 2
"""Unbound sockets of each family, for ports that are allowed later; the launchpad makes
more within 2 ms. Eight of each cost 0.1 ms of a start, and twelve descriptors more."""
STOCK_TO_PUBLISH = 32
"""The same of a child with published ports: each connection to one takes a socket as long
as it lasts. With 64 granted ports there are fewer than a message can hold (253)."""

_LOOPBACK, _ANY_V4, _ANY_V6 = "127.0.0.1", "0.0.0.0", "::"  # noqa: S104 - a child's

_PROXY_URL = f"http://{_LOOPBACK}:{PROXY_PORT}"


_NO_OWN_NETWORK = "network: a nested client shares its parent's namespace; use sandhost relay --network"


class NetworkHost(Protocol):
    """The part of the host that the service needs; `parts.Parts` has it.

    Attributes:
        holders: each yields (descriptor, a word for it) that is held.
    """

    journal: Journal
    log: Log
    fs: Filesystem
    launcher: Launcher
    services: Services
    fence: Fence
    holders: set[Callable[[], Iterable[tuple[int, str]]]]

    def hide_key_files(self, files: Mapping[str, FileIdentity]) -> None:
        """Keep files of keys from all children."""
        ...


class NetworkService:
    """Made by `open_network`.

    Attributes:
        connections_reset: those that ended with the host's program before.
    """

    def __init__(
        self,
        host: NetworkHost,
        nursery: trio.Nursery,
        credentials: Mapping[str, Credential],
    ) -> None:
        self._host = host
        self._terms = {name: one.terms for name, one in credentials.items()}
        self._nursery = nursery
        self._outside = Outside(
            host.journal, host.log, credentials=credentials, fence=host.fence
        )
        nursery.start_soon(self._outside.run)
        self._networks: dict[str, ChildNetwork] = {}
        self._by_client: dict[str, ChildNetwork] = {}
        self._inner_fds: dict[str, int] = {}
        self._left: dict[str, tuple[SocketsState, ChildNetworkState]] = {}
        self.connections_reset = 0

    async def child_starting(
        self, child: ChildView, stack: AsyncExitStack
    ) -> Mapping[str, str]:
        """Ask for a child's sockets; see `fsproxy.ports.Service`.

        Raises:
            OSError: there is no descriptor for their way to the host, or a credential is
                not known.
        """
        keys = child.spec.network_keys
        if keys is None:
            return {}
        try:
            settings = settings_from(keys, self._terms)
        except SettingError as why:
            raise OSError(errno.EINVAL, str(why)) from None
        serve = partial(self._serve, child, settings, stack)
        child.make_within(order_of(settings), serve, stack)
        return variables_of(settings)

    def network_of(self, child_id: str) -> ChildNetwork | None:
        """Return what serves a child; None if it has no network by name, or not yet."""
        return self._networks.get(child_id)

    def inner_fd(self, child_id: str) -> int:
        """Return a socket of a child's net namespace, which is the network's; -1: none."""
        return self._inner_fds.get(child_id, -1)

    def has_network(self, child_id: str) -> bool:
        """Tell whether a child has names; see `fsproxy.ports.Names`."""
        return child_id in self._networks

    def network_row(self, child_id: str) -> dict[str, object] | None:
        """Return what `ps` tells of a child's network; None if it has no names."""
        network = self._networks.get(child_id)
        return None if network is None else msgspec.to_builtins(network.row())

    def network_figures(
        self, child_id: str, most: int | None = None
    ) -> dict[str, object] | None:
        """Return the figures of a child's network; see `fsproxy.ports.Names`."""
        network = self._networks.get(child_id)
        if network is None:
            return None
        figures: dict[str, object] = msgspec.to_builtins(network.statistics(most))
        return figures

    def learned_rules(self, child_id: str) -> tuple[str, ...] | None:
        """Return the rules that would have sufficed; None if a child does not learn."""
        network = self._networks.get(child_id)
        return None if network is None else network.learned_rules()

    async def change_network(
        self, child_id: str, allow: Sequence[str], deny: Sequence[str], *, cut: bool
    ) -> None:
        """Change the rules of a child that has names.

        Raises:
            RuleError: nothing is changed, for the reason in the text.
        """
        allowed, denied = [*map(parse_rule, allow)], [*map(parse_rule, deny)]
        await self._networks[child_id].change(allowed, denied, cut=cut)

    def narrowing(self, client: Client, rules: Sequence[str]) -> Callable[[], None]:
        """Return what leaves a client's child a part of its rules; nothing is changed.

        Raises:
            ValueError: it has one of them not, or no rules of its own.
        """
        if client.parent is not None:
            raise ValueError(_NO_OWN_NETWORK)
        network = self._by_client.get(client.id)
        if network is None:
            raise ValueError(NO_NAMES)
        asked = [*map(parse_rule, rules)]
        narrow(network.rules, asked)
        return partial(network.narrow, asked)

    def rules_of(self, client: Client) -> tuple[str, ...] | None:
        """Return the rules of a client's child; see `fsproxy.ports.Names`."""
        network = self._by_client.get(client.id)
        return None if network is None else tuple(map(str, network.rules))

    def granted_figures(self) -> Iterator[NetworkFigure]:
        """Yield what went between the children that are there and names."""
        for network in self._networks.values():
            yield from network.granted_figures()

    def client_gone(self, client: Client) -> None:
        """Do nothing: a network is its child's, and ends with that."""

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what is held for children, with a word for each."""
        for network in self._networks.values():
            yield from network.descriptors()
        yield from self._outside.descriptors()

    def close(self) -> None:
        """Close what all children share."""
        self._outside.pipes.close()

    def _serve(
        self,
        child: ChildView,
        settings: NetworkSettings,
        stack: AsyncExitStack,
        made: list[socket.socket],
        has_v6: bool,
    ) -> None:
        sockets = sockets_of(settings, made, has_v6=has_v6)
        try:
            self._start(child, settings, stack, sockets, None)
        except OSError as why:
            sockets.close()
            text = f"cannot publish at port {why.filename} of 127.0.0.1: {why.strerror}"
            raise OSError(why.errno, f"{text}; name another port") from None

    def _start(
        self,
        child: ChildView,
        settings: NetworkSettings,
        stack: AsyncExitStack,
        sockets: InnerSockets,
        state: ChildNetworkState | None,
    ) -> None:
        """Serve a child until the end of the stack.

        Raises:
            OSError: a port cannot be published.
        """
        identity = ChildIdentity(child.id, child.spec.name)
        additions = Additions(self._host.launcher, sockets.dns_datagram)
        sockets.make = partial(self._make_more, additions, sockets)
        bounds = _bounds_of(child.spec, additions)
        network = ChildNetwork(
            identity, settings, sockets, self._outside, bounds, state
        )
        account = sockets.account
        account.record(len(sockets.descriptors()))
        account.join(self._host.fs.descriptor_account)
        # Before the next, and so after it: sockets may come until that is done.
        stack.callback(lambda: account.record(-account.used))
        stack.push_async_callback(network.aclose)
        self._networks[child.id] = network
        stack.callback(self._networks.pop, child.id)
        if child.session is not None:
            client_id = child.session.client.id
            self._by_client[client_id] = network
            stack.callback(self._by_client.pop, client_id)
        self._inner_fds[child.id] = sockets.dns_datagram.fileno()
        stack.callback(self._inner_fds.pop, child.id)
        network.start(self._nursery)

    async def _make_more(
        self,
        additions: Additions,
        sockets: InnerSockets,
        families: Sequence[int],
    ) -> list[socket.socket]:
        """Return one more socket of each family that is listed, of a child's namespace.

        Raises:
            OSError: they cannot be made, the host has too few descriptors left, or the
                child has ended meanwhile.
        """
        count = len(families)
        promise = sockets.account.reserve(count)
        if promise is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            made = await additions.make_sockets(families)
            if sockets.dns_datagram.fileno() < 0:
                for sock in made:
                    sock.close()
                raise OSError(errno.ESRCH, "the child has ended")
            promise.settle(count)
        finally:
            promise.release()
        return made

    # Handed over

    def rest(self) -> None:
        """Do nothing: connections are served until exec(2)."""

    def resume(self) -> None:
        """Do nothing."""

    def busy(self) -> str | None:
        """Return None: connections may last as long as their children, and are reset."""
        return None

    def interrupt(self) -> None:
        """Do nothing."""

    def snapshot(self, stack: ExitStack) -> tuple[object, Collection[int]]:
        """Return each child's network without its connections; exec(2) resets those."""
        del stack
        state = NetworkState(
            {
                child_id: (network.snapshot_sockets(), network.snapshot())
                for child_id, network in self._networks.items()
            }
        )
        networks = self._networks.values()
        fds = {fd for network in networks for fd in network.handed_over()}
        return msgspec.to_builtins(state), fds

    async def restore(self, state: object) -> None:
        """Hold the networks of the program before until their children are restored."""
        self._left = state_from(state, NetworkState, "the network").children

    async def restore_child(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Restore a child's network."""
        keys, left = child.spec.network_keys, self._left.pop(child.id, None)
        if keys is None or left is None:
            return
        sockets, network = left
        inner = InnerSockets.restore(sockets)
        settings = settings_from(self._known_keys(child, keys), self._terms)
        self._start(child, settings, stack, inner, network)
        self.connections_reset += network.open

    def _known_keys(self, child: ChildView, keys: NetworkSection) -> NetworkSection:
        """Return a child's keys without credentials that this program was not given."""
        known = [name for name in keys.credentials if name in self._terms]
        for name in {*keys.credentials} - {*known}:
            text = f"the credential {name!r} is gone: its child goes on without it"
            self._host.log.write("WARNING", text, child_id=child.id)
        return msgspec.structs.replace(keys, credentials=known)

    async def restore_rest(self) -> None:
        """Do nothing: a network is one child's."""


@asynccontextmanager
async def open_network(
    host: NetworkHost, sections: Mapping[str, CredentialSection] = NO_SECTIONS
) -> AsyncIterator[NetworkService]:
    """Offer a host's children the network by name; it ends with the block.

    Args:
        host: whose.
        sections: its credentials, checked.

    Raises:
        OSError: a credential cannot be read; `strerror` says why.
    """
    credentials = await in_thread(open_credentials, sections)
    host.hide_key_files(
        {sections[name].file: one.identity for name, one in credentials.items()}
    )
    async with trio.open_nursery() as nursery:
        service = NetworkService(host, nursery, credentials)
        host.holders.add(service.descriptors)
        host.services.network = service
        try:
            yield service
        finally:
            host.services.network = None
            host.holders.discard(service.descriptors)
            nursery.cancel_scope.cancel()
            service.close()


def _bounds_of(spec: ChildSpec, additions: Additions) -> NetworkBounds:
    """Return what a child's network is bounded by (spec NET14).

    Connections of a nested child come to the host as its parent's, and count there.
    """
    limits = spec.group_limits
    connections, size = limits.connections, limits.net_bytes
    return NetworkBounds(
        connections=None if connections is None else Account(limit=connections),
        net_bytes=None if size is None else Account(limit=size),
        add_routes=additions.add_routes,
    )


def order_of(settings: NetworkSettings) -> LoopbackOrder:
    """Return what is to be made in the net namespace of a child (spec NET4)."""
    routes = routes_to(settings.rules.networks())
    return tuple(_sockets_wanted(settings)), ADDRESSES, routes


def _sockets_wanted(settings: NetworkSettings) -> Iterator[SocketOrder]:
    """Yield the sockets in the order in which `sockets_of` takes them."""
    stream = int(socket.SOCK_STREAM)
    granted = settings.rules.ports()
    yield V4, int(socket.SOCK_DGRAM), _LOOPBACK, DNS_PORT
    for port in OWN_PORTS:
        yield V4, stream, _ANY_V4 if port in granted else _LOOPBACK, port
    for port in granted:
        if port not in OWN_PORTS:
            yield V4, stream, _ANY_V4, port
        yield V6, stream, _ANY_V6, port
    stock = STOCK_TO_PUBLISH if settings.publish else STOCK
    yield from unbound((V4, V6) * stock)


def sockets_of(
    settings: NetworkSettings, made: list[socket.socket], *, has_v6: bool
) -> InnerSockets:
    """Return the sockets that were made by `order_of`, by their use.

    Args:
        settings: the same.
        made: in that order; without those of v6 where there is none.
        has_v6: whether there is.
    """
    left = iter(made)
    datagram, stream, proxy_stream = next(left), next(left), next(left)
    own = {DNS_PORT: stream, PROXY_PORT: proxy_stream}
    listeners: dict[int, tuple[socket.socket, ...]] = {}
    for port in settings.rules.ports():
        first = own.get(port) or next(left)
        listeners[port] = (first, next(left)) if has_v6 else (first,)
    return InnerSockets(datagram, stream, proxy_stream, listeners, [*left], has_v6)


def variables_of(settings: NetworkSettings) -> dict[str, str]:
    """Return what a child's environment says of its network.

    Its rules are for a relay, which narrows them for a nested child (spec NET2).
    """
    found = proxy_variables() if settings.proxy_env else {}
    if settings.mode != "none":
        found["FSPROXY_NETWORK"] = " ".join(map(str, settings.rules))
    return found


def proxy_variables() -> dict[str, str]:
    """Return the variables that name the proxy of a namespace (spec NET8)."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    without = f"localhost,{_LOOPBACK},::1,{CREDENTIAL_SUFFIX}"
    return {
        **dict.fromkeys((*names, "all_proxy"), _PROXY_URL),
        "no_proxy": without,
        "NO_PROXY": without,
    }
