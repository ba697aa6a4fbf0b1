"""A total table of (state, event): the next state, and the owner's action (I3).

Rules of this file.

1. A table has an entry for every pair; a missing one is found when the module of the
   table is imported.  ``None`` is an entry: the pair cannot happen.
2. ``step`` only looks up; its caller acts.

The launchpad has its own table of plain numbers: to start quickly it imports only the
standard library, without ``enum``.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
A = TypeVar("A", bound=Enum)


class ImpossibleEventError(Exception):
    """An event came in a state in which it cannot: a bug of the table's owner."""


class StateTable(Generic[S, E, A]):
    """A table of (state, event).

    Args:
        subject: the owner of the states, for errors and drawings: "child".
        states: the enum of all states.
        events: the enum of all events.
        rows: state -> event -> (next state, action), or None if it cannot happen.

    Attributes:
        entries: (state, event) -> (next state, action) or None, for every pair.

    Raises:
        ValueError: a pair has no entry.
    """

    def __init__(
        self,
        subject: str,
        states: type[S],
        events: type[E],
        rows: Mapping[S, Mapping[E, tuple[S, A] | None]],
    ) -> None:
        pairs = [(state, event) for state in states for event in events]
        for state, event in pairs:
            if event not in rows.get(state, ()):
                raise ValueError(
                    f"cannot build the table of a {subject}: no entry for"
                    f" '{event.value}' in '{state.value}'; add one"
                )
        self.subject = subject
        self.entries: Mapping[tuple[S, E], tuple[S, A] | None] = MappingProxyType(
            {(state, event): rows[state][event] for state, event in pairs}
        )
        self._states = states
        self._events = events

    def step(self, state: S, event: E) -> tuple[S, A]:
        """Return the next state and the action.

        Raises:
            ImpossibleEventError: the pair cannot happen.
        """
        found = self.entries[state, event]
        if found is None:
            raise ImpossibleEventError(
                f"a {self.subject} that is {state.value} cannot have {event.value}"
            )
        return found

    def draw(self) -> str:
        """Return the table as a Markdown table; a pair that cannot happen is empty."""
        names = " | ".join(event.value for event in self._events)
        lines = [
            f"| {self.subject} | {names} |",
            "|---" * (len(self._events) + 1) + "|",
        ]
        for state in self._states:
            cells = " | ".join(self._draw_cell(state, event) for event in self._events)
            lines.append(f"| **{state.value}** | {cells} |")
        return "\n".join(lines) + "\n"

    def _draw_cell(self, state: S, event: E) -> str:
        found = self.entries[state, event]
        if found is None:
            return ""
        following, action = found
        if following is state:
            return str(action.value)
        return f"{action.value} → {following.value}"
