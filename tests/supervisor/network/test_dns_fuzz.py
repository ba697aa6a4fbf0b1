"""Packets of odd form to the DNS: 5,000 in the short form, 100,000 in the long one."""

import random

import pytest

from supervisor.network.dns import MAX_ANSWER_BYTES, NameServer
from supervisor.network.pool import Pool
from supervisor.network.rules import parse_rules
from tests.helpers.rounds import LONG, SEED
from tests.supervisor.network import dnsclient as dns

PACKETS = 100_000 if LONG else 5_000
GRANTED = ("a.test", "x.b.test")
SEEDS = (
    dns.question("a.test"),
    dns.question("X.b.test", dns.AAAA),
    dns.question("evil.test", dns.TXT),
    dns.with_edns(dns.question("a.test"), data=b"\0\x0a\0\x08cookies!"),
    dns.with_edns(dns.with_edns(dns.question("a.test"))),
    dns.question("2.0.18.198.in-addr.arpa", dns.PTR),
    dns.question(b"\xc0\x0c"),
    dns.question(b"\3www" * 63 + b"\0"),
)


def cut(packet: bytearray, random_: random.Random) -> None:
    """Take the end away."""
    del packet[random_.randrange(len(packet) + 1) :]


def flip(packet: bytearray, random_: random.Random) -> None:
    """Write other bytes, often such as a length or a count has."""
    for _ in range(random_.randint(1, 4)):
        if packet:
            odd = random_.choice((0, 1, 0x3F, 0x40, 0x80, 0xC0, 0xFF, None))
            byte = random_.randrange(256) if odd is None else odd
            packet[random_.randrange(len(packet))] = byte


def insert(packet: bytearray, random_: random.Random) -> None:
    """Put bytes in between."""
    at = random_.randrange(len(packet) + 1)
    packet[at:at] = random_.randbytes(random_.randint(1, 40))


def repeat(packet: bytearray, random_: random.Random) -> None:
    """Put a part of it behind it."""
    at = random_.randrange(len(packet) + 1)
    packet += packet[at : at + random_.randint(1, 600)]


def pad(packet: bytearray, random_: random.Random) -> None:
    """Make it as long as a packet may be."""
    packet += bytes(random_.randint(1, 70_000))


CHANGES = (*(cut, flip, flip, flip, insert, repeat) * 8, pad)


# spec NET5: packets of odd form to the DNS port
@pytest.mark.chaos
def test_no_packet_breaks_the_server_or_gets_more_than_its_name() -> None:
    seed = SEED or random.randrange(1 << 32)
    random_ = random.Random(seed)
    pool = Pool()
    rules = parse_rules(["a.test", "*.b.test"])
    server = NameServer(pool)
    answered = 0
    for number in range(PACKETS):
        packet = bytearray(random_.choice(SEEDS))
        for _ in range(random_.randint(1, 3)):
            random_.choice(CHANGES)(packet, random_)
        sent = bytes(packet)
        answer = server.answer(sent, rules, float(number))
        if answer.packet is not None:
            answered += 1
            check_answer(sent, answer.packet, f"seed {seed}, packet {sent.hex()}")
    assert answered > PACKETS // 4
    names = set(pool.names())
    assert "a.test" in names
    assert all(name == "a.test" or name.endswith(".b.test") for name in names)


def check_answer(sent: bytes, packet: bytes, told: str) -> None:
    """Check that an answer is whole, for its question, and no more than that."""
    assert len(packet) <= MAX_ANSWER_BYTES, told
    reply = dns.read(packet)
    assert reply.id == int.from_bytes(sent[:2], "big"), told
    assert reply.flags & 0x8000, told
    assert reply.code in {0, 1, 2, 3, 4, 16}, told
    assert reply.question in {b"", sent[12 : 12 + len(reply.question)]}, told
    assert len(reply.answers) <= (1 if reply.code == 0 else 0), told
    for record in reply.answers:
        name = record.name.decode("ascii").lower()
        is_granted = name == "a.test" or name.endswith(".b.test")
        is_reverse = record.type == dns.PTR and name.endswith(".arpa")
        assert is_granted or is_reverse, told
