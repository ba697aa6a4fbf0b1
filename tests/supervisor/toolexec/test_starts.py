"""Starts that take long.

The child in stock is stopped, so that its exec does not come.
"""

import math
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from hostlib.fairness import Share
from protocol.toolexec import requests
from supervisor.toolexec.execution import Execution
from supervisor.toolexec.executions import ChildExecutions
from supervisor.toolexec.settings import NotifyCommand
from supervisor.toolexec.starts import LEAST_S, LOOK_S, Start, StartWatch
from supervisor.toolexec.wire import LOOK_PIECES, Wire
from tests.helpers.spawning import stocked
from tests.helpers.stage import eventually
from tests.helpers.toolscene import (
    Scene,
    Tenant,
    opened_scene,
    parse,
    receive_all,
    send,
)

pytestmark = pytest.mark.slow

EXEC_ID = "hangs"


@pytest.fixture
async def timed(tmp_path: Path) -> AsyncIterator[Scene]:
    """A scene whose tools may take a moment only."""
    async with opened_scene(tmp_path, timeout_s=3 * LOOK_S) as scene:
        yield scene


@asynccontextmanager
async def stopped(scene: Scene) -> AsyncIterator[int]:
    """Stop the child in stock, and yield a pidfd of it; it must have ended in the end."""
    launcher = scene.stage.host.launcher
    for _ in range(4):
        assert (await scene.run("tool=true")).status == 200
    (pid,) = await stocked(launcher)
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        yield pidfd
        with trio.fail_after(10):
            await trio.lowlevel.wait_readable(pidfd)
        trio.lowlevel.notify_closing(pidfd)
    finally:
        os.close(pidfd)


def executions(scene: Scene) -> ChildExecutions:
    """Return those of the first child."""
    return scene.tool.children[scene.child.puppet.child.id]


# spec E25: within 3 s nothing of it lives; it was not looked for while an exec took long.
# spec toolexec 4: half a close is one, and so is one behind what nobody has asked for.
@pytest.mark.parametrize("late", [b"", b"x", b"x" * 100_000], ids=["", "byte", "many"])
@pytest.mark.parametrize("half_close", [True, False])
@pytest.mark.parametrize("shared", [True, False], ids=["tcp", "unix"])
async def test_a_start_whose_client_has_gone_is_given_up(
    scene: Scene, late: bytes, *, half_close: bool, shared: bool
) -> None:
    tenant = scene.child
    if shared:
        assert scene.tool.shared_url is not None
        tenant = Tenant(tenant.puppet, scene.tool.shared_url, tenant.token)
    async with stopped(scene):
        with await scene.connect(tenant) as sock:
            request = scene.request(b"tool=true", f"X-Aifo-Exec-Id: {EXEC_ID}")
            await send(sock, request)
            await eventually(lambda: EXEC_ID in executions(scene).live)
            assert (await scene.run("tool=true")).status == 200  # others are not kept
            await send(sock, late)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
                await eventually(lambda: not executions(scene).live, 3.0)
        await eventually(lambda: not executions(scene).live, 3.0)
    assert not scene.tool.slots.used
    assert not scene.tool.context.start_watch.under_way


