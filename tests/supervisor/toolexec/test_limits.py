"""Slots: as many as configured, a share for everybody, nobody starves."""

import os
import resource
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import trio

from hostlib import listener
from hostlib.accounts import Account
from supervisor.toolexec import connection, server, slots
from supervisor.toolexec.slots import BusyError, ConnectionPlaces, Descriptors, Slots
from tests.helpers.stage import eventually
from tests.helpers.toolscene import (
    Scene,
    Tenant,
    opened_scene,
    parse,
    receive,
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
        await eventually(lambda: scene.tool.slots.used == 64)
        reply = await scene.run("tool=true")
        assert (reply.status, reply.body, reply.code) == (503, b"busy\n", 86)
        assert reply.headers[b"retry-after"] == b"1"
        for _ in range(3):
            reply = await scene.say(
                scene.request(b"tool=true", token=other.token), tenant=other
            )
            assert (reply.status, reply.code) == (200, 0)
        await stall(scene, stack, other, 8)
        await eventually(lambda: scene.tool.slots.used == 72)
        request = scene.request(b"tool=true", token=other.token)
        assert (await scene.say(request, tenant=other)).status == 503
    await eventually(lambda: not scene.tool.slots.used)
    assert (await scene.run("tool=true")).status == 200


def test_a_slot_is_there_for_a_child_that_has_few() -> None:
    slots = Slots(16, Account())
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
            await eventually(lambda: scene.tool.slots.used == 1)
            assert (await scene.run("tool=true")).status == 503
        await eventually(lambda: not scene.tool.slots.used)


# The last of the checks, each before the next: cwd 400, id 409, slot 503, spawn 500.
# spec E13
async def test_a_full_host_refuses_in_order(tmp_path: Path) -> None:
    async with opened_scene(tmp_path, max_executions=1) as scene:
        with ExitStack() as stack:
            sock = stack.enter_context(await scene.connect())
            form = b"tool=sleep&arg=1000"
            await send(sock, scene.request(form, "X-Aifo-Exec-Id: mine"))
            await eventually(lambda: scene.tool.slots.used == 1)
            for status, asked, exec_id in (
                (400, b"tool=faulty&cwd=/workspace/nowhere", "mine"),
                (409, b"tool=faulty", "mine"),
                (503, b"tool=faulty", "other"),
            ):
                data = scene.request(asked, f"X-Aifo-Exec-Id: {exec_id}")
                assert (await scene.say(data)).status == status
        await eventually(lambda: not scene.tool.slots.used)
        assert (await scene.run("tool=faulty")).status == 500


# spec E32
async def test_connections_of_one_child_leave_others_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_CONNECTIONS", 20)
    other = await scene.tenant()
    with ExitStack() as stack:
        await stall(scene, stack, scene.child, 20)
        await eventually(lambda: scene.tool.slots.used == 20)
        reply = parse(await _ask_until_refused(scene))
        assert reply.status == 503
        request = scene.request(b"tool=true", token=other.token)
        assert (await scene.say(request, tenant=other)).status == 200


# spec E32: who comes while the host is busy waits; curl gives up where it may not.
async def test_many_that_come_at_once_are_all_answered(scene: Scene) -> None:
    with ExitStack() as stack:
        socks = []
        for _ in range(100):  # in this thread: the host has no turn meanwhile
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            sock.connect(scene.child.path)
            sock.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            socks.append(sock)
        for sock in socks:
            assert parse(await receive_all(sock)).status == 200


# A client that only connects, or sends half a request, or one that was refused unread, shuts nobody
# out of a listener that all share: it makes room, the first that came first.
# spec E32
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"POST /exec HTTP/1.1\r\nHost:",
        b"POST /exec HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\ntool",
        b"\x16\x03\x01\n\n",
    ],
)
async def test_who_asks_for_nothing_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(slots, "MAX_CONNECTIONS", 4)
    async with opened_scene(tmp_path, unix=False) as scene:
        (common,) = scene.tool.shared
        with ExitStack() as stack:
            await stall(scene, stack, scene.child, 1)
            await eventually(lambda: scene.tool.slots.used == 1)
            strangers = []
            for count in (2, 3, 4):
                sock = stack.enter_context(await scene.connect())
                await send(sock, said)
                await eventually(partial(_has, common, count))
                strangers.append(sock)
            if said.endswith(b"\n\n"):  # it is drained when that was said
                for sock in strangers:
                    reply = await receive(sock)
                    assert reply.startswith(b"HTTP/1.1 400 ")
            assert (await scene.run("tool=true")).status == 200
            await receive_all(strangers[0])
            assert scene.tool.slots.used == 1


def _has(common: server.Server, count: int) -> bool:
    return len(common.connections) == count


# One child's bodies take no listener of all for themselves: but for a few they give way.
# spec E32, S7
async def test_of_one_childs_bodies_a_few_do_not_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_CONNECTIONS", 5)
    monkeypatch.setattr(connection, "SURE_RECEIVING", 2)
    async with opened_scene(tmp_path, unix=False) as scene:
        other = await scene.tenant()
        (common,) = scene.tool.shared
        whole = scene.request(b"tool=true")
        theirs = scene.request(b"tool=true", token=other.token)
        with ExitStack() as stack:
            bodies = []
            for count in range(1, 6):
                sock = stack.enter_context(await scene.connect())
                await send(sock, whole[:-1])
                await eventually(partial(_receiving, scene, count))
                bodies.append(sock)
            for left, gone in ((4, bodies[2]), (3, bodies[3]), (2, bodies[4])):
                assert _has(common, 5)
                assert (await scene.say(theirs, tenant=other)).status == 200
                assert await receive_all(gone) == b""
                await eventually(partial(_receiving, scene, left))
                # Its place is another's, who asks for nothing yet.
                stack.enter_context(await scene.connect())
                await eventually(partial(_has, common, 5))
            for sock in bodies[:2]:
                await send(sock, whole[-1:])
                assert parse(await receive_all(sock)).status == 200


