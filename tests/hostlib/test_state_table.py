"""Tables of (state, event): total, stepped through and drawn; also the product's."""

from enum import Enum
from typing import Any

import pytest

from hostlib.state_table import ImpossibleEventError, StateTable
from supervisor.children import lifecycle
from supervisor.fleet import states
from supervisor.spawn import restarts


class Light(Enum):
    """States of a lamp."""

    OFF = "off"
    ON = "on"


class Press(Enum):
    """The events: presses of a button."""

    SHORT = "short press"
    LONG = "long press"


class Deed(Enum):
    """The actions of the lamp."""

    NOTHING = "-"
    SHINE = "shine"


ROWS: dict[Light, dict[Press, tuple[Light, Deed] | None]] = {
    Light.OFF: {Press.SHORT: (Light.ON, Deed.SHINE), Press.LONG: None},
    Light.ON: {
        Press.SHORT: (Light.ON, Deed.NOTHING),
        Press.LONG: (Light.OFF, Deed.NOTHING),
    },
}
LAMP = StateTable("lamp", Light, Press, ROWS)

TABLES: tuple[tuple[StateTable[Any, Any, Any], type[Enum], type[Enum]], ...] = (
    (lifecycle.TABLE, lifecycle.State, lifecycle.Event),
    (restarts.TABLE, restarts.Phase, restarts.RestartEvent),
    (states.NODES, states.NodeState, states.NodeEvent),
    (states.CHILDREN, states.ChildState, states.ChildEvent),
    (states.PHASES, states.NodePhase, states.PhaseEvent),
    (LAMP, Light, Press),
)


# I3
@pytest.mark.parametrize("state", Light)
@pytest.mark.parametrize("event", Press)
def test_a_table_with_a_pair_left_out_is_refused(state: Light, event: Press) -> None:
    rows = {one: dict(row) for one, row in ROWS.items()}
    del rows[state][event]
    words = f"the table of a lamp: no entry for '{event.value}' in '{state.value}'"
    with pytest.raises(ValueError, match=words):
        StateTable("lamp", Light, Press, rows)


# I3
def test_a_table_with_a_state_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry for 'short press' in 'on'"):
        StateTable("lamp", Light, Press, {Light.OFF: ROWS[Light.OFF]})


# I3
@pytest.mark.parametrize(("table", "of_states", "of_events"), TABLES)
def test_a_step_is_the_entry_of_its_pair_or_raises(
    table: StateTable[Any, Any, Any], of_states: type[Enum], of_events: type[Enum]
) -> None:
    pairs = {(state, event) for state in of_states for event in of_events}
    assert set(table.entries) == pairs
    for (state, event), found in table.entries.items():
        if found is not None:
            assert table.step(state, event) == found
            continue
        words = f"^a {table.subject} that is {state.value} cannot have {event.value}$"
        with pytest.raises(ImpossibleEventError, match=words):
            table.step(state, event)


# I3
@pytest.mark.parametrize(("table", "of_states", "of_events"), TABLES)
def test_a_drawing_shows_every_pair(
    table: StateTable[Any, Any, Any], of_states: type[Enum], of_events: type[Enum]
) -> None:
    lines = table.draw().splitlines()
    assert len(lines) == 2 + len(of_states)
    for state, line in zip(of_states, lines[2:], strict=True):
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        for event, cell in zip(of_events, cells, strict=True):
            found = table.entries[state, event]
            if found is None:
                assert not cell
            elif found[0] is state:
                assert cell == found[1].value
            else:
                assert cell == f"{found[1].value} → {found[0].value}"
