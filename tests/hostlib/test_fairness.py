"""Turns: one piece of work at a time, and a rest after a long one."""

import time

import pytest
import trio
from trio.testing import MockClock

from hostlib.fairness import RESTS, SHORT_S, Share


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The processor time that the thread reports; one item, seconds."""
    found = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: found[0])
    return found


# Others have the thread between two pieces, however many wait with one.
# (Trio shuffles those that may run, so there may be two without another.)
async def test_others_go_on_between_two_pieces(worked: list[float]) -> None:
    turn, order = Share(), []

    async def work() -> None:
        async with turn.hold():
            order.append("work")

    async def other() -> None:
        while order.count("work") < 20:
            order.append("other")
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(20):
            nursery.start_soon(work)
    assert "work work work" not in " ".join(order)
    assert worked == [0.0]


async def test_a_long_piece_is_followed_by_a_rest(
    worked: list[float], autojump_clock: MockClock
) -> None:
    turn = Share()
    for took_s, rest_s in ((SHORT_S / 2, 0.0), (0.5, 0.5 * RESTS)):
        begun_s = trio.current_time()
        async with turn.hold():
            worked[0] += took_s
        assert trio.current_time() - begun_s == pytest.approx(rest_s)


async def test_a_long_piece_that_fails_is_followed_by_a_rest(
    worked: list[float], autojump_clock: MockClock
) -> None:
    del autojump_clock
    turn = Share()
    begun_s = trio.current_time()

    async def fail() -> None:
        async with turn.hold():
            worked[0] += 0.5
            raise ValueError("not parsed")

    with pytest.raises(ValueError, match="not parsed"):
        await fail()
    assert trio.current_time() - begun_s == pytest.approx(0.5 * RESTS)
