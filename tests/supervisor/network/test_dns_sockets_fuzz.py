"""Odd packets to a child's DNS ports: 2,000, or 100,000 in the long form.

Half go by UDP, half by TCP. Each has a number of its own where its id stands, so that an
answer is held against what was asked.
"""

import gc
import random
import resource
import socket
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from supervisor.network.dns import MAX_CONNECTIONS, frame
from supervisor.network.refusals import MAX_ROWS
from tests.helpers.rounds import LONG, SEED
from tests.supervisor.network import dnsclient as dns
from tests.supervisor.network.odd_packets import RULES, change_question, check_answer
from tests.supervisor.network.scene import Scene, scene

PACKETS = 100_000 if LONG else 2_000
BATCH = 20
IN_FLIGHT_BYTES = 60_000
"""The kernel's receive buffer of a socket: less than its default."""

GROWTH_BYTES = 24 << 20
"""Of this process, once 4,096 names and 256 rows are there."""

LAST = 0xFFFF
"""The number of a valid question behind the odd ones."""

GOOD = dns.question("a.test", number=LAST)


@pytest.fixture
def fast_clock() -> MockClock:
    """Return a clock by which a child earns 50,000 questions a second."""
    return MockClock(rate=50.0)


class Fuzzer:
    """Sends odd packets, and holds answers against them.

    Attributes:
        sent: packets.
        answered: of them.
        ended: connections that the host has reset.
    """

    def __init__(self, stage: Scene, seed: int) -> None:
        self.sent = 0
        self.answered = 0
        self.ended = 0
        self._stage = stage
        self._random = random.Random(seed)
        self._seed = seed

    def _next(self) -> bytes:
        number = self.sent % LAST
        self.sent += 1
        if self._random.random() < 0.1:
            packet = self._random.randbytes(self._random.randrange(600))
        else:
            packet = change_question(self._random)
        return (number.to_bytes(2, "big") + packet[2:])[: len(packet)][:IN_FLIGHT_BYTES]

    async def send_datagrams(self, udp: trio.socket.SocketType) -> None:
        """Send some packets by UDP, and read the answers to them."""
        batch: dict[int, bytes] = {}
        size = 0
        while len(batch) < BATCH and size < IN_FLIGHT_BYTES:
            packet = self._next()
            batch[int.from_bytes(packet[:2], "big")] = packet
            size += len(packet)
            await udp.send(packet)
        await udp.send(GOOD)
        # Packets are answered in the order in which they were sent.
        while (answer := await udp.recv(65_536))[:2] != GOOD[:2]:
            self._check(batch.pop(int.from_bytes(answer[:2], "big")), answer)
        check_answer(GOOD, answer, "the valid question")

    async def send_stream(self) -> None:
        """Send some packets in a connection, its bytes changed now and then."""
        data = bytearray(b"".join(frame(self._next()) for _ in range(BATCH)))
        if self._random.random() < 0.3:
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        questions = iter(split(bytes(data)))
        stream = await self._stage.connect("127.0.0.1", 53)
        got = b""
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(send_all, stream, bytes(data))
            try:
                while part := await stream.receive_some():
                    got += part
            except trio.BrokenResourceError:
                self.ended += 1
            nursery.cancel_scope.cancel()
        # A connection that is reset may lose answers, the last one in its middle.
        for answer in split(got):
            sent = next(one for one in questions if one[:2] == answer[:2])
            self._check(sent, answer)

    def _check(self, sent: bytes, answer: bytes) -> None:
        self.answered += 1
        check_answer(sent, answer, f"seed {self._seed}, packet {sent.hex()}")


def split(data: bytes) -> list[bytes]:
    """Return the packets of a stream."""
    found = []
    while len(data) >= 2 and len(data) >= (end := 2 + int.from_bytes(data[:2], "big")):
        found.append(data[2:end])
        data = data[end:]
    return found


async def send_all(stream: trio.SocketStream, data: bytes) -> None:
    """Send bytes and their end, as far as they are taken."""
    try:
        await stream.send_all(data)
        await stream.send_eof()
    except (trio.BrokenResourceError, OSError):
        pass


def resident_bytes() -> int:
    """Return how much memory this process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# spec NET5: packets of odd form to the DNS ports; every answer is for its question.
# attack 60
@pytest.mark.chaos
async def test_odd_packets_to_both_ports_leave_the_host_as_it_was(
    fast_clock: MockClock, capfd: pytest.CaptureFixture[str]
) -> None:
    del fast_clock
    seed = SEED or random.randrange(1 << 32)
    before = 0
    async with scene(*RULES) as stage:
        # First: an odd packet may ask for another name that a rule grants.
        address = (await stage.ask("a.test")).texts
        fuzzer = Fuzzer(stage, seed)
        sock = stage.child.make_socket(kind=socket.SOCK_DGRAM)
        with trio.socket.from_stdlib_socket(sock) as udp:
            await udp.connect(("127.0.0.1", 53))
            while fuzzer.sent < PACKETS:
                await fuzzer.send_datagrams(udp)
                await fuzzer.send_stream()
                if not before and fuzzer.sent > PACKETS // 2:
                    before = resident_bytes()
        grown = resident_bytes() - before
        assert (await stage.ask("a.test")).texts == address == ["198.18.0.2"]
        words = [word for _, word in stage.network.descriptors()]
        assert words.count("DNS of a child") <= MAX_CONNECTIONS
        assert len(stage.figures.refused) <= MAX_ROWS + 1
        assert not stage.names.asked
    assert fuzzer.answered > PACKETS // 8, f"seed {seed}"
    assert grown < GROWTH_BYTES, f"seed {seed}"
    assert not capfd.readouterr().err, f"seed {seed}"
    with capfd.disabled():
        print(  # noqa: T201 - a figure of the long form
            f"\n    {fuzzer.sent} packets, {fuzzer.answered} answered,"
            f" {fuzzer.ended} connections reset, {grown >> 10} KiB more",
            end="",
        )
