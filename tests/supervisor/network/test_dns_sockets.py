"""A child's DNS over UDP and TCP: floods, idle and broken connections."""

import socket
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from supervisor.network.dns import (
    MAX_CONNECTIONS,
    QUESTIONS_AT_ONCE,
    QUESTIONS_PER_S,
    frame,
)
from supervisor.network.refusals import MAX_ROWS
from tests.supervisor.network import dnsclient as dns
from tests.supervisor.network.scene import Scene, is_reset, read_all, scene

GOOD = dns.question("web.test")


@pytest.fixture
def mock_clock() -> MockClock:
    """Return a clock that stands still, and can be put forward."""
    return MockClock(rate=0.0)


async def _connect(stage: Scene) -> trio.SocketStream:
    return await stage.connect("127.0.0.1", 53)


async def _read_answers(stream: trio.SocketStream, count: int) -> list[dns.Reply]:
    data = b""
    replies: list[dns.Reply] = []
    while len(replies) < count:
        while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2], "big"):
            part = await stream.receive_some()
            assert part
            data += part
        size = 2 + int.from_bytes(data[:2], "big")
        replies.append(dns.read(data[2:size]))
        data = data[size:]
    assert not data
    return replies


# spec NET5: a granted name has an address of its own, over UDP as over TCP.
async def test_a_name_has_the_same_addresses_over_udp_and_tcp() -> None:
    async with scene("web.test:80", "other.test:80") as stage:
        udp = [await stage.ask(name) for name in ("web.test", "other.test")]
        async with await _connect(stage) as stream:
            for name in ("other.test", "web.test"):
                await stream.send_all(frame(dns.question(name)))
            tcp = await _read_answers(stream, 2)
        assert [reply.texts for reply in udp] == [["198.18.0.2"], ["198.18.0.3"]]
        assert [reply.texts for reply in tcp] == [["198.18.0.3"], ["198.18.0.2"]]
        assert not stage.names.asked


# spec NET5: TCP takes pipelined questions, in pieces of any size.
async def test_pipelined_questions_are_answered_in_order() -> None:
    async with scene("web.test:80") as stage:
        async with await _connect(stage) as stream:
            packets = [dns.question("web.test", number=n) for n in range(100)]
            data = b"".join(map(frame, packets))
            for at in range(0, len(data), 1000):
                await stream.send_all(data[at : at + 1000])
            replies = await _read_answers(stream, 100)
            assert [reply.id for reply in replies] == list(range(100))
            await stream.send_eof()
            assert await read_all(stream) == b""


# spec NET5: a connection is silent for 10 s at most.
async def test_a_silent_connection_is_ended(mock_clock: MockClock) -> None:
    async with scene("web.test:80") as stage:
        async with await _connect(stage) as stream:
            for _ in range(3):
                mock_clock.jump(9)
                await stream.send_all(frame(GOOD))
                await _read_answers(stream, 1)
            # Bytes that are no whole question put nothing off.
            mock_clock.jump(9)
            await stream.send_all(frame(GOOD)[:5])
            await wait_all_tasks_blocked(0.01)
            mock_clock.jump(2)
            await is_reset(stream)
        assert not [w for _, w in stage.network.descriptors() if w == "DNS of a child"]


# spec NET5: 16 connections; one more takes the place of that which idles longest.
async def test_one_connection_too_many_takes_the_place_of_the_idlest(
    mock_clock: MockClock,
) -> None:
    async with scene("web.test:80") as stage:
        streams = []
        for _ in range(MAX_CONNECTIONS + 1):
            mock_clock.jump(0.1)
            stream = await _connect(stage)
            await stream.send_all(frame(GOOD))
            await _read_answers(stream, 1)
            await wait_all_tasks_blocked()  # the host has noted since when it idles
            streams.append(stream)
        words = [word for _, word in stage.network.descriptors()]
        assert words.count("DNS of a child") == MAX_CONNECTIONS
        await is_reset(streams[0])
        for stream in streams[1:]:
            await stream.send_all(frame(GOOD))
            await _read_answers(stream, 1)


# spec NET5: a length that no question has ends the connection; malformed is FORMERR.
async def test_what_is_no_question_ends_the_connection_or_is_told() -> None:
    async with scene("web.test:80") as stage:
        async with await _connect(stage) as stream:
            await stream.send_all(frame(GOOD + b"?"))
            (reply,) = await _read_answers(stream, 1)
            assert reply.code == 1
            await stream.send_all(b"\0\0")
            await is_reset(stream)
        assert (await stage.ask("web.test")).texts


def _received(sock: socket.socket) -> int:
    """Return how many packets have come."""
    count = 0
    with suppress(BlockingIOError):
        while sock.recv(4096):
            count += 1
    return count


# spec NET5: a flood is answered at the child's rate, and the rest is dropped.
# attack 60
async def test_a_flood_of_questions_is_answered_in_part(mock_clock: MockClock) -> None:
    async with scene("web.test:80") as stage:
        with stage.child.make_socket(kind=socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", 53))
            answered = 0
            for _ in range(20):
                for _ in range(500):
                    sock.send(GOOD)
                await wait_all_tasks_blocked(0.001)
                answered += _received(sock)
            assert answered == QUESTIONS_AT_ONCE
            for _ in range(20):
                mock_clock.jump(0.05)
                await wait_all_tasks_blocked(0.001)
                answered += _received(sock)
            assert QUESTIONS_AT_ONCE < answered <= QUESTIONS_AT_ONCE + QUESTIONS_PER_S
        assert (await stage.ask("web.test")).texts


# spec NET11: a child that asks for 10,000 names fills nobody's journal.
# attack 60
@pytest.mark.slow
async def test_ten_thousand_names_are_few_rows(mock_clock: MockClock) -> None:
    async with scene("web.test:80") as stage:
        async with await _connect(stage) as stream:
            for first in range(0, 10_000, QUESTIONS_AT_ONCE):
                mock_clock.jump(1)  # all of these are earned again
                for n in range(first, first + QUESTIONS_AT_ONCE):
                    await stream.send_all(frame(dns.question(f"n{n}.evil.test")))
                replies = await _read_answers(stream, QUESTIONS_AT_ONCE)
                assert {reply.code for reply in replies} == {3}
        # In a minute of this clock the same name is told again.
        assert len({row[0] for row in stage.told()}) == MAX_ROWS + 1
        rows = stage.figures.refused
        assert len(rows) == MAX_ROWS + 1
        assert (rows[-1].name, rows[-1].port) == ("(others)", None)
        assert sum(row.count for row in rows) == 10_000
        assert not stage.names.asked


# spec NET5: packets of any form leave the server as it was.
# attack 60
async def test_packets_of_odd_form_change_nothing() -> None:
    async with scene("web.test:80") as stage:
        sock = stage.child.make_socket(kind=socket.SOCK_DGRAM)
        with trio.socket.from_stdlib_socket(sock) as udp:
            await udp.connect(("127.0.0.1", 53))
            odd = (b"", b"x", GOOD[:-1], GOOD + bytes(60_000), bytes(12), b"\xff" * 512)
            for packet in odd:
                await udp.send(packet)
        assert (await stage.ask("web.test")).texts == ["198.18.0.2"]
        assert not stage.events
