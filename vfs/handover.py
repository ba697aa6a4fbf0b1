"""Numbers by which handed-over clients and files refer to places and policies.

Rules of a hand-over.

1. A descriptor is handed over by its number, which stays the same across exec(2); so do
   the locks of its open file (flock).
2. No path is resolved again: a place stays the directory that it was, also if it was
   renamed, and a right stays as it was given (spec A3, A4).
3. An object without a form (a file without a descriptor) is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vfs.places import Place
from vfs.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfs.places import PlaceState
    from vfs.policy import PolicyState


class Numbering:
    """Numbers for the places and policies to which several objects refer.

    Each place is owned by one child or session; others only refer to it.

    Attributes:
        places: the state of each place, by its number.
        policies: the state of each policy, by its number.
        fds: every descriptor that is handed over.
    """

    def __init__(self) -> None:
        self.places: list[PlaceState] = []
        self.policies: list[PolicyState] = []
        self.fds: set[int] = set()
        self._places: dict[int, int] = {}  # number by id; policies keep them alive
        self._policies: dict[int, int] = {}

    def number_place(self, place: Place) -> int:
        """Return the number of a place that another object owns."""
        number = self._places.get(id(place))
        if number is None:
            number = self._places[id(place)] = len(self.places)
            self.places.append(place.snapshot())
        return number

    def number_owned_place(self, place: Place) -> int:
        """Return the number of a place, and add its descriptors to ``fds``."""
        self.fds.update(place.backend.descriptors())
        return self.number_place(place)

    def number_policy(self, policy: Policy) -> int:
        """Return the number of a policy."""
        number = self._policies.get(id(policy))
        if number is None:
            number = self._policies[id(policy)] = len(self.policies)
            self.policies.append(policy.snapshot(self.number_place))
        return number


class NumberedObjects(NamedTuple):
    """The restored places and policies, by their numbers."""

    places: list[Place]
    policies: list[Policy]

    @classmethod
    def restore(
        cls, places: Iterable[PlaceState], policies: Iterable[PolicyState]
    ) -> NumberedObjects:
        """Return the places and policies of the program before."""
        restored = [Place.restore(state) for state in places]
        return cls(restored, [Policy.restore(state, restored) for state in policies])
