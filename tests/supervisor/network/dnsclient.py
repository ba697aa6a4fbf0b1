"""A DNS client's side: questions as bytes, and answers taken apart, by RFC 1035."""

import struct
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

A, PTR, MX, TXT, AAAA, OPT, HTTPS, SVCB, ANY = 1, 12, 15, 16, 28, 41, 65, 64, 255


class Record(NamedTuple):
    """One record of an answer."""

    name: bytes
    type: int
    cls: int
    ttl: int
    data: bytes


class Reply(NamedTuple):
    """An answer; `question` is as it stands on the wire."""

    id: int
    flags: int
    question: bytes
    answers: tuple[Record, ...]
    others: tuple[Record, ...]

    @property
    def code(self) -> int:
        """The response code, with its upper bits if there is EDNS."""
        upper = [record.ttl >> 24 for record in self.others if record.type == OPT]
        return self.flags & 0xF | (upper[0] << 4 if upper else 0)

    @property
    def texts(self) -> list[str]:
        """The data of the answers."""
        return [text_of(record) for record in self.answers]


def name(text: str) -> bytes:
    """Return a name as it stands on the wire."""
    labels = [label.encode() for label in text.split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def question(
    text: str | bytes,
    kind: int = A,
    *,
    number: int = 7,
    cls: int = 1,
    flags: int = 0x100,
) -> bytes:
    """Return a question for a name; bytes are its form on the wire."""
    wire = text if isinstance(text, bytes) else name(text)
    header = struct.pack("!6H", number, flags, 1, 0, 0, 0)
    return header + wire + struct.pack("!2H", kind, cls)


def with_edns(
    packet: bytes, ttl: int = 0, size: int = 1232, data: bytes = b""
) -> bytes:
    """Return a question with an OPT record behind it."""
    record = b"\0" + struct.pack("!2HIH", OPT, size, ttl, len(data)) + data
    count = int.from_bytes(packet[10:12], "big") + 1
    return packet[:10] + count.to_bytes(2, "big") + packet[12:] + record


def read(packet: bytes) -> Reply:
    """Return an answer; each byte of it has to be part of it."""
    number, flags, questions, answers, authorities, others = struct.unpack_from(
        "!6H", packet
    )
    assert questions <= 1
    assert not authorities
    at = 12
    for _ in range(questions):
        _, at = read_name(packet, at)
        at += 4
    wire = packet[12:at]
    records = []
    for _ in range(answers + others):
        owner, at = read_name(packet, at)
        kind, cls, ttl, size = struct.unpack_from("!2HIH", packet, at)
        at += 10 + size
        assert at <= len(packet)
        records.append(Record(owner, kind, cls, ttl, packet[at - size : at]))
    assert at == len(packet)
    return Reply(
        number, flags, wire, tuple(records[:answers]), tuple(records[answers:])
    )


def read_name(packet: bytes, at: int) -> tuple[bytes, int]:
    """Return a name in zone files' form, and where it ends."""
    labels, end = [], 0
    while size := packet[at]:
        if size >= 0xC0:
            end = end or at + 2
            at = int.from_bytes(packet[at : at + 2], "big") & 0x3FFF
            continue
        labels.append(packet[at + 1 : at + 1 + size])
        at += 1 + size
    return b".".join(labels), end or at + 1


def text_of(record: Record) -> str:
    """Return the data of a record as text."""
    if record.type == A:
        return str(IPv4Address(record.data))
    if record.type == AAAA:
        return str(IPv6Address(record.data))
    return read_name(record.data, 0)[0].decode()
