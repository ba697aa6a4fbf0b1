"""The ends of nested clients, of the relay and of the host, and their clean-up."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from tests.vfs.fakeline import Gate
from tests.vfs.relay.relayscene import (
    MIB,
    SERIAL,
    both,
    log_lines,
    scene,
    seen,
    send,
    wait,
)
from vfs import client as door
from vfs import relay
from vfs.client.aio import AsyncClient
from vfs.relay import lane as relay_lane
from vfs.relay import open_relay
from vfs.relay.attached import QUEUE_REQUESTS, AttachedLane
from vfs.relay.lane import SETTLE_S


@pytest.fixture
def logged() -> Iterator[list[str]]:
    with log_lines() as lines:
        yield lines


@both
@pytest.mark.parametrize("begun", [b"PIN", b"PING\nREAD ", b"x" * 70_000])
async def test_a_line_that_does_not_end_ends_its_lane_alone(
    unknown: frozenset[bytes],
    logged: list[str],
    begun: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # spec F8, attack 16: the host never sees that it has begun
    monkeypatch.setattr(relay_lane, "DEADLINE_S", 0.05)
    async with scene(unknown) as s:
        silent, client = await s.nested()
        await client.open("a", "w")
        slow, slow_client = await s.nested()
        await slow_client.open("b", "w")
        slow.child_end.sendall(begun)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say_more_and_more, slow)
            await slow.wait_finished()
            nursery.cancel_scope.cancel()
        slow.child_end.close()
        assert [line for line in logged if "did not end in time" in line]
        # A client without a begun line may wait.
        assert len(s.host.open_files()) == 1
        await client.open("c", "w")
        silent.child_end.close()


async def say_more_and_more(nested: relay.NestedClient) -> None:
    """Send a byte now and then for as long as anybody listens."""
    with contextlib.suppress(OSError):
        while True:
            nested.child_end.sendall(b"1")
            await trio.sleep(0.01)


@both
async def test_what_it_left_open_is_closed_upstream(
    unknown: frozenset[bytes], logged: list[str]
) -> None:
    # spec N2
    async with scene(unknown) as s:
        own = await s.own.open("own", "w")
        nested, client = await s.nested()
        left = [await client.open(name, "w") for name in ("a", "b", "c")]
        await client.close(left.pop(1))
        assert nested.filenos == tuple(left)
        nested.child_end.close()
        await s.relay.client_done(nested)
        assert [r.fileno for r in seen(s.upstream_of(1), m.Close)[1:]] == left
        assert [line for line in logged if line.startswith("Sent")] == [
            f"Sent close request for fileno {n} (downstream EOF)" for n in left
        ]
        assert s.host.open_files() == [own]


@both
async def test_eof_alone_closes_it_too(unknown: frozenset[bytes]) -> None:
    # spec N2, S2
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        gate = s.host.gates[m.Close] = Gate()
        nested.child_end.close()
        await wait(gate)
        gate.opened.set()
        await nested.wait_finished()
        assert s.host.open_files() == []


@both
async def test_the_end_of_its_process_ends_it_though_a_grandchild_holds_the_line(
    unknown: frozenset[bytes],
) -> None:
    # spec S2, S3
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        with nested.child_end.dup() as grandchild:
            nested.child_end.close()
            await s.relay.client_done(nested)
            assert s.host.open_files() == []
            assert grandchild.recv(1) == b""
            with pytest.raises(BrokenPipeError):
                grandchild.send(b"PING\n")


@both
async def test_what_it_had_sent_before_it_died_is_done_first(
    unknown: frozenset[bytes],
) -> None:
    # spec S2: it read none of the replies, which makes a reset of the EOF
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        nested.child_end.sendall(
            b"WRITE 1000 3\nabcWRITE 1000 3\ndefOPEN b w true\nPING\nhalf a li"
        )
        gate = s.host.gates[m.Ping] = Gate()
        await wait(gate)
        gate.opened.set()
        nested.child_end.close()
        await s.relay.client_done(nested)
        assert s.host.files == {b"a": b"abcdef", b"b": b""}
        assert s.host.open_files() == []


async def test_death_inside_a_payload_tears_nothing_with_attach(
    logged: list[str],
) -> None:
    # spec W2: no CLOSE can travel on that connection any more; its end does it
    async with scene() as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        await send(nested, b"WRITE 1000 1000000\n" + bytes(400_000))
        nested.child_end.close()
        await s.relay.client_done(nested)
        await wait(s.host.peers[1])
        assert s.host.peers[1].torn
        assert s.host.files == {b"a": b""}
        assert s.host.open_files() == []
        released = (
            "Released filenos 1000 by closing their connection"
            " (downstream EOF inside a request)"
        )
        assert released in logged


@both
async def test_who_stops_inside_a_payload_gets_what_it_is_owed(
    unknown: frozenset[bytes],
) -> None:
    # spec T3, W2: as without a relay
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w+")
        pings = 2 * QUEUE_REQUESTS
        await send(
            nested,
            b"WRITE 1000 3\nabcSEEK 1000 0\nREAD 1000 10\n"
            + b"PING\n" * pings
            + b"WRITE 1000 100000\n"
            + bytes(70_000),
        )
        nested.child_end.shutdown(socket.SHUT_WR)
        with trio.fail_after(30):
            said = await trio.to_thread.run_sync(everything, nested.child_end)
        torn = b"ERROR failed to read data: unexpected EOF\n"
        assert said == b"OK 3\nOK 0\nOK 3\nabc" + b"OK\n" * pings + torn
        await s.relay.client_done(nested)
        assert s.host.files == {b"a": b"abc"}
        with trio.fail_after(30):
            while s.host.open_files():  # noqa: ASYNC110 - the host has threads
                await trio.sleep(0.01)
        await s.own.ping()


def everything(line: socket.socket) -> bytes:
    """Receive until the end."""
    pieces = []
    while piece := line.recv(65_536):
        pieces.append(piece)
    return b"".join(pieces)


async def test_death_inside_a_payload_tears_nothing_in_turns() -> None:
    # spec W2: the connection of all must not be left inside a request
    async with scene(SERIAL) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        await send(nested, b"WRITE 1000 1000000\n" + bytes(400_000))
        nested.child_end.close()
        await s.relay.client_done(nested)
        assert not seen(s.host.peers[0], m.Write)
        assert s.host.files == {b"a": b""}
        assert s.host.open_files() == []
        await s.own.ping()


@both
async def test_death_inside_a_payload_that_is_only_drained_is_no_tear(
    unknown: frozenset[bytes],
) -> None:
    # spec N2, W4
    async with scene(unknown) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        nested.child_end.sendall(b"WRITE 1000 500 x\n" + bytes(100))
        nested.child_end.close()
        await s.relay.client_done(nested)
        assert len(seen(s.upstream_of(1), m.Close)) == 1


async def test_a_model_is_not_asked_on_for_the_dead() -> None:
    # spec L10: closing the connection is what ends the call
    async with scene() as s:
        gate = s.host.gates[m.Chat] = Gate()
        nested, client = await s.nested()
        await client.open("a", "w")
        nested.child_end.sendall(b"LLM_CHAT false 0 0 2 0\nhi")
        await wait(gate)
        nested.child_end.close()
        await nested.wait_finished()  # while the host still asks
        gate.opened.set()
        await wait(s.host.peers[1])
        assert s.host.open_files() == []


async def test_a_model_is_not_asked_on_though_a_grandchild_holds_the_line() -> None:
    # spec L10, S2
    async with scene() as s:
        gate = s.host.gates[m.Chat] = Gate()
        nested = await s.connect()
        nested.child_end.sendall(b"LLM_CHAT false 0 0 2 0\nhi")
        await wait(gate)
        await s.relay.client_done(nested)
        gate.opened.set()
        nested.child_end.close()


@both
async def test_no_call_is_begun_for_the_dead(unknown: frozenset[bytes]) -> None:
    # spec S2: it died while the request before was under way
    async with scene(unknown) as s:
        gate = s.host.gates[m.Ping] = Gate()
        nested = await s.connect()
        # As many as go upstream at once, and one more, so that the chat waits here.
        pings = b"PING\n" * (QUEUE_REQUESTS + 2)
        nested.child_end.sendall(pings + b"LLM_CHAT false 0 0 2 0\nhiPING\n")
        await wait(gate)
        nested.child_end.close()
        gate.opened.set()
        await s.relay.client_done(nested)
        assert len(seen(s.upstream_of(1), m.Ping)) == QUEUE_REQUESTS + 3
        assert not s.host.chatted


BEHIND = b"READ %d 1\nSEEK %d 0\nSYNC %d\nCLOSE %d\nPING\n"
"""Requests for one file after a model's answer."""


