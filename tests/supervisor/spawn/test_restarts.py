"""When a child comes back: the table, the waits, how often is too often."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.config.child import ChildSection, odd_restarts, restart_policy
from supervisor.spawn.restarts import (
    MAX_BACKOFF_S,
    SPREAD,
    TABLE,
    Phase,
    RestartAction,
    RestartEvent,
    RestartPolicy,
    Restarts,
)


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Tell what it shows."""
        return self.now


def restarts(clock: Clock, dice: float = 0.5, **policy: object) -> Restarts:
    return Restarts(RestartPolicy(**policy), clock, lambda: dice)  # type: ignore[arg-type]


def test_what_was_stopped_on_request_does_not_come_back() -> None:
    assert TABLE.step(Phase.RUNNING, RestartEvent.STOP) == (
        Phase.ENDING,
        RestartAction.STOP,
    )
    for end in (
        RestartEvent.ENDED,
        RestartEvent.ENDED_AGAIN,
        RestartEvent.ENDED_TOO_OFTEN,
    ):
        assert TABLE.step(Phase.ENDING, end) == (Phase.STOPPED, RestartAction.LEAVE)
    assert TABLE.step(Phase.BACKING_OFF, RestartEvent.STOP) == (
        Phase.STOPPED,
        RestartAction.LEAVE,
    )
    assert TABLE.step(Phase.STOPPED, RestartEvent.WAITED) == (
        Phase.STOPPED,
        RestartAction.NOTHING,
    )


def test_the_policy_decides_on_the_status() -> None:
    ends = [
        (policy, status, restarts(Clock(), restart=policy).ended(status))
        for policy in ("no", "on-failure", "always")
        for status in (0, 1, 137)
    ]
    back = {
        (policy, status)
        for policy, status, end in ends
        if end is not RestartEvent.ENDED
    }
    assert back == {
        ("on-failure", 1),
        ("on-failure", 137),
        ("always", 0),
        ("always", 1),
        ("always", 137),
    }


def test_the_wait_doubles_up_to_a_minute() -> None:
    clock = Clock()
    child = restarts(clock, restart="always", backoff_s=1.0, max_restarts=100)
    waits = []
    for _ in range(9):
        assert child.ended(1) is RestartEvent.ENDED_AGAIN
        waits.append(child.wait_s())
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_child_that_ran_for_the_period_begins_with_the_shortest_wait() -> None:
    clock = Clock()
    child = restarts(clock, restart="always", backoff_s=1.0, within_s=10.0)
    for _ in range(3):
        child.ended(1)
        child.wait_s()
    child.started()
    clock.now += 10.0
    assert child.ended(1) is RestartEvent.ENDED_AGAIN
    assert child.wait_s() == 1.0


def test_more_than_so_many_restarts_within_the_period_is_too_often() -> None:
    clock = Clock()
    child = restarts(clock, restart="always", max_restarts=3, within_s=10.0)
    for _ in range(3):
        clock.now += 1.0
        assert child.ended(0) is RestartEvent.ENDED_AGAIN
    clock.now += 1.0
    assert child.ended(0) is RestartEvent.ENDED_TOO_OFTEN
    assert child.total == 3
    # Once the first of them is older than the period there is room for one.
    clock.now += 7.0
    assert child.ended(0) is RestartEvent.ENDED_AGAIN


# A crash loop ends: its own waits do not carry it out of the period.
@pytest.mark.parametrize("dice", [0.0, 0.5, 0.999])
def test_with_the_defaults_a_child_that_always_fails_is_given_up(dice: float) -> None:
    clock = Clock()
    section = ChildSection(command=["false"], restart="always")
    for policy in (restart_policy(section), RestartPolicy(restart="always")):
        child = Restarts(policy, clock, lambda: dice)
        for _ in range(policy.max_restarts):
            child.started()
            clock.now += 1.0
            assert child.ended(1) is RestartEvent.ENDED_AGAIN
            clock.now += child.wait_s()
        child.started()
        assert child.ended(1) is RestartEvent.ENDED_TOO_OFTEN


# Where the keys that are written make it endless, that is said.
@given(
    backoff_s=st.integers(0, 100),  # whole ones: no rounding
    within_s=st.integers(1, 1000),
    most=st.integers(0, 12),
)
def test_a_loop_without_an_end_is_warned_of(
    backoff_s: int, within_s: int, most: int
) -> None:
    section = ChildSection(
        command=["false"],
        restart="always",
        backoff=f"{backoff_s}s",
        max_restarts=most,
        within=f"{within_s}s",
    )
    clock = Clock()
    child = Restarts(restart_policy(section), clock, lambda: 0.5)  # no spread
    ends = []
    for _ in range(most + 1):
        child.started()
        ends.append(child.ended(1))
        clock.now += child.wait_s()
    is_endless = RestartEvent.ENDED_TOO_OFTEN not in ends
    assert [key for key, _ in odd_restarts({"a": section})] == [
        *["child.a.within"] * is_endless
    ]


def test_no_restart_may_be_too_many() -> None:
    child = restarts(Clock(), restart="always", max_restarts=0)
    assert child.ended(0) is RestartEvent.ENDED_TOO_OFTEN


@given(
    dice=st.floats(0, 1, exclude_max=True),
    backoff_s=st.floats(0, 1e6),
    times=st.integers(1, 2000),
)
def test_no_wait_is_longer_than_the_cap_and_its_spread(
    dice: float, backoff_s: float, times: int
) -> None:
    child = restarts(Clock(), dice, restart="always", backoff_s=backoff_s)
    waits = [child.wait_s() for _ in range(times)]
    assert all(0 <= wait <= MAX_BACKOFF_S * (1 + SPREAD) for wait in waits)
    assert all(a <= b for a, b in pairwise(waits))


@given(
    gaps=st.lists(st.floats(0, 30), max_size=60),
    most=st.integers(0, 6),
    within_s=st.floats(0.1, 20),
)
def test_never_more_restarts_within_any_period_than_allowed(
    gaps: list[float], most: int, within_s: float
) -> None:
    clock = Clock()
    child = restarts(clock, restart="always", max_restarts=most, within_s=within_s)
    at: list[float] = []
    for gap in gaps:
        clock.now += gap
        if child.ended(1) is RestartEvent.ENDED_AGAIN:
            at.append(clock.now)
    for first in at:
        assert sum(first <= other < first + within_s for other in at) <= most
