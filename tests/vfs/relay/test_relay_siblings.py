"""Nested clients beside each other: whose numbers, whose turn, whose memory."""

import pytest
import trio
import trio.testing

from protocol import limits
from protocol import messages as m
from tests.vfs.fakeline import Gate
from tests.vfs.relay.relayscene import (
    MIB,
    SERIAL,
    both,
    dialogue,
    scene,
    seen,
    wait,
)
from vfs import client as door
from vfs.relay import serial


@both
async def test_siblings_cannot_use_each_others_numbers(
    unknown: frozenset[bytes],
) -> None:
    # spec N3, W4, attack 19
    async with scene(unknown) as s:
        own = await s.own.open("own", "w+")
        _, first = await s.nested()
        _, second = await s.nested()
        number = await first.open("a", "w+")
        await first.write(number, b"secret")
        for foreign in (number, own):
            for call in (
                second.read(foreign, 1),
                second.write(foreign, b"x" * 100_000),
                second.seek(foreign, 0),
                second.truncate(foreign, 0),
                second.sync(foreign),
                second.close(foreign),
            ):
                with pytest.raises(door.FsProxyError, match="invalid fileno"):
                    await call
        await first.seek(number, 0)
        assert await first.read(number, 10) == b"secret"
        await first.close(number)
        with pytest.raises(door.FsProxyError, match="invalid fileno"):
            await first.close(number)


async def test_a_slow_request_does_not_stop_the_siblings() -> None:
    # spec N4
    async with scene() as s:
        gate = s.host.gates[m.Chat] = Gate()
        slow, _ = await s.nested()
        slow.child_end.sendall(b"LLM_CHAT false 0 0 2 0\nhi")
        await wait(gate)
        _, other = await s.nested()
        fileno = await other.open("a", "w+")
        await other.write(fileno, b"x")
        await s.own.ping()
        assert not gate.opened.is_set()
        gate.opened.set()


async def test_without_attach_requests_take_turns() -> None:
    # spec N4: correct, merely serial
    async with scene(SERIAL) as s:
        answer = b'{"choices": []}'
        s.host.chat = (answer, b"1.0 weighted tokens (no limit)")
        gate = s.host.gates[m.Chat] = Gate()
        _, slow = await s.nested()
        _, other = await s.nested()
        order = []

        async def chat() -> None:
            await slow.llm_chat("hi")
            order.append("chat")

        async def ping() -> None:
            await other.ping()
            order.append("ping")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(chat)
            await wait(gate)
            nursery.start_soon(ping)
            await trio.testing.wait_all_tasks_blocked()
            gate.opened.set()
        assert order == ["chat", "ping"]


@both
async def test_a_client_that_takes_nothing_stops_itself(
    unknown: frozenset[bytes],
) -> None:
    # spec N4, S5, attack 17
    async with scene(unknown) as s:
        s.host.files[b"a"] = bytearray(8 * MIB)
        stalled, client = await s.nested()
        await client.open("a")
        stalled.child_end.sendall(b"READ 1000 8000000\n" * 5)
        _, other = await s.nested()
        for _ in range(20):
            fileno = await other.open("b", "w+")
            await other.write(fileno, b"x" * 100_000)
            await other.seek(fileno, 0)
            assert len(await other.read(fileno, 100_000)) == 100_000
            await other.close(fileno)


@both
@pytest.mark.slow
async def test_a_flood_of_refusals_is_held_back(unknown: frozenset[bytes]) -> None:
    # spec S5: nobody takes the replies, so the requests must stop being taken
    async with scene(unknown) as s:
        nested = await s.connect()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(nested.child_end))
        with trio.move_on_after(0.3) as scope:
            for _ in range(10_000):
                await stream.send_all(b"NONSENSE\n" * 1000)
        assert scope.cancelled_caught
        _, other = await s.nested()
        await other.ping()
        await stream.aclose()


# Bounds of the lane that takes turns


async def test_in_turns_a_payload_is_bounded() -> None:
    # spec W3, W4, attack 15
    async with scene(SERIAL) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        size = limits.MAX_WRITE_BYTES + 1
        request = b"WRITE 1000 %d\n" % size + bytes(size) + b"PING\n"
        reply = b"ERROR invalid size: 16777217 exceeds limit 16777216\nOK\n"
        assert await dialogue(nested.child_end, request, len(reply)) == reply
        assert not seen(s.host.peers[0], m.Write)


async def test_in_turns_a_read_is_bounded() -> None:
    # spec R1, R3
    async with scene(SERIAL) as s:
        nested, client = await s.nested()
        await client.open("a", "w+")
        assert await dialogue(nested.child_end, b"READ 1000 99999999\n", 5) == b"OK 0\n"
        (read,) = seen(s.host.peers[0], m.Read)
        assert read == m.Read(b"1000", limits.MAX_READ_BYTES)


async def test_in_turns_a_payload_that_does_not_come_ends_the_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # spec F8, attack 16
    monkeypatch.setattr(serial, "DEADLINE_S", 0.2)
    async with scene(SERIAL) as s:
        nested, client = await s.nested()
        await client.open("a", "w")
        nested.child_end.sendall(b"WRITE 1000 100\nhalf")
        await nested.wait_finished()
        assert nested.child_end.recv(1) == b""
        assert s.host.open_files() == []
        nested.child_end.close()
