"""Turns: one piece of work at a time, and a rest after a long one."""

import time

import pytest
import trio
from trio.testing import MockClock

from supervisor.toolexec.throttle import RESTS, SHORT_S, Throttle
from tests.helpers.hosts import eventually
from tests.helpers.toolscene import Scene, Tenant


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the thread has worked so far, as it is told; one item, seconds."""
    found = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: found[0])
    return found


# Others have the thread between two pieces, however many wait with one.
# (Trio shuffles those that may run, so there may be two without another.)
async def test_others_go_on_between_two_pieces(worked: list[float]) -> None:
    turn, order = Throttle(), []

    async def work() -> None:
        async with turn.taken():
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
    turn = Throttle()
    for took_s, rest_s in ((SHORT_S / 2, 0.0), (0.5, 0.5 * RESTS)):
        begun_s = trio.current_time()
        async with turn.taken():
            worked[0] += took_s
        assert trio.current_time() - begun_s == pytest.approx(rest_s)


# However many large heads come to one child's socket, another's waits for one of them.
# spec toolexec 1: others are not affected.
@pytest.mark.slow
async def test_large_heads_of_one_child_delay_no_other(scene: Scene) -> None:
    other = await scene.tenant()
    answered: list[Tenant] = []

    async def ask(tenant: Tenant) -> None:
        pad = f"X-Pad: {'p' * 3000}"
        line = "GET /healthz HTTP/1.1"
        data = scene.head(None, pad, line=line, token=None)
        assert (await scene.say(data, tenant=tenant)).status == 200
        answered.append(tenant)

    def waiting(tenant: Tenant) -> int:
        listener = scene.tool.children[tenant.puppet.child.id].listener
        assert listener is not None
        (server,) = (s for s in scene.tool.servers if s.listener_fd == listener[0])
        heads = server.heads._lock.statistics()
        return heads.tasks_waiting + heads.locked

    async with trio.open_nursery() as nursery:
        async with scene.tool.context.heads._lock:
            for _ in range(20):
                nursery.start_soon(ask, scene.child)
            await eventually(lambda: waiting(scene.child) == 20)
            nursery.start_soon(ask, other)
            await eventually(lambda: waiting(other) == 1)
    # One of the others was ahead; Trio shuffles those that run at once.
    assert answered.index(other) <= 3
