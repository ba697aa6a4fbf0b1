"""How much begins in one turn of the loop."""

from collections import Counter

import trio

from supervisor.network.pace import MAX_STEPS, Pace


# spec S5: what many children begin at once is spread over turns of the loop.
async def test_a_turn_has_room_for_a_few_steps() -> None:
    pace = Pace()
    turn = 0
    steps: Counter[int] = Counter()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await trio.lowlevel.checkpoint()
            turn += 1

    async def step() -> None:
        for _ in range(3):
            await pace.wait_turn()
            steps[turn] += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_turns)
        nursery.start_soon(pace.run)
        async with trio.open_nursery() as steppers:
            for _ in range(200):
                steppers.start_soon(step)
        nursery.cancel_scope.cancel()
    assert steps.total() == 600
    # The counter of turns may run before or behind the steps of its turn.
    assert max(steps.values()) <= 2 * MAX_STEPS
    assert len(steps) >= 600 // (2 * MAX_STEPS)


# spec S5: a turn that has room is not waited for.
async def test_a_step_is_done_at_once_where_there_is_room() -> None:
    pace = Pace()
    for _ in range(MAX_STEPS):
        with trio.move_on_after(0) as scope:
            await pace.wait_turn()
        assert not scope.cancelled_caught
    with trio.CancelScope() as scope:
        scope.cancel()
        await pace.wait_turn()
    assert scope.cancelled_caught  # there is no more room
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pace.run)
        await pace.wait_turn()
        nursery.cancel_scope.cancel()
