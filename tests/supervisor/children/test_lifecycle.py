"""The life of a child as a table: total, and every road in it leads to GONE."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.children.lifecycle import (
    TABLE,
    Action,
    Event,
    LifecycleError,
    State,
    diagram,
    step,
)

PAIRS = list(itertools.product(State, Event))


def possible(state: State) -> Iterator[tuple[Event, State, Action]]:
    """Yield (event, next state, action) of what can happen in a state."""
    for event in Event:
        following, action = TABLE[state, event]
        if action is not Action.FAULT:
            yield event, following, action


# I3
def test_every_state_and_event_has_an_entry() -> None:
    assert set(TABLE) == set(PAIRS)


# I3
@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_a_step_is_what_the_table_says_or_a_fault(state: State, event: Event) -> None:
    following, action = TABLE[state, event]
    if action is Action.FAULT:
        with pytest.raises(
            LifecycleError, match=f"{state.value} cannot have {event.value}"
        ):
            step(state, event)
        assert following is state
    else:
        assert step(state, event) == (following, action)


def test_every_state_can_be_come_to() -> None:
    reached = {State.STARTING}
    while True:
        more = {after for state in reached for _, after, _ in possible(state)} - reached
        if not more:
            break
        reached |= more
    assert reached == set(State)


def test_every_action_is_somebodys() -> None:
    assert {action for _, action in TABLE.values()} == set(Action)


# I5: whatever happens, a child can still come to its end, and stays there.
@pytest.mark.parametrize("state", State)
def test_every_road_leads_to_gone(state: State) -> None:
    reached = {state}
    for _ in State:
        reached |= {after for one in reached for _, after, _ in possible(one)}
    assert State.GONE in reached
    assert {after for _, after, _ in possible(State.GONE)} == {State.GONE}
    assert {action for _, _, action in possible(State.GONE)} == {Action.NOTHING}


# spec S2, S3: EOF closes the client and never moves the child.
@pytest.mark.parametrize("state", State)
def test_eof_moves_no_child(state: State) -> None:
    following, action = step(state, Event.EOF)
    assert following is state
    assert action is Action.NOTHING  # its session has closed the client


# spec S6
def test_a_stop_terminates_and_then_kills() -> None:
    assert step(State.RUNNING, Event.STOP) == (State.STOPPING, Action.TERMINATE)
    assert step(State.STOPPING, Event.GRACE_OVER) == (State.STOPPING, Action.KILL)
    assert step(State.STOPPING, Event.STOP) == (State.STOPPING, Action.KILL)


def test_a_child_that_was_stopped_before_it_was_there() -> None:
    state, action = step(State.STARTING, Event.STOP)
    assert (state, action) == (State.DOOMED, Action.NOTHING)
    assert step(state, Event.SPAWNED) == (State.STOPPING, Action.SERVE_AND_TERMINATE)
    assert step(state, Event.SPAWN_FAILED) == (State.REAPING, Action.CLEAN_UP)


# Along any road: cleaned up once, and only a process that was spawned is signalled.
@given(st.data())
def test_any_life(data: st.DataObject) -> None:
    state = State.STARTING
    actions: list[Action] = []
    spawned = exited = False
    for _ in range(30):
        event, state, action = data.draw(st.sampled_from(list(possible(state))))
        actions.append(action)
        spawned |= event is Event.SPAWNED
        exited |= event is Event.EXITED
        if action in {Action.SERVE_AND_TERMINATE, Action.TERMINATE, Action.KILL}:
            assert spawned
            assert not exited
        if state is State.GONE:
            break
    assert actions.count(Action.CLEAN_UP) <= 1
    assert actions.count(Action.REPORT) == (1 if state is State.GONE else 0)
    served = actions.count(Action.SERVE) + actions.count(Action.SERVE_AND_TERMINATE)
    assert served == spawned


def test_the_diagram_shows_every_pair() -> None:
    lines = diagram().splitlines()
    assert len(lines) == 2 + len(State)
    assert all(line.count("|") == len(Event) + 2 for line in lines)
    for state, line in zip(State, lines[2:], strict=True):
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        for event, cell in zip(Event, cells, strict=True):
            following, action = TABLE[state, event]
            if action is Action.FAULT:
                assert cell == ""
            else:
                assert cell.startswith(action.value)
                assert (following.value in cell) or following is state