# Bytes sent by it and to it are forgotten by TCP in both directions.
async def test_a_start_whose_client_has_reset_its_connection_is_given_up(
    scene: Scene,
) -> None:
    assert scene.tool.shared_url is not None
    tenant = Tenant(scene.child.puppet, scene.tool.shared_url, scene.child.token)
    async with stopped(scene):
        with await scene.connect(tenant) as sock:
            extra = f"X-Aifo-Exec-Id: {EXEC_ID}"
            await send(sock, scene.request(b"tool=true", extra))
            await eventually(lambda: EXEC_ID in executions(scene).live)
            at_once = struct.pack("ii", 1, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        await eventually(lambda: not executions(scene).live, 3.0)
    assert not scene.tool.slots.used
    assert (await scene.run("tool=true")).status == 200


# It is there for as long as it does not close, whatever it sends.
async def test_a_start_whose_client_sends_more_goes_on(scene: Scene) -> None:
    async with stopped(scene) as pidfd:
        with await scene.connect() as sock:
            extra = f"X-Aifo-Exec-Id: {EXEC_ID}"
            await send(sock, scene.request(b"tool=true", extra))
            await eventually(lambda: EXEC_ID in executions(scene).live)
            (start,) = scene.tool.context.start_watch.under_way
            assert isinstance(start, Start)
            with trio.fail_after(10):  # more than a socket holds: somebody reads it
                await send(sock, b"x" * 4_000_000)
            start.look()
            assert not start.is_given_up
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            assert parse(await receive_all(sock)).code == 0


# A look has an end where what is sent has none: others wait for it.
def test_who_sends_without_end_is_there() -> None:
    class Endless(socket.socket):
        pieces = 0

        def recv(self, *_: object) -> bytes:
            self.pieces += 1
            assert self.pieces <= LOOK_PIECES
            return b"x"

    with Endless(socket.AF_UNIX) as sock:
        Wire(sock, Share()).check_there()
        assert sock.pieces == LOOK_PIECES


# spec E25: unless it said that it would.
async def test_a_start_that_is_detached_goes_on(scene: Scene) -> None:
    async with stopped(scene) as pidfd:
        with await scene.connect() as sock:
            extra = f"X-Aifo-Exec-Id: {EXEC_ID}", "X-Aifo-Detach: 1"
            await send(sock, scene.request(b"tool=true", *extra))
            await eventually(lambda: EXEC_ID in executions(scene).live)
        await trio.sleep(3 * LOOK_S)
        assert EXEC_ID in executions(scene).live
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    await eventually(lambda: EXEC_ID in executions(scene).kept)
    assert executions(scene).kept[EXEC_ID].code == 0


@pytest.mark.parametrize("proto", ["1", "2"])
# spec E25: its time runs from when it was asked for.
async def test_a_start_that_takes_longer_than_its_tool_may(
    timed: Scene, proto: str
) -> None:
    async with stopped(timed):
        with trio.fail_after(10):
            reply = await timed.run("tool=true", proto=proto)
    assert (reply.status, reply.code) == ((504, 124) if proto == "1" else (200, 124))
    assert [fields["code"] for fields in timed.stage.events("exec.failed")] == [124]
    assert reply.body == (b"" if proto == "1" else b"aifo-coder proxy ") + b"timeout\n"
    assert not timed.tool.slots.used


@pytest.mark.parametrize("name", ["KILL", "INT"])
# ToolExec 2: who is not its program yet handles no signal.
async def test_a_signal_ends_who_is_being_started(scene: Scene, name: str) -> None:
    async with stopped(scene):
        with await scene.connect() as sock:
            request = scene.request(b"tool=true", f"X-Aifo-Exec-Id: {EXEC_ID}")
            await send(sock, request)
            await eventually(lambda: EXEC_ID in executions(scene).live)
            form = f"exec_id={EXEC_ID}&signal={name}".encode()
            line = "POST /signal HTTP/1.1"
            assert (await scene.say(scene.request(form, line=line))).status == 204
            with trio.fail_after(10):
                reply = parse(await receive_all(sock))
    number = signal.Signals[f"SIG{name}"]
    assert [fields["code"] for fields in scene.stage.events("exec.failed")] == [
        128 + number
    ]
    assert (reply.status, reply.code, reply.body) == (200, 128 + number, b"")


# The command of [toolexec.notify]


NOTIFY = "POST /notify HTTP/1.1"


@asynccontextmanager
async def notifying(
    where: Path, *command: str, timeout_s: float = 0.0
) -> AsyncIterator[Scene]:
    """Open a scene with a command that can be asked for."""
    async with opened_scene(
        where, notify=NotifyCommand(command, timeout_s, 8)
    ) as scene:
        yield scene


# spec E33: its time runs from when it was asked for, too.
async def test_a_notification_that_takes_too_long_to_start_is_408(
    tmp_path: Path,
) -> None:
    async with notifying(tmp_path, "/bin/true", timeout_s=3 * LOOK_S) as scene:
        async with stopped(scene):
            with trio.fail_after(10):
                reply = await scene.run("cmd=true", line=NOTIFY)
        refusal = requests.NOTIFY_TIMEOUT
        assert (reply.status, reply.code, reply.body) == (408, 124, refusal.body)
        (failed,) = scene.stage.events("exec.failed")
        assert (failed["sidecar"], failed["code"]) == ("notify", 124)
        assert not scene.tool.slots.used
        assert not executions(scene).live
        # The next one is a start like any other.
        assert (await scene.run("cmd=true", line=NOTIFY)).status == 200


async def test_a_notification_is_signalled_while_it_is_started(tmp_path: Path) -> None:
    async with notifying(tmp_path, "/bin/true") as scene:
        async with stopped(scene):
            with await scene.connect() as sock:
                await send(sock, scene.request(b"cmd=true", line=NOTIFY))
                await eventually(lambda: executions(scene).live)
                (exec_id,) = executions(scene).live
                form = f"exec_id={exec_id}&signal=TERM".encode()
                line = "POST /signal HTTP/1.1"
                assert (await scene.say(scene.request(form, line=line))).status == 204
                with trio.fail_after(10):
                    reply = parse(await receive_all(sock))
        assert (reply.status, reply.code, reply.body) == (200, 143, b"")
        (failed,) = scene.stage.events("exec.failed")
        assert (failed["sidecar"], failed["code"]) == ("notify", 143)
        assert not scene.tool.slots.used
        assert not scene.tool.context.start_watch.under_way


# spec E25: nobody can ask for it again, so nothing of it is kept.
async def test_a_notification_whose_client_has_gone_is_not_started(
    tmp_path: Path,
) -> None:
    async with notifying(tmp_path, "/bin/true") as scene:
        async with stopped(scene):
            with await scene.connect() as sock:
                await send(sock, scene.request(b"cmd=true", line=NOTIFY))
                await eventually(lambda: executions(scene).live)
            await eventually(lambda: not executions(scene).live, 3.0)
        assert not scene.tool.slots.used
        assert not scene.tool.context.start_watch.under_way
        assert not scene.stage.events("exec.failed")


# spec E25, E33: what its start has taken is taken from its time.
@pytest.mark.parametrize("form", ["cmd=sleep&arg=1000", "tool=sleep&arg=1000"])
async def test_the_time_of_a_tool_ends_when_it_would_have_without_a_wait(
    tmp_path: Path, form: str
) -> None:
    notify = NotifyCommand(("/bin/sleep", "1000"), 1000.0, 8)
    line = NOTIFY if form.startswith("cmd") else "POST /exec HTTP/1.1"
    async with opened_scene(tmp_path, notify=notify, timeout_s=1000.0) as scene:
        async with stopped(scene) as pidfd:
            with await scene.connect() as sock:
                await send(sock, scene.request(form.encode(), line=line))
                await eventually(lambda: executions(scene).live)
                (execution,) = executions(scene).live.values()
                asked_s = trio.current_time()
                await trio.sleep(2 * LOOK_S)
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                await eventually(lambda: execution.timeout_at < math.inf)
                assert execution.timeout_at < asked_s + 1000.0 + LOOK_S


# A cancellation that comes when the start is over already ends what was started.
@pytest.mark.parametrize(("code", "status"), [(None, 137), (130, 130), (124, 124)])
async def test_who_is_given_up_a_moment_too_late_is_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, code: int | None, status: int
) -> None:
    request = scene.request(b"tool=sleep&arg=1000", f"X-Aifo-Exec-Id: {EXEC_ID}")
    begin = Execution.begin

    async def begin_late(self: Execution, limit_s: float, name: str) -> None:
        assert self.start is not None
        self.start.give_up(code)
        await begin(self, limit_s, name)

    monkeypatch.setattr(Execution, "begin", begin_late)
    reply = await scene.say(request)
    assert (reply.status, reply.code) == (200, status)
    assert (b"timeout" in reply.body) is (code == 124)


