"""Short tools: repeated heads, failing listeners, one wake-up for the client."""

import errno
import os
import socket
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from hostlib.listener import ACCEPT_PAUSE_S, accept_socket
from protocol.toolexec import requests
from supervisor.toolexec import connection
from supervisor.toolexec.output.log import OutputLog
from supervisor.toolexec.wire import Wire
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Scene, parse, receive_all, receive_until, send

# Heads


@pytest.mark.slow
# spec E4: a token of a child that has ended is as unknown as one that never was.
async def test_a_head_that_was_read_before_is_asked_for_its_token_again(
    scene: Scene,
) -> None:
    request = scene.request(b"tool=true")
    assert (await scene.say(request)).status == 200
    executions = scene.tool.children[scene.child.puppet.child.id]
    scene.tool.context.tokens.revoke(executions.token)
    refused = await scene.say(request)
    assert (refused.status, refused.body) == (401, requests.UNAUTHORIZED.body)
    scene.tool.context.tokens.adopt(executions.token, executions)
    assert (await scene.say(request)).status == 200


@pytest.mark.slow
# RFC 9110, 10.1.1
async def test_who_waits_to_go_on_is_told_so_each_time(scene: Scene) -> None:
    head = scene.head(9, "Expect: 100-continue")
    for _ in range(2):
        with await scene.connect() as sock:
            await send(sock, head)
            assert await receive_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 \r\n\r\n"
            await send(sock, b"tool=true")
            assert parse(await receive_all(sock)).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 60, -1])
# spec E9: it may come in pieces, at whatever byte it is cut.
async def test_a_request_that_is_not_whole_at_first(scene: Scene, size: int) -> None:
    request = scene.request(b"tool=true")
    with await scene.connect() as sock:
        await send(sock, request[:size])
        await trio.testing.wait_all_tasks_blocked()
        await send(sock, request[size:])
        assert parse(await receive_all(sock)).status == 200


# Accepting


class Failing(socket.socket):
    """A listener whose next calls fail."""

    def __init__(self, *faults: int) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.setblocking(False)
        self.bind(b"")  # a name of the kernel's choice
        self.listen(8)
        self.faults = list(faults)

    def _accept(self) -> tuple[int, object]:
        """Fail as long as there are faults."""
        if self.faults:
            number = self.faults.pop(0)
            raise OSError(number, os.strerror(number))
        fd, where = super()._accept()  # type: ignore[misc]
        return fd, where


@pytest.mark.parametrize("fault", [errno.ECONNABORTED, errno.EPERM, errno.EPROTO])
# Source: accept(2), "Error handling".
async def test_who_vanished_in_the_queue_is_passed_over(fault: int) -> None:
    told: list[OSError] = []
    with Failing(fault, fault) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        with await accept_socket(listener, told.append) as sock:
            assert not sock.getblocking()
            assert not sock.get_inheritable()
    assert told == []


async def test_others_have_their_turn_while_all_in_the_queue_are_refused() -> None:
    left: list[int] = []

    async def other() -> None:
        left.append(len(listener.faults))

    with Failing(*[errno.EPERM] * 9) as listener:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(listener.getsockname())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                (await accept_socket(listener, lambda _: None)).close()
    assert left[0] > 0


# attack 18
async def test_a_lack_is_told_and_who_came_waits_in_the_queue(
    autojump_clock: trio.testing.MockClock,
) -> None:
    told: list[OSError] = []
    begun = trio.current_time()
    with Failing(errno.EMFILE, errno.ENFILE) as listener:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(listener.getsockname())
            (await accept_socket(listener, told.append)).close()
    assert [why.errno for why in told] == [errno.EMFILE, errno.ENFILE]
    assert trio.current_time() - begun == pytest.approx(2 * ACCEPT_PAUSE_S)


async def test_who_is_about_to_end_takes_nobody() -> None:
    with Failing() as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        with trio.CancelScope() as scope:
            scope.cancel()
            (await accept_socket(listener, lambda _: None)).close()
        assert scope.cancelled_caught
        listener.accept()[0].close()  # it is there for the next program


async def test_a_listener_that_is_of_no_use_any_more_is_a_fault() -> None:
    with Failing(errno.EINVAL) as listener, pytest.raises(OSError, match="Invalid"):
        await accept_socket(listener, lambda _: None)


@pytest.mark.slow
# spec S5: while one is served the next is accepted, and each of many.
async def test_others_are_accepted_while_one_is_served(scene: Scene) -> None:
    with await scene.connect() as first, await scene.connect() as second:
        await send(first, scene.request(b"tool=sleep&arg=1000"))
        await eventually(lambda: scene.tool.slots.used == 1)
        assert (await scene.run("tool=true")).status == 200
        await send(second, scene.request(b"tool=true"))
        assert parse(await receive_all(second)).status == 200


@pytest.mark.slow
# No task is made for a connection where one has served another before.
async def test_who_has_served_is_the_next_to_accept(scene: Scene) -> None:
    (server,) = (one for one in scene.tool.servers if not one.is_shared)
    nursery = server.nursery
    assert nursery is not None
    for _ in range(4):
        assert (await scene.run("tool=true")).status == 200
    await trio.testing.wait_all_tasks_blocked()
    tasks = set(nursery.child_tasks)
    for _ in range(4):
        assert (await scene.run("tool=true")).status == 200
    await eventually(lambda: len(server.rested) == 1)
    assert set(nursery.child_tasks) == tasks
    socks = [await scene.connect() for _ in range(9)]
    for sock in socks:
        await send(sock, scene.request(b"tool=sleep&arg=1000"))
    await eventually(lambda: scene.tool.slots.used == len(socks))
    assert len(nursery.child_tasks) > len(tasks)
    for sock in socks:
        sock.close()
    await eventually(lambda: not server.connections)
    await eventually(lambda: len(nursery.child_tasks) <= 2)
    assert (await scene.run("tool=true")).status == 200


# The end of a short tool


@pytest.mark.slow
async def test_a_tool_that_ends_at_once_is_answered_in_one_piece(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    send_parts = Wire.send

    async def noted(self: Wire, *parts: bytes) -> None:
        (executions,) = scene.tool.children.values()
        assert not executions.live  # rule 1 of `execution`
        assert not scene.tool.slots.used
        sent.append(b"".join(parts))
        await send_parts(self, *parts)

    monkeypatch.setattr(connection, "HEAD_WAITS_S", 10.0)
    monkeypatch.setattr(Wire, "send", noted)
    reply = await scene.run("tool=true")
    assert (reply.status, reply.code, reply.body) == (200, 0, b"")
    (whole,) = sent
    assert whole.startswith(b"HTTP/1.1 200 ")
    assert whole.endswith(b"X-Exit-Code: 0\r\n\r\n")


@pytest.mark.slow
async def test_a_fault_in_an_answer_ends_its_connection_and_no_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(
        scene.tool.context,
        "log",
        SimpleNamespace(write=lambda *line, **_: said.append(line)),
    )
    request = scene.request(b"tool=true")
    monkeypatch.setattr(connection, "HEAD_WAITS_S", 10.0)
    with monkeypatch.context() as patch:
        patch.setattr(OutputLog, "in_memory", lambda _: 1 // 0)
        with await scene.connect() as sock:
            await send(sock, request)
            assert await receive_all(sock) == b""
    assert (await scene.say(request)).status == 200
    ((level, text),) = said
    assert (level, "ZeroDivisionError" in text) == ("ERROR", True)
