"""The addresses that a child's names have in its namespace, and nowhere else.

A name keeps its address for the child's life, so that what a program has remembered
never comes to stand for another name: not even after the name was revoked.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, NamedTuple

from supervisor.network.addresses import POOL_V4, POOL_V6

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.network.hosts import Address

MAX_NAMES = 4096
"""Names of a child: a child that may ask for any name would fill the host's memory."""

NAMESPACE_V4 = POOL_V4[1]
"""The namespace's own address: the source of what the child connects to."""
NAMESPACE_V6 = POOL_V6[1]

_FIRST = 2  # the namespace has 1, and 0 is the network


class Pair(NamedTuple):
    """The two addresses of a name."""

    v4: IPv4Address
    v6: IPv6Address


class Pool:
    """The names of one child and their addresses.

    Args:
        names: those of a child that is taken over, as `names` returned them.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = list(names)
        self._places = {name: place for place, name in enumerate(self._names)}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, address: Address) -> bool:
        return address in POOL_V4 or address in POOL_V6

    def names(self) -> tuple[str, ...]:
        """Return all names, from which the same pool can be made."""
        return tuple(self._names)

    def assign(self, name: str) -> Pair | None:
        """Return the addresses of a name, new ones if it has none.

        Returns:
            None if the child has `MAX_NAMES` others.
        """
        place = self._places.get(name)
        if place is None:
            place = len(self._names)
            if place >= MAX_NAMES:
                return None
            self._names.append(name)
            self._places[name] = place
        return Pair(POOL_V4[_FIRST + place], POOL_V6[_FIRST + place])

    def name_of(self, address: Address) -> str | None:
        """Return the name that an address stands for, None if it stands for none."""
        if address not in self:
            return None
        network = POOL_V4 if isinstance(address, IPv4Address) else POOL_V6
        place = int(address) - int(network.network_address) - _FIRST
        return self._names[place] if 0 <= place < len(self._names) else None