# ToolExec 5: how it has ended can be asked for again.
async def test_what_is_kept_of_a_tool_whose_start_was_given_up(
    timed: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Execution, "spawn", never)
    request = timed.request(b"tool=true", f"X-Aifo-Exec-Id: {EXEC_ID}")
    with trio.fail_after(10):
        first = await timed.say(request)
    again = await timed.say(timed.head(line=f"GET /exec/{EXEC_ID}?from=0 HTTP/1.1"))
    assert (again.status, again.code, again.body) == (200, 124, first.body)


# spec E25: what its start has taken is taken from its time.
async def test_what_is_left_of_a_time_limit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    wire = Wire.__new__(Wire)
    start, none = Start(StartWatch(), wire, 10.0), Start(StartWatch(), wire)
    await trio.sleep(4)
    assert (start.left_s, none.left_s) == (6.0, 0.0)
    await trio.sleep(7)
    assert start.left_s == LEAST_S


async def test_who_looks_at_starts_sleeps_while_there_are_none(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch = StartWatch()
    looks: list[float] = []

    class Looking(Start):
        def look(self) -> None:
            looks.append(trio.current_time())

    def make() -> Start:
        return Looking(watch, Wire.__new__(Wire))

    begun_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(100)
        assert looks == []
        with make():
            await trio.sleep(2.5 * LOOK_S)
        assert len(looks) == 2
        await trio.sleep(100)
        assert looks[-1] - begun_s < 101
        for _ in range(4):  # none of them is there for two looks
            with make():
                await trio.sleep(0.9 * LOOK_S)
        assert len(looks) == 2
        nursery.cancel_scope.cancel()
