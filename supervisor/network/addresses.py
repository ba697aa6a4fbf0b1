"""Addresses that no name may stand for, and what a rule opens of them (spec NET3).

1. One closed address among the answers of a name refuses the name: an answer that is
   tried after another one failed is chosen by the peer.
2. A v6 address is closed if a v4 address that it holds is.
3. A rule opens a closed range only if the rule's network lies inside of that range, and
   an own address of the host only if it names that address alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TYPE_CHECKING

from supervisor.network.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from collections.abc import Set as AbstractSet

    from supervisor.network.hosts import Address

Network = IPv4Network | IPv6Network

POOL_V4 = IPv4Network("198.18.0.0/15")
"""v4 addresses of a child's names (RFC 2544: for benchmarks, never routed)."""
POOL_V6 = IPv6Network("fd5a:6e64:686f::/64")
"""v6 addresses of a child's names."""

METADATA: tuple[Network, ...] = (
    IPv4Network("168.63.129.16/32"),
    IPv4Network("100.100.100.200/32"),
    IPv6Network("fd00:ec2::/32"),
    IPv6Network("fd20:ce::254/128"),
    IPv6Network("fd00:c1::a9fe:a9fe/128"),
    IPv6Network("fd00:42::42/128"),
)
"""Clouds' metadata services: Azure, Alibaba, AWS, Google, Oracle, Scaleway."""

PRIVATE: tuple[Network, ...] = (
    IPv4Network("10.0.0.0/8"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
    IPv4Network("100.64.0.0/10"),
    IPv6Network("fc00::/7"),
)
"""Ranges that the option `private` opens, except metadata and own addresses."""

_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")

CLOSED: tuple[Network, ...] = (
    *PRIVATE,
    *METADATA,
    IPv4Network("0.0.0.0/8"),
    IPv4Network("127.0.0.0/8"),
    IPv4Network("169.254.0.0/16"),
    IPv4Network("192.0.0.0/24"),
    POOL_V4,
    IPv4Network("224.0.0.0/4"),
    IPv4Network("240.0.0.0/4"),
    IPv6Network("::/128"),
    IPv6Network("::1/128"),
    IPv6Network("fe80::/10"),
    IPv6Network("fec0::/10"),
    IPv6Network("ff00::/8"),
    # The site chooses where the v4 address stands in it (RFC 8215): closed as a whole.
    _LOCAL_NAT64,
)
"""Ranges that a name never reaches."""

_FORMS = (
    IPv6Network("::ffff:0:0/96"),  # mapped
    IPv6Network("::/96"),  # compatible
    IPv6Network("::ffff:0:0:0/96"),  # translated (RFC 2765)
    IPv6Network("64:ff9b::/96"),  # NAT64
    IPv6Network("2002::/16"),  # 6to4
)
"""Prefixes after which 32 bits of a v6 address are a v4 address."""

_TEREDO = IPv6Network("2001::/32")


@dataclass(frozen=True, slots=True)
class Opening:
    """The closed ranges that the rules for one connection open.

    Attributes:
        private: the ranges of `PRIVATE`.
        networks: those of rules that name an address.
        outer_pool: the pools: the host's resolver is another sandhost's.
    """

    private: bool = False
    networks: tuple[Network, ...] = ()
    outer_pool: bool = False


def judge(
    addresses: Collection[Address], opening: Opening, own: AbstractSet[Address]
) -> Reason | None:
    """Return why no address of an answer may be connected to, or None.

    Args:
        addresses: all that a name stands for, or the one that was named.
        opening: the ranges that the rules open.
        own: the host's addresses at this moment, without zones.
    """
    if not addresses:
        return Reason.NO_SUCH_NAME
    for address in addresses:
        reason = _judge_one(without_zone(address), opening, own)
        if reason is not None:
            return reason
    return None


def _judge_one(
    address: Address, opening: Opening, own: AbstractSet[Address]
) -> Reason | None:
    is_own = address in own or any(held in own for held in held_addresses(address))
    if is_own and not any(
        network.num_addresses == 1 and address in network
        for network in opening.networks
    ):
        return Reason.OWN_ADDRESS
    for closed in closed_ranges(address):
        if not _opens(opening, closed, address):
            return Reason.PRIVATE_ADDRESS
    return None


def _opens(opening: Opening, closed: Network, address: Address) -> bool:
    if opening.private and closed in PRIVATE:
        return True
    if opening.outer_pool and (address in POOL_V4 or address in POOL_V6):
        return True
    return any(is_within(network, closed) for network in opening.networks)


def closed_ranges(address: Address) -> Iterator[Network]:
    """Yield each closed range that an address lies in, itself or by what it holds.

    The range of a held address is yielded in the form of its holder: 10/8 within 6to4
    is 2002:a00::/24.
    """
    for network in CLOSED:
        if address in network:
            yield network
    if isinstance(address, IPv4Address):
        return
    for form in _FORMS:
        if address in form:
            for network in closed_ranges(_held_after(form, address)):
                yield _in_form(form, network)
    if address in _TEREDO and any(
        any(closed_ranges(held)) for held in _held_by_teredo(address)
    ):
        yield IPv6Network(address)


def held_addresses(address: Address) -> Iterator[IPv4Address]:
    """Yield the v4 addresses that a v6 address holds, in every form there is."""
    if isinstance(address, IPv4Address):
        return
    for form in _FORMS:
        if address in form:
            yield _held_after(form, address)
    if address in _TEREDO:
        yield from _held_by_teredo(address)


def is_within(inner: Network, outer: Network) -> bool:
    """Tell whether all addresses of a network are another one's."""
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)


def _held_after(form: IPv6Network, address: IPv6Address) -> IPv4Address:
    return IPv4Address((int(address) >> (96 - form.prefixlen)) & 0xFFFFFFFF)


def _in_form(form: IPv6Network, network: Network) -> IPv6Network:
    start = int(network.network_address) << (96 - form.prefixlen)
    return IPv6Network(
        (int(form.network_address) | start, form.prefixlen + network.prefixlen)
    )


def _held_by_teredo(address: IPv6Address) -> tuple[IPv4Address, IPv4Address]:
    """Return the server and the client of a Teredo address (RFC 4380, 4)."""
    bits = int(address)
    return IPv4Address((bits >> 64) & 0xFFFFFFFF), IPv4Address(~bits & 0xFFFFFFFF)


def without_zone(address: Address) -> Address:
    """Return an address without the interface that it is of."""
    return address if isinstance(address, IPv4Address) else IPv6Address(int(address))
