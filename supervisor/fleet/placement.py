"""The node for a child: free capacity, labels, spread or pack, a named node.

Pure: the nodes as they are go in, names or a reason come out (FL4). All of a request are
placed, or none.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

SPREAD, PACK = "spread", "pack"
"""Orders of nodes: the one with the most room first; the fullest that fits first."""


class Needs(msgspec.Struct, frozen=True):
    """Where a child may be placed.

    Attributes:
        labels: a node has to have all of them.
        node: the only one that will do; None for any.
        strategy: ``spread`` or ``pack``.
    """

    labels: tuple[str, ...] = ()
    node: str | None = None
    strategy: str = SPREAD


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as placing sees it.

    Attributes:
        name: of the node.
        labels: given at its start.
        room: children that it can still take.
        is_up: it answers; nothing new is placed on another.
    """

    name: str
    labels: frozenset[str]
    room: int
    is_up: bool = True


class PlacementError(Exception):
    """There is no place; the text says what is lacking."""


def place(needs: Needs, count: int, candidates: Iterable[Candidate]) -> list[str]:
    """Return the nodes of so many children, one each, in the order of the children.

    Raises:
        PlacementError: not all of them have a place.
    """
    fit = _fitting(needs, candidates)
    room = sum(max(0, node.room) for node in fit)
    if room < count:
        wanted = "a child" if count == 1 else f"{count} children"
        where = "" if needs.node is None else f" on {needs.node!r}"
        raise PlacementError(
            f"cannot place {wanted}{where}: there is room for {room}; end others, or"
            " wait with --wait"
        )
    sign = -1 if needs.strategy == SPREAD else 1
    heap = [(sign * node.room, node.name, node.room) for node in fit if node.room > 0]
    heapq.heapify(heap)
    names = []
    for _ in range(count):
        _, name, left = heapq.heappop(heap)
        names.append(name)
        if left > 1:
            heapq.heappush(heap, (sign * (left - 1), name, left - 1))
    return names


def _fitting(needs: Needs, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the nodes that will do, with room or without.

    Raises:
        PlacementError: there is none.
    """
    nodes = list(candidates)
    if needs.node is not None:
        nodes = [node for node in nodes if node.name == needs.node]
        if not nodes:
            raise PlacementError(
                f"cannot place on {needs.node!r}: no such node; see `fleet ps`"
            )
    labelled = [node for node in nodes if node.labels.issuperset(needs.labels)]
    if not labelled:
        labels = ", ".join(needs.labels)
        where = "no node has" if needs.node is None else f"{needs.node!r} has not"
        raise PlacementError(
            f"cannot place a child that needs {labels}: {where} these labels; join a"
            " node with them"
        )
    up = [node for node in labelled if node.is_up]
    if not up:
        names = ", ".join(node.name for node in labelled)
        raise PlacementError(
            f"cannot place a child: {names} cannot be reached; wait with --wait"
        )
    return up