def _receiving(scene: Scene, count: int) -> bool:
    return sum(one.receiving for one in scene.tool.children.values()) == count


# spec E32
async def test_who_is_served_does_not_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_CONNECTIONS", 2)
    async with opened_scene(tmp_path, unix=False) as scene:
        with ExitStack() as stack:
            await stall(scene, stack, scene.child, 2)
            await eventually(lambda: scene.tool.slots.used == 2)
            for _ in range(3):
                assert parse(await _ask_until_refused(scene)).status == 503
            assert scene.tool.slots.used == 2


async def _ask_until_refused(scene: Scene) -> bytes:
    with trio.fail_after(30):
        with await scene.connect() as sock:
            return await receive_all(sock)
    raise AssertionError


# Using up descriptors: connections without end take a bounded number of descriptors.
# spec E32
async def test_a_flood_waits_outside(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(server, "MAX_REFUSED", 2)
    other = await scene.tenant()
    most = 0

    def count() -> int:
        nonlocal most
        held = [len(one.descriptors()) for one in scene.tool.servers]
        most = max(most, *held)
        return max(held)

    with ExitStack() as stack:
        await stall(scene, stack, scene.child, 4)
        await eventually(lambda: scene.tool.slots.used == 4)
        for _ in range(40):
            stack.enter_context(await scene.connect())
        await eventually(lambda: count() == 1 + 4 + 2)
        request = scene.request(b"tool=true", token=other.token)
        for _ in range(3):
            assert (await scene.say(request, tenant=other)).status == 200
            count()
    # Waiting connections are looked at, and are gone.
    await eventually(lambda: count() == 1)
    assert most == 1 + 4 + 2
    assert (await scene.run("tool=true")).status == 200


async def test_who_waits_is_served_when_one_goes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(server, "MAX_REFUSED", 0)
    with ExitStack() as stack:
        first = stack.enter_context(await scene.connect())
        await eventually(lambda: any(one.connections for one in scene.tool.servers))
        await trio.testing.wait_all_tasks_blocked()
        await send(first, scene.request(b"tool=sleep&arg=1000"))
        await eventually(lambda: scene.tool.slots.used == 1)
        # The one that was awaited when the first could still have made room.
        assert parse(await _ask_until_refused(scene)).status == 503
        second = stack.enter_context(await scene.connect())
        await send(second, scene.request(b"tool=true"))
        with trio.move_on_after(0.1):
            await receive_all(second)
            raise AssertionError
        first.close()
        assert parse(await receive_all(second)).status == 200


# Using up descriptors: of a small limit all listeners have their part.
# spec E32
def test_listeners_share_a_quarter_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (160, 160))
    places = ConnectionPlaces(Descriptors(Account()))
    places.listeners = 5
    places.taken = 39
    assert places.has_one(39)
    places.taken = 40
    assert not places.has_one(8)
    assert places.has_one(7)
    places.listeners = 1000
    assert not places.has_one(4)
    assert places.has_one(3)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_048_576, 1_048_576))
    assert places.has_one(255)
    assert not places.has_one(256)


# Using up descriptors: a host without descriptors says so, in one line, and goes on listening.
async def test_a_shortage_of_descriptors_is_survived(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = []
    accept_waiting = listener.accept_waiting

    def counted(of: socket.socket) -> socket.socket | None:
        try:
            return accept_waiting(of)
        except OSError as why:
            failures.append(why)
            raise

    monkeypatch.setattr(listener, "accept_waiting", counted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        free = os.dup(sock.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            sock.connect(scene.child.path)
            await eventually(lambda: len(failures) == 3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await send(sock, scene.request(b"tool=true"))
        assert parse(await receive_all(sock)).status == 200
    text = "toolexec: cannot accept a connection: Too many open files"
    assert capfd.readouterr().err.count(f"{text}; those that come wait") == 1


# spec S7: one child's connections on a listener of all leave the others alone.
# spec E32
async def test_a_child_has_a_share_of_a_common_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PER_CHILD", 3)
    async with opened_scene(tmp_path, unix=False) as scene:
        other = await scene.tenant()
        replay = scene.head(line="GET /exec/mine?from=5 HTTP/1.1")
        (common,) = scene.tool.shared
        with ExitStack() as stack:
            sock = stack.enter_context(await scene.connect())
            form = b"tool=sleep&arg=1000"
            await send(sock, scene.request(form, "X-Aifo-Exec-Id: mine"))
            await eventually(lambda: scene.tool.slots.used == 1)
            for _ in range(2):
                sock = stack.enter_context(await scene.connect())
                await send(sock, replay)
            await eventually(lambda: sum(common.places_held.values()) == 3)
            for data in (replay, scene.request(b"tool=true")):
                reply = await scene.say(data)
                assert (reply.status, reply.body) == (503, b"busy\n")
                assert reply.headers[b"retry-after"] == b"1"
            request = scene.request(b"tool=true", token=other.token)
            assert (await scene.say(request, tenant=other)).status == 200
            # Short connections are not counted: it can end what it runs.
            signal = scene.request(
                b"exec_id=mine&signal=KILL", line="POST /signal HTTP/1.1"
            )
            assert (await scene.say(signal)).status == 204
        await eventually(lambda: not common.places_held)
        assert (await scene.run("tool=true")).status == 200