@both
async def test_nothing_is_sent_once_the_relay_ends(unknown: frozenset[bytes]) -> None:
    # attack 47, spec T3: no answer stands where the model's belongs
    async with scene(unknown) as s:
        gate = s.host.gates[m.Chat] = Gate()
        nested, client = await s.nested()
        number = await client.open("a", "w+")
        asked = b"LLM_CHAT false 0 0 2 0\nhi" + BEHIND % ((number,) * 4)
        nested.child_end.sendall(asked)
        await wait(gate)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(s.relay.close)
            nested.child_end.setblocking(True)
            said = await trio.to_thread.run_sync(nested.child_end.recv, 100)
            gate.opened.set()
        assert said == b""
        if not s.relay.is_serial:
            await wait(s.upstream_of(1))
        assert s.host.open_files() == []


@both
async def test_nothing_is_sent_once_the_host_hangs_up(
    unknown: frozenset[bytes],
) -> None:
    # attack 47, spec T3: nor what the relay itself would answer
    async with scene(unknown) as s:
        nested = await s.connect()
        s.host.raw_replies.append(b"")
        asked = b"LLM_CHAT false 0 0 2 0\nhi" + BEHIND % ((7,) * 4) + b"nonsense\n"
        nested.child_end.sendall(asked)
        nested.child_end.setblocking(True)
        assert await trio.to_thread.run_sync(nested.child_end.recv, 100) == b""


