"""The DNS server of a child: it answers from the rules, and asks no other server.

1. A granted name has the addresses of its pool, every other name does not exist (spec
   NET5). No question leaves the host, so none carries anything out.
2. The question is echoed as it came, byte for byte: resolvers compare its case.
3. An answer has one record at most and never more than 512 bytes: no answer over UDP is
   truncated, and TCP is for programs that insist on it.
4. A message that is no question gets no answer, for an answer could be answered.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, NamedTuple

from hostlib.event_rate import EventRate
from supervisor.network.hosts import HostError, parse_name
from supervisor.network.reasons import NetworkRefusal, Reason

if TYPE_CHECKING:
    from supervisor.network.hosts import Address
    from supervisor.network.pool import Pool
    from supervisor.network.rules import Rules

TTL_S = 60
"""How long an answer may be kept; a name that is revoked is refused at the connect."""
MAX_CONNECTIONS = 16
"""TCP connections of a child to its DNS."""
IDLE_S = 10.0
"""How long such a connection may be silent."""
QUESTIONS_PER_S = 1000
QUESTIONS_AT_ONCE = 400
MAX_QUESTION_BYTES = 4096
"""A question with EDNS options and padding has some hundred bytes."""
MAX_ANSWER_BYTES = 512
"""The size that every client takes over UDP (RFC 1035)."""

_UDP_PAYLOAD_BYTES = 1232  # passes everywhere without fragments (DNS flag day 2020)
_MAX_RECORDS = 4  # beside a question: OPT, and perhaps a signature
_MAX_NAME_BYTES = 255

_HEADER = struct.Struct("!6H")
_TYPE_AND_CLASS = struct.Struct("!2H")
_RECORD = struct.Struct("!2HIH")  # type, class, TTL, length: what follows a name
_QUESTION_NAME = b"\xc0\x0c"  # a pointer to the name that follows the header

_IS_RESPONSE = 0x8000
_OPCODE = 0x7800
_RECURSION_DESIRED = 0x0100
_RECURSION_AVAILABLE = 0x0080
_CHECKING_DISABLED = 0x0010
_ECHOED_FLAGS = _OPCODE | _RECURSION_DESIRED | _CHECKING_DISABLED
_DNSSEC_OK = 0x8000

_ONE_CLASS = 1  # IN
_PLAIN_LABEL = re.compile(rb"[A-Za-z0-9_-]+")
_REVERSE_V4 = re.compile(r"((?:\d{1,3}\.){4})in-addr\.arpa")
_REVERSE_V6 = re.compile(r"((?:[0-9a-f]\.){32})ip6\.arpa")


class Type(IntEnum):
    """The types of records that are told apart; every other one has no data."""

    A = 1
    PTR = 12
    AAAA = 28
    OPT = 41


class ResponseCode(IntEnum):
    """Response codes; the last one is an extended one (RFC 6891)."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    BADVERS = 16


class DnsQuestion(NamedTuple):
    """A question as it came.

    Attributes:
        id: of the message.
        flags: of its header.
        wire: name, type and class, to be echoed.
        labels: of the name.
        type: of the records that are asked for.
        cls: their class.
        edns: the flags of EDNS and its version as one number, None without EDNS.
    """

    id: int
    flags: int
    wire: bytes
    labels: tuple[bytes, ...]
    type: int
    cls: int
    edns: int | None


@dataclass(frozen=True, slots=True)
class DnsAnswer:
    """The answer to a packet, and why its name was refused.

    Attributes:
        packet: None if nothing is sent.
        name: the name in the question, printable.
        refused: why the name has no address; None if it has one, or is not told.
    """

    packet: bytes | None
    name: str = ""
    refused: NetworkRefusal | None = None


