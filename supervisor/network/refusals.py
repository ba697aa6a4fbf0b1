"""Refusals of a child: reported at intervals, and counted in few rows (NET11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from supervisor.network.hosts import MAX_NAME_LENGTH, shorten

if TYPE_CHECKING:
    from supervisor.network.reasons import NetworkRefusal

MAX_ROWS = 256
"""Most rows of a child, so that one that asks for 10,000 names does not fill the journal."""
OTHERS = "(others)"
"""The name of the row that counts for all that have none of their own."""
TOLD_EVERY_S = 60.0
"""How often the same name and port are told."""


@dataclass(slots=True)
class RefusedName:
    """A name or an address that was refused.

    Attributes:
        name: as it was asked for; `OTHERS` for the last row.
        port: None if DNS alone was asked.
        reason: of the last refusal: the word of a `Reason`, or an error's symbol.
        rule: the rule that would allow it, or refuses it.
        count: refusals.
        time: of the last one, in seconds since the epoch.
    """

    name: str
    port: int | None
    reason: str
    rule: str | None
    count: int
    time: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A connection that was allowed, and could not be made.

    Attributes:
        reason: the symbol of an error.
        rule: none would help.
    """

    reason: str
    rule: None = None


class RefusalsState(msgspec.Struct):
    """The state for a hand-over.

    Attributes:
        rows: the oldest first.
        told_ago_s: how long ago each was told.
        count: refusals.
    """

    rows: list[RefusedName]
    told_ago_s: list[float]
    count: int


class Refusals:
    """The refusals of one child, or its failures.

    Args:
        now_s: of the clock of `add`.
    """

    def __init__(self, state: RefusalsState | None = None, now_s: float = 0.0) -> None:
        self._rows: dict[tuple[str, int | None], RefusedName] = {}
        self._told_at_s: dict[tuple[str, int | None], float] = {}
        self._count = 0
        if state is not None:
            self._count = state.count
            for row, ago_s in zip(state.rows, state.told_ago_s, strict=True):
                self._rows[row.name, row.port] = row
                self._told_at_s[row.name, row.port] = now_s - ago_s

    def snapshot(self, now_s: float) -> RefusalsState:
        """Return what is handed over."""
        told_ago_s = [now_s - self._told_at_s[key] for key in self._rows]
        return RefusalsState([*self._rows.values()], told_ago_s, self._count)

    def __len__(self) -> int:
        """Return how many refusals there were."""
        return self._count

    def rows(self) -> tuple[RefusedName, ...]:
        """Return the rows, the oldest first."""
        return tuple(self._rows.values())

    def add(
        self,
        name: str,
        port: int | None,
        refused: NetworkRefusal | Failure,
        *,
        now_s: float,
        time: float,
    ) -> RefusedName | None:
        """Count a refusal.

        Args:
            name: the requested name.
            port: None if DNS alone was asked.
            refused: why.
            now_s: of a clock that does not go back.
            time: of the calendar's clock.

        Returns:
            The row, if it is time to tell of it; None if that was done within the last
            minute.
        """
        self._count += 1
        key = (shorten(name, MAX_NAME_LENGTH), port)
        rule = refused.rule
        if key not in self._rows and len(self._rows) >= MAX_ROWS:
            key, rule = (OTHERS, None), None
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = RefusedName(*key, refused.reason, rule, 0, time)
        row.reason, row.rule, row.time = refused.reason, rule, time
        row.count += 1
        told_at_s = self._told_at_s.get(key)
        if told_at_s is not None and now_s - told_at_s < TOLD_EVERY_S:
            return None
        self._told_at_s[key] = now_s
        return row