@both
async def test_the_end_of_the_relay_ends_all(
    unknown: frozenset[bytes], no_leaks: None
) -> None:
    # spec N2
    del no_leaks
    with FakeHost(unknown=unknown) as host:
        with host.connect() as line:
            async with open_relay(AsyncClient((line.fileno(),))) as relay:
                ends = []
                for name in "abc":
                    nested = await relay.new_client()
                    client = AsyncClient((nested.child_end.fileno(),))
                    await client.open(name, "w")
                    ends.append(nested.child_end)
            assert host.open_files() == []
            for end in ends:
                assert end.recv(1) == b""
                end.close()
        for peer in host.peers:
            await wait(peer)


# The host's faults


async def test_a_lost_upstream_connection_ends_its_lane_alone(
    logged: list[str],
) -> None:
    async with scene() as s:
        _, first = await s.nested()
        _, second = await s.nested()
        await first.open("a", "w")
        s.host.raw_replies.append(b"")
        with pytest.raises(door.ConnectionLostError):
            await first.ping()
        await second.ping()
        assert any("Upstream connection lost" in line for line in logged)
        assert not any(line.startswith("Sent close") for line in logged)


async def test_garbage_from_the_host_ends_the_lane() -> None:
    async with scene() as s:
        _, client = await s.nested()
        s.host.raw_replies.append(b"HELLO\n")
        with pytest.raises(door.ConnectionLostError):
            await client.ping()
        await wait(s.host.peers[1])


async def test_the_loss_of_the_one_connection_ends_all_lanes(
    logged: list[str],
) -> None:
    async with scene(SERIAL) as s:
        _, first = await s.nested()
        _, second = await s.nested()
        s.host.raw_replies.append(b"")
        with pytest.raises(door.ConnectionLostError):
            await first.ping()
        with pytest.raises(door.ConnectionLostError):
            await second.ping()
        assert any("Upstream connection lost" in line for line in logged)


async def test_a_host_without_commands_in_its_caps_is_refused() -> None:
    with FakeHost() as host, host.connect() as line:
        host.fails[m.Caps] = b"OK 2\n{}"
        with pytest.raises(door.FsProxyError, match="lacks its commands"):
            async with open_relay(AsyncClient((line.fileno(),))):
                pass


