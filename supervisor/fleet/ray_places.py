"""Places where the fleet's Ray may listen; no child of it reaches one (FL9)."""

from __future__ import annotations

import hashlib
from ipaddress import ip_address
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet
    from ipaddress import IPv4Address, IPv6Address

    from supervisor.fleet.messages import RayPlace


class RayPlaces:
    """Where Ray listens on the nodes of a fleet.

    Args:
        places: one a node.

    Attributes:
        places: the same.
        digest: names them; empty for none.
    """

    def __init__(self, places: Iterable[RayPlace] = ()) -> None:
        self.places = tuple(places)
        data = msgspec.json.encode(self.places) if self.places else b""
        self.digest = hashlib.blake2b(data, digest_size=8).hexdigest() if data else ""
        self._tables = [
            (frozenset(map(ip_address, place.addresses)), place.ports)
            for place in self.places
        ]

    def have(
        self,
        address: IPv4Address | IPv6Address,
        port: int,
        own: AbstractSet[IPv4Address | IPv6Address],
    ) -> bool:
        """Return whether Ray of a node may listen at an address and a port.

        Args:
            address: without a zone.
            port: of it.
            own: this machine's addresses; of a node that is here, each counts.
        """
        is_own = address in own or address.is_loopback or address.is_unspecified
        for addresses, ports in self._tables:
            if not any(first <= port <= last for first, last in ports):
                continue
            if address in addresses:
                return True
            if is_own and any(one.is_loopback or one in own for one in addresses):
                return True
        return False


def is_place(place: RayPlace) -> bool:
    """Tell whether all addresses of a place are IP addresses."""
    try:
        list(map(ip_address, place.addresses))
    except ValueError:
        return False
    return True