class NameServer:
    """The DNS server of one child."""

    def __init__(self, pool: Pool, *, has_v6: bool = True) -> None:
        self._pool = pool
        self._has_v6 = has_v6
        self._rate = EventRate(QUESTIONS_AT_ONCE, QUESTIONS_PER_S)

    def answer(self, packet: bytes, rules: Rules, now_s: float) -> DnsAnswer:
        """Return what is sent for a packet, over UDP as over TCP."""
        if not self._rate.take(now_s) or not _is_request(packet):
            return DnsAnswer(None)
        if packet[2] & (_OPCODE >> 8):
            return DnsAnswer(_write_error(packet, ResponseCode.NOTIMP))
        question = parse_question(packet)
        if question is None:
            return DnsAnswer(_write_error(packet, ResponseCode.FORMERR))
        if question.edns is not None and question.edns >> 16 & 0xFF:
            return DnsAnswer(_write(question, ResponseCode.BADVERS))
        if question.cls != _ONE_CLASS:
            return DnsAnswer(_write(question, ResponseCode.NOTIMP))
        code, data, refused = self._resolve(question, rules)
        name = _display(question.labels)
        return DnsAnswer(_write(question, code, data), name, refused)

    def is_used_up(self, now_s: float) -> bool:
        """Tell whether the next question would be dropped."""
        return self._rate.is_used_up(now_s)

    def _resolve(
        self, question: DnsQuestion, rules: Rules
    ) -> tuple[ResponseCode, bytes, NetworkRefusal | None]:
        """Return a code, the data of a record if there is one, and what is told."""
        name = _name_of(question.labels)
        if question.type == Type.PTR and (target := self._reverse(name, rules)):
            return ResponseCode.NOERROR, _encode_name(target), None
        if name == "localhost" or name.endswith(".localhost"):
            pair = (IPv4Address("127.0.0.1"), IPv6Address("::1"))
            return ResponseCode.NOERROR, self._choose(question.type, *pair), None
        refused = rules.decide_any_port(name) if name else _not_a_name()
        if refused is not None:
            is_told = question.type != Type.PTR and len(question.labels) > 1
            return ResponseCode.NXDOMAIN, b"", refused if is_told else None
        if question.type not in {Type.A, Type.AAAA}:
            return ResponseCode.NOERROR, b"", None
        addresses = self._pool.assign(name)
        if addresses is None:
            return ResponseCode.SERVFAIL, b"", NetworkRefusal(Reason.TOO_MANY_NAMES)
        return ResponseCode.NOERROR, self._choose(question.type, *addresses), None

    def _choose(self, kind: int, v4: IPv4Address, v6: IPv6Address) -> bytes:
        """Return the address of a type; empty for other types."""
        if kind == Type.A:
            return v4.packed
        return v6.packed if kind == Type.AAAA and self._has_v6 else b""

    def _reverse(self, name: str, rules: Rules) -> str | None:
        """Return the granted name of a pool's address that is asked for backwards."""
        address = _reversed_address(name)
        target = None if address is None else self._pool.name_of(address)
        if target is None or rules.decide_any_port(target) is not None:
            return None
        return target


class QuestionReader:
    """Cuts the stream of a TCP connection into questions (RFC 1035, 4.2.2)."""

    def __init__(self) -> None:
        self._held = bytearray()

    def receive(self, data: bytes) -> None:
        """Add what was received; read all questions before more is added."""
        self._held += data

    def next_question(self) -> bytes | None:
        """Return the next packet, None while it has not come as a whole.

        Raises:
            ValueError: it has a length that no question has; the connection ends.
        """
        if len(self._held) < 2:
            return None
        size = int.from_bytes(self._held[:2], "big")
        if not _HEADER.size <= size <= MAX_QUESTION_BYTES:
            raise ValueError(f"cannot read a DNS message of {size} bytes")
        if len(self._held) < 2 + size:
            return None
        packet = bytes(self._held[2 : 2 + size])
        del self._held[: 2 + size]
        return packet


def frame(packet: bytes) -> bytes:
    """Return a packet as it is sent over TCP."""
    return len(packet).to_bytes(2, "big") + packet


def parse_question(packet: bytes) -> DnsQuestion | None:
    """Return the one question of a packet, None if the packet has another form."""
    try:
        return _parse_question(packet)
    except (IndexError, struct.error):
        return None  # it ends too early


