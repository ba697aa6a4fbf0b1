"""The caller's part of a decision: first changes to store, then messages to send.

Invariant: nothing is sent or done before the changes decided with it, and with every step
before it, are in the store. So a node never knows what a directory that was killed has
forgotten, nor the other way round. Steps are carried out in the order of their decisions,
those without a change too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import msgspec

    from supervisor.fleet.messages import Message


class Moment(NamedTuple):
    """A time as one machine reads it.

    Attributes:
        clock_s: CLOCK_BOOTTIME; compared with readings of the same machine alone.
        wall_s: seconds since the epoch, for people.
    """

    clock_s: float
    wall_s: float


class Change(NamedTuple):
    """A row of the store, new or as it is from now on.

    Attributes:
        table: ``nodes``, ``children``, ``accounts``, ``slices``, ...
        key: names it there.
        row: None to delete it.
    """

    table: str
    key: str
    row: msgspec.Struct | None


class Send(NamedTuple):
    """A message, and the node that it goes to, or comes from."""

    node: str
    message: Message


@dataclass(slots=True)
class Step:
    """The decision that follows from one event.

    Attributes:
        changes: to be stored, all of them or none.
        sends: to be sent afterwards.
    """

    changes: list[Change] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)

    def put(self, table: str, key: str, row: msgspec.Struct | None) -> None:
        """Store a row; None deletes it."""
        self.changes.append(Change(table, key, row))

    def send(self, node: str, message: Message) -> None:
        """Send a message once the changes are stored."""
        self.sends.append(Send(node, message))


class Store(Protocol):
    """Where changes go; see `store.py` and `postgres_store.py`.

    Attributes:
        epoch: counted up when it was opened; no process before had it.
        is_remote: another directory may take the store unnoticed. So each step is preceded by
            a `put`, without changes too: only the store's owner renews a lease.
    """

    epoch: int
    is_remote: bool

    def load(self) -> Iterable[tuple[str, str, bytes]]:
        """Yield (table, key, row) of all that is stored, rows as msgpack."""
        ...

    def put(self, changes: Sequence[Change]) -> None:
        """Store all changes in one transaction.

        Raises:
            StaleEpochError: another directory has counted the epoch up since.
        """
        ...

    def close(self) -> None:
        """Let another directory have it."""
        ...


class StoreError(Exception):
    """The store cannot be used; the text says why and what to do."""


class StaleEpochError(Exception):
    """Another directory writes this store by now: this one ends at once (FL2).

    Args:
        stored: the epoch in the store.
        own: that of the directory that cannot write.
    """

    def __init__(self, stored: int, own: int) -> None:
        super().__init__(
            f"cannot write the fleet's store: its epoch is {stored}, this directory's is"
            f" {own}; this one ends"
        )
