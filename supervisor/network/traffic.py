"""How many connections and bytes a child has had, by name and port."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from supervisor.network.pool import MAX_NAMES
from supervisor.network.refusals import OTHERS

if TYPE_CHECKING:
    from supervisor.network.hosts import Address

MAX_ROWS = MAX_NAMES


@dataclass(slots=True)
class ConnectionCounts:
    """Counts of connections and their bytes.

    Attributes:
        connections: all that were made.
        open: those that are.
        bytes_in: bytes that the child got.
        bytes_out: bytes that it sent.
    """

    connections: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class TrafficState(msgspec.Struct):
    """The state for a hand-over, without connections."""

    total: ConnectionCounts
    rows: list[tuple[str, int | None, ConnectionCounts]]


class ChildTraffic:
    """The figures of one child.

    Args:
        state: those of a child that is taken over; none of its connections is open.

    Attributes:
        total: of all names and ports.
    """

    def __init__(self, state: TrafficState | None = None) -> None:
        self.total = ConnectionCounts()
        self._rows: dict[tuple[str, int | None], ConnectionCounts] = {}
        if state is not None:
            self.total = replace(state.total, open=0)
            for name, port, counts in state.rows:
                self._rows[name, port] = replace(counts, open=0)

    def snapshot(self) -> TrafficState:
        """Return what is handed over."""
        return TrafficState(self.total, [*self.rows()])

    def row(self, host: str | Address, port: int) -> ConnectionCounts:
        """Return the figures of a host and a port, of all others once there are many."""
        key: tuple[str, int | None] = (str(host), port)
        if key not in self._rows and len(self._rows) >= MAX_ROWS:
            key = (OTHERS, None)
        return self._rows.setdefault(key, ConnectionCounts())

    def rows(self) -> tuple[tuple[str, int | None, ConnectionCounts], ...]:
        """Return (name, port, figures), the oldest first."""
        return tuple((*key, counts) for key, counts in self._rows.items())
