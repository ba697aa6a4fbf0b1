"""The launchpad's table of a child's life: total, and every road ends."""

import pytest

from supervisor.spawn.launchpad import life


# I3
def test_every_state_has_an_entry_for_every_event() -> None:
    assert len(life.TABLE) == len(life.STATES)
    assert all(len(row) == len(life.EVENTS) for row in life.TABLE)
    for row in life.TABLE:
        for found in filter(None, row):
            assert 0 <= found[0] < len(life.STATES)
            assert 0 <= found[1] < len(life.ACTIONS)


def test_what_cannot_happen_is_said_in_words() -> None:
    with pytest.raises(RuntimeError, match="is running cannot have ordered"):
        life.step(life.RUNNING, life.ORDERED)


def test_from_every_state_a_child_can_be_buried() -> None:
    closed = {life.IN_STOCK, life.STOCK_FORKING, life.STARTING, life.START_FORKING}
    for state in closed:
        for event in (life.CLOSED, life.FAILED):
            after, action = life.step(state, event)
            # Told exactly once, or nobody's.
            assert action in {life.DISCARD, life.TELL_SPAWNED, life.TELL_FAILED}
            assert life.step(after, life.DIED)[0] == life.GONE
    assert not any(life.TABLE[life.GONE])


def test_only_who_was_told_of_as_born_is_told_of_as_ended() -> None:
    told = [
        (state, event)
        for state, row in enumerate(life.TABLE)
        for event, found in enumerate(row)
        if found is not None and found[1] == life.TELL_EXITED
    ]
    assert told == [(life.RUNNING, life.DIED)]
    entered = {
        found[1]
        for row in life.TABLE
        for found in row
        if found is not None and found[0] == life.RUNNING
    }
    assert entered == {life.TELL_SPAWNED}
