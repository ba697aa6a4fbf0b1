"""The fence before effects of fleet children: none after the lease's end (FL6).

The kernel's timer ends processes; it does not run while a virtual machine is paused. So
the host asks here before each effect: FD 3, model, network, tools, commit, report of an end.
A child that is in no fleet has no entry, and costs a look into a table at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from supervisor.fleet.ray_places import RayPlaces

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet
    from ipaddress import IPv4Address, IPv6Address

Address: TypeAlias = "IPv4Address | IPv6Address"


class FencedError(Exception):
    """An effect of a child may not go out; the text says why (FL6)."""


@dataclass(frozen=True, slots=True)
class FleetLife:
    """One incarnation of a child of the fleet.

    Attributes:
        node: name of the node.
        child: its id in the fleet.
        incarnation: which of its lives.
        is_fenced: nothing of it may outlive the lease; False where the operator allows
            that.
    """

    node: str
    child: str
    incarnation: int
    is_fenced: bool = True


class UnpaidError(Exception):
    """The fleet has not paid a call; the text says why.

    Attributes:
        is_refused: its account has no room; else there was no answer.
        is_held: present calls hold that room until they end.
    """

    def __init__(
        self, text: str, *, is_refused: bool = False, is_held: bool = False
    ) -> None:
        super().__init__(text)
        self.is_refused = is_refused
        self.is_held = is_held


class Payer(Protocol):
    """Pays calls of fleet children from the node's slices (FL7)."""

    async def reserve(self, worst: float) -> str | None:
        """Reserve a call's worst case; return its name, None if nothing is to be paid.

        It may be sent then: the reservation is in the ledger.

        Raises:
            FencedError: the lease is over.
            UnpaidError: the account has no room, or the directory does not answer.
        """
        ...

    def settle(self, call: str, cost: float) -> None:
        """Count what a call cost; 0 if it was never sent."""
        ...


class Fence:
    """The fleet children of a host, and the question whether they may act.

    Attributes:
        node: name of the node that the host is; None where it is in no fleet.
        judge: raises FencedError for a life whose effects may not go out.
        payer: pays their calls; None where the host is in no fleet.
        ray: of all nodes; fleet children do not reach it (FL9).
    """

    def __init__(self) -> None:
        self.node: str | None = None
        self.payer: Payer | None = None
        self.ray = RayPlaces()
        self.judge: Callable[[FleetLife], None] = _refuse
        self._lives: dict[str, FleetLife] = {}

    def add(self, child_id: str, life: FleetLife) -> None:
        """Fence a child of the host from now on."""
        self._lives[child_id] = life

    def remove(self, child_id: str) -> None:
        """Forget a child that is gone."""
        self._lives.pop(child_id, None)

    def life_of(self, child_id: str) -> FleetLife | None:
        """Return what the fleet knows a child as; None if it is in none."""
        return self._lives.get(child_id)

    def check(self, child_id: str) -> None:
        """Let an effect of a child go out.

        Raises:
            FencedError: it is of a fleet, and its lease is over.
        """
        life = self._lives.get(child_id)
        if life is not None:
            self.judge(life)

    def check_of(self, child_id: str) -> Callable[[], None] | None:
        """Return `check` for one child; None if it is in no fleet."""
        life = self._lives.get(child_id)
        return None if life is None else partial(self._judge, life)

    def _judge(self, life: FleetLife) -> None:
        self.judge(life)

    def keeps_from(
        self, child_id: str, address: Address, port: int, own: AbstractSet[Address]
    ) -> bool:
        """Return whether a child may not reach a place, for Ray may listen there.

        Args:
            child_id: of the host; one that is in no fleet is kept from nothing.
            address: without a zone.
            port: of it.
            own: the host's addresses.
        """
        return child_id in self._lives and self.ray.have(address, port, own)


def _refuse(life: FleetLife) -> None:
    raise FencedError(
        f"cannot let {life.child!r} act: this host is in no fleet any more;"
        " spawn it again, on a node"
    )
