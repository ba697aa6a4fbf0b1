"""Slots: as many as configured, a share for everybody, nobody starves."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from supervisor.toolexec import server
from supervisor.toolexec.slots import BusyError, Slots
from tests.helpers.hosts import eventually
from tests.helpers.toolscene import (
    Scene,
    Tenant,
    opened_scene,
    parse,
    receive_all,
    send,
)

pytestmark = pytest.mark.slow


async def stall(scene: Scene, stack: ExitStack, tenant: Tenant, count: int) -> None:
    """Start tools whose client reads nothing."""
    for _ in range(count):
        sock = stack.enter_context(await scene.connect(tenant))
        await send(sock, scene.request(b"tool=sleep&arg=1000", token=tenant.token))


# spec toolexec 1: at most 64 at once, more: 503 and Retry-After; spec S7: others are not
# affected.
# spec E32
async def test_stalled_executions_of_one_child_leave_others_alone(scene: Scene) -> None:
    other = await scene.tenant()
    with ExitStack() as stack:
        await stall(scene, stack, scene.child, 64)
        await eventually(lambda: scene.tool._slots.used == 64, 15.0)
        reply = await scene.run("tool=true")
        assert (reply.status, reply.body, reply.code) == (503, b"busy\n", 86)
        assert reply.headers[b"retry-after"] == b"1"
        for _ in range(3):
            reply = await scene.say(
                scene.request(b"tool=true", token=other.token), tenant=other
            )
            assert (reply.status, reply.code) == (200, 0)
        await stall(scene, stack, other, 8)
        await eventually(lambda: scene.tool._slots.used == 72, 15.0)
        request = scene.request(b"tool=true", token=other.token)
        assert (await scene.say(request, tenant=other)).status == 503
    await eventually(lambda: not scene.tool._slots.used, 15.0)
    assert (await scene.run("tool=true")).status == 200


def test_a_slot_is_there_for_a_child_that_has_few() -> None:
    slots = Slots(16)
    for count in range(16):
        slots.take(count)
    with pytest.raises(BusyError):
        slots.take(16)
    slots.take(0)
    slots.take(1)
    with pytest.raises(BusyError):
        slots.take(2)
    assert slots.used == 18
    slots.give()
    assert slots.used == 17


async def test_a_host_with_one_slot_runs_one(tmp_path: Path) -> None:
    async with opened_scene(tmp_path, max_executions=1) as scene:
        with ExitStack() as stack:
            await stall(scene, stack, scene.child, 1)
            await eventually(lambda: scene.tool._slots.used == 1)
            assert (await scene.run("tool=true")).status == 503
        await eventually(lambda: not scene.tool._slots.used, 15.0)


# The last of the checks, each before the next: cwd 400, id 409, slot 503, spawn 500.
# spec E13
async def test_a_full_host_refuses_in_order(tmp_path: Path) -> None:
    async with opened_scene(tmp_path, max_executions=1) as scene:
        with ExitStack() as stack:
            sock = stack.enter_context(await scene.connect())
            form = b"tool=sleep&arg=1000"
            await send(sock, scene.request(form, "X-Aifo-Exec-Id: mine"))
            await eventually(lambda: scene.tool._slots.used == 1)
            for status, asked, exec_id in (
                (400, b"tool=faulty&cwd=/workspace/nowhere", "mine"),
                (409, b"tool=faulty", "mine"),
                (503, b"tool=faulty", "other"),
            ):
                data = scene.request(asked, f"X-Aifo-Exec-Id: {exec_id}")
                assert (await scene.say(data)).status == status
        await eventually(lambda: not scene.tool._slots.used, 15.0)
        assert (await scene.run("tool=faulty")).status == 500


# spec E32
async def test_idle_connections_of_one_child_leave_others_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 20)
    other = await scene.tenant()
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(await scene.connect())
        reply = parse(await _ask_until_refused(scene))
        assert reply.status == 503
        request = scene.request(b"tool=true", token=other.token)
        assert (await scene.say(request, tenant=other)).status == 200


async def _ask_until_refused(scene: Scene) -> bytes:
    with trio.fail_after(10):
        with await scene.connect() as sock:
            return await receive_all(sock)
    raise AssertionError