async def test_a_stalled_host_does_not_hold_up_the_end(
    mock_clock: trio.testing.MockClock,
) -> None:
    # spec S5
    async with scene() as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        s.host.gates[m.Close] = gate = Gate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(s.relay.client_done, nested)
            await wait(gate)  # the relay waits for the reply
            mock_clock.jump(SETTLE_S)
        gate.opened.set()
        await wait(s.host.peers[1])
        assert s.host.open_files() == []


async def test_a_request_that_a_stalled_host_holds_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    # spec S5
    monkeypatch.setattr(relay, "SETTLE_S", 0.02)
    async with scene() as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        gate = s.host.gates[m.Ping] = Gate()
        nested.child_end.sendall(b"PING\n")
        await wait(gate)
        await s.relay.client_done(nested)
        gate.opened.set()
        await wait(s.host.peers[1])
        assert any(line.startswith("Released filenos 1000") for line in logged)


async def test_a_host_that_dies_at_the_end_has_released_everything() -> None:
    async with scene() as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        s.host.raw_replies.append(b"")
        await s.relay.client_done(nested)
        await wait(s.host.peers[1])


async def test_an_error_inside_goes_through_as_it_came() -> None:
    class OwnError(Exception):
        pass

    with FakeHost() as host, host.connect() as line:
        with pytest.raises(OwnError):
            async with open_relay(AsyncClient((line.fileno(),))):
                raise OwnError


# Real processes


@both
@pytest.mark.slow
async def test_a_nested_process_is_killed_inside_a_write(
    unknown: frozenset[bytes],
) -> None:
    # spec N2, W2
    program = """
import os
from vfs.client import Client
client = Client()
fileno = client.open("a", "w+", top_level=True)
client.write(fileno, b"whole")
os.write(int(os.environ["FSPROXY_FD"]), b"WRITE %d 1000000\\n" % fileno + bytes(90_000))
os.kill(os.getpid(), 9)
"""
    async with scene(unknown) as s:
        nested = await s.connect()
        process = start(program, nested.child_end)
        nested.child_end.close()
        assert await trio.to_thread.run_sync(process.wait) == -signal.SIGKILL
        await s.relay.client_done(nested)
        if not unknown:
            await wait(s.host.peers[1])
        assert s.host.files == {b"a": b"whole"}
        assert s.host.open_files() == []
        await s.own.ping()


@both
@pytest.mark.slow
async def test_shell_commands_work_behind_a_relay(unknown: frozenset[bytes]) -> None:
    # spec N1, T5
    program = (
        "import sys; from vfs.client.shell.fs import main; sys.exit(main(sys.argv[1:]))"
    )
    command = f"{shlex.quote(sys.executable)} -I -c {shlex.quote(program)}"
    script = f'fs() {{ {command} "$@"; }}; fs cat a | fs put b; fs ls; fs stat c'
    async with scene(unknown) as s:
        s.host.files[b"a"] = bytearray(os.urandom(3 * MIB))
        nested = await s.connect()
        process = start_shell(script, nested.child_end)
        nested.child_end.close()
        out, err = await trio.to_thread.run_sync(process.communicate)
        await s.relay.client_done(nested)
        assert (out, err.count(b"\n")) == (b"a\nb\n", 1)
        assert b"cannot stat 'c': No such file" in err
        assert s.host.files[b"b"] == s.host.files[b"a"]
        assert s.host.open_files() == []


def start_shell(script: str, line: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[line.fileno()],
        env={"FSPROXY_FD": str(line.fileno()), "PATH": os.environ["PATH"]},
    )


def start(program: str, line: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        pass_fds=[line.fileno()],
        env={"FSPROXY_FD": str(line.fileno())},
    )


async def test_a_request_that_comes_as_the_host_hangs_up_ends_its_lane_alone() -> None:
    # spec N2: the relay and its other lanes go on, whichever of both is seen first
    for number in range(20):
        near, far = socket.socketpair()
        upstream, host = socket.socketpair()
        lane = AttachedLane(number, near, upstream, (2, 2), bool, None)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.run)
            far.sendall(b"PING\n")
            await trio.lowlevel.wait_readable(host)
            await trio.testing.wait_all_tasks_blocked()
            host.close()
            far.sendall(b"PING\n")
            await lane.finished.wait()
        far.close()
