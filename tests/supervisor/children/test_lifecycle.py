"""The life of a child as a table: total, and every road in it leads to GONE."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.children.lifecycle import TABLE, Action, Event, State


def possible(state: State) -> Iterator[tuple[Event, State, Action]]:
    """Yield (event, next state, action) of what can happen in a state."""
    for event in Event:
        if (found := TABLE.entries[state, event]) is not None:
            yield event, *found


def test_every_state_can_be_come_to() -> None:
    reached = {State.STARTING}
    while True:
        more = {after for state in reached for _, after, _ in possible(state)} - reached
        if not more:
            break
        reached |= more
    assert reached == set(State)


def test_every_action_is_somebodys() -> None:
    assert {act for state in State for _, _, act in possible(state)} == set(Action)


# I5: whatever happens, a child can still come to its end, and stays there.
@pytest.mark.parametrize("state", State)
def test_every_road_leads_to_gone(state: State) -> None:
    reached = {state}
    for _ in State:
        reached |= {after for one in reached for _, after, _ in possible(one)}
    assert State.GONE in reached
    assert {after for _, after, _ in possible(State.GONE)} == {State.GONE}
    assert {action for _, _, action in possible(State.GONE)} == {Action.NOTHING}


# spec S6
def test_a_stop_terminates_and_then_kills() -> None:
    assert TABLE.step(State.RUNNING, Event.STOP) == (State.STOPPING, Action.TERMINATE)
    assert TABLE.step(State.STOPPING, Event.GRACE_OVER) == (State.STOPPING, Action.KILL)
    assert TABLE.step(State.STOPPING, Event.STOP) == (State.STOPPING, Action.KILL)


def test_a_child_that_was_stopped_before_it_was_there() -> None:
    state, action = TABLE.step(State.STARTING, Event.STOP)
    assert (state, action) == (State.DOOMED, Action.NOTHING)
    assert TABLE.step(state, Event.SPAWNED) == (
        State.STOPPING,
        Action.SERVE_AND_TERMINATE,
    )
    assert TABLE.step(state, Event.SPAWN_FAILED) == (State.REAPING, Action.CLEAN_UP)


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
