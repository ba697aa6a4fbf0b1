"""Randomly changed DNS questions, and the answers that they may get."""

import random

from supervisor.network.dns import MAX_ANSWER_BYTES
from tests.supervisor.network import dnsclient as dns

RULES = ("a.test", "*.b.test")
"""Rules of the child that asks."""

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


def change_question(random_: random.Random) -> bytes:
    """Return a valid question with one to three changes."""
    packet = bytearray(random_.choice(SEEDS))
    for _ in range(random_.randint(1, 3)):
        random_.choice(CHANGES)(packet, random_)
    return bytes(packet)


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