def _parse_question(packet: bytes) -> DnsQuestion | None:
    number, flags, questions, answers, authorities, others = _HEADER.unpack_from(packet)
    if (questions, answers, authorities) != (1, 0, 0) or others > _MAX_RECORDS:
        return None
    name = _parse_labels(packet, _HEADER.size)
    if name is None:
        return None
    labels, at = name
    kind, cls = _TYPE_AND_CLASS.unpack_from(packet, at)
    at += _TYPE_AND_CLASS.size
    wire = packet[_HEADER.size : at]
    edns = None
    for _ in range(others):
        is_root = packet[at] == 0
        at = _skip_name(packet, at)
        record, _, ttl, length = _RECORD.unpack_from(packet, at)
        at += _RECORD.size + length
        if record == Type.OPT:
            if edns is not None or not is_root:
                return None
            edns = ttl
    if at != len(packet):
        return None
    return DnsQuestion(number, flags, wire, labels, kind, cls, edns)


def _parse_labels(packet: bytes, at: int) -> tuple[tuple[bytes, ...], int] | None:
    """Return the labels of a name and where it ends.

    There is nothing before a question that a pointer could lead to, so that a pointer,
    as every other length above 63, is refused.
    """
    start = at
    labels = []
    while size := packet[at]:
        at += 1 + size
        if size > 63 or at - start >= _MAX_NAME_BYTES:
            return None
        labels.append(packet[at - size : at])
    return tuple(labels), at + 1


def _skip_name(packet: bytes, at: int) -> int:
    """Return where the name of a record ends; where a pointer leads is not looked at."""
    while size := packet[at]:
        if size >= 0xC0:
            return at + 2
        at += 1 + size
    return at + 1


def _is_request(packet: bytes) -> bool:
    if not _HEADER.size <= len(packet) <= MAX_QUESTION_BYTES:
        return False
    return not packet[2] & (_IS_RESPONSE >> 8)


def _write_error(packet: bytes, code: ResponseCode) -> bytes:
    """Return the answer to what has no question that could be echoed."""
    number, flags = struct.unpack_from("!2H", packet)
    flags = flags & _ECHOED_FLAGS | _IS_RESPONSE | _RECURSION_AVAILABLE | code
    return _HEADER.pack(number, flags, 0, 0, 0, 0)


def _write(question: DnsQuestion, code: ResponseCode, data: bytes = b"") -> bytes:
    """Return an answer with one record, or with none if there is no data."""
    has_edns = question.edns is not None
    flags = question.flags & _ECHOED_FLAGS | _IS_RESPONSE | _RECURSION_AVAILABLE
    counts = (1, bool(data), 0, has_edns)
    parts = [_HEADER.pack(question.id, flags | code & 0xF, *counts), question.wire]
    if data:
        record = _RECORD.pack(question.type, _ONE_CLASS, TTL_S, len(data))
        parts += [_QUESTION_NAME, record, data]
    if question.edns is not None:
        extended = code >> 4 << 24 | question.edns & _DNSSEC_OK
        parts += [b"\0", _RECORD.pack(Type.OPT, _UDP_PAYLOAD_BYTES, extended, 0)]
    return b"".join(parts)


def _name_of(labels: tuple[bytes, ...]) -> str:
    """Return a name in the form of the rules; empty if no rule could be for it.

    A label with a dot in it would look like two.
    """
    if not all(map(_PLAIN_LABEL.fullmatch, labels)):
        return ""
    try:
        return parse_name(b".".join(labels).decode("ascii"))
    except HostError:
        return ""


def _not_a_name() -> NetworkRefusal:
    return NetworkRefusal(Reason.NO_RULE)


def _display(labels: tuple[bytes, ...]) -> str:
    """Return a name as zone files write it: other bytes as their decimal number."""
    return ".".join(
        "".join(
            chr(byte) if 0x20 < byte < 0x7F and byte not in b".\\" else f"\\{byte:03d}"
            for byte in label.lower()
        )
        for label in labels
    )


def _encode_name(name: str) -> bytes:
    labels = name.encode("ascii").split(b".")
    return b"".join(bytes((len(label),)) + label for label in labels) + b"\0"


def _reversed_address(name: str) -> Address | None:
    """Return the address that a name below `in-addr.arpa` or `ip6.arpa` is for."""
    if match := _REVERSE_V6.fullmatch(name):
        return IPv6Address(int(match[1].replace(".", "")[::-1], 16))
    if match := _REVERSE_V4.fullmatch(name):
        try:
            return IPv4Address(".".join(match[1].split(".")[3::-1]))
        except ValueError:
            return None
    return None
