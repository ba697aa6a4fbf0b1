"""The DNS of a child: what it is answered, and what it is not."""

import struct

import pytest

from supervisor.network.dns import (
    MAX_ANSWER_BYTES,
    MAX_QUESTION_BYTES,
    DnsAnswer,
    NameServer,
    QuestionReader,
    frame,
)
from supervisor.network.pool import MAX_NAMES, Pool
from supervisor.network.reasons import NetworkRefusal, Reason
from supervisor.network.rules import Rules, parse_rules
from tests.supervisor.network import dnsclient as dns

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, BADVERS = 0, 1, 2, 3, 4, 16
RULES = parse_rules(["a.test", "*.b.test:5432", "db", "!no.b.test:5432"])
REVERSE_V6 = f"2.{'0.' * 19}f.6.8.6.4.6.e.6.a.5.d.f.ip6.arpa"
LONGEST = f"{'.'.join(['a' * 61] * 4)}.test"


def ask(
    packet: bytes, rules: Rules = RULES, server: NameServer | None = None
) -> tuple[DnsAnswer, dns.Reply]:
    """Return the answer to a packet, and what a client reads in it."""
    answer = (server or NameServer(Pool())).answer(packet, rules, 0.0)
    assert answer.packet is not None
    assert len(answer.packet) <= MAX_ANSWER_BYTES
    reply = dns.read(answer.packet)
    assert reply.flags & 0x8080 == 0x8080  # a response; recursion is available
    assert not reply.flags & 0x0200  # never truncated
    assert reply.id == int.from_bytes(packet[:2], "big")
    return answer, reply


# spec NET5: A and AAAA out of the pool, 60 s, the same for the child's life.
@pytest.mark.parametrize("name", ["a.test", "x.b.test", "y.x.b.test", "db"])
def test_a_granted_name_has_addresses(name: str) -> None:
    server = NameServer(Pool(["first.test"]))
    for _ in range(2):
        answer, reply = ask(dns.question(name), server=server)
        assert reply.code == NOERROR
        assert reply.texts == ["198.18.0.3"]
        (record,) = reply.answers
        assert record == (name.encode(), dns.A, 1, 60, record.data)
        assert answer.refused is None
        assert answer.name == name
        _, reply = ask(dns.question(name, dns.AAAA), server=server)
        assert reply.texts == ["fd5a:6e64:686f::3"]


def test_without_v6_a_name_has_no_v6_address() -> None:
    server = NameServer(Pool(), has_v6=False)
    for name in ("a.test", "localhost"):
        _, reply = ask(dns.question(name, dns.AAAA), server=server)
        assert (reply.code, reply.answers) == (NOERROR, ())


# spec NET5, NET11: any other name does not exist, and is told.
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("evil.test", NetworkRefusal(Reason.NO_RULE, "evil.test:443")),
        ("b.test", NetworkRefusal(Reason.NO_RULE, "b.test:443")),
        ("a.test.evil", NetworkRefusal(Reason.NO_RULE, "a.test.evil:443")),
        ("no.b.test", NetworkRefusal(Reason.REFUSED_BY_RULE, "!no.b.test:5432")),
        ("a.localhost.test", NetworkRefusal(Reason.NO_RULE, "a.localhost.test:443")),
        ("10.0.0.1", NetworkRefusal(Reason.NO_RULE)),
    ],
)
@pytest.mark.parametrize("kind", [dns.A, dns.AAAA, dns.TXT, dns.HTTPS, dns.ANY])
def test_another_name_does_not_exist(
    name: str, refused: NetworkRefusal, kind: int
) -> None:
    pool = Pool()
    answer, reply = ask(dns.question(name, kind), server=NameServer(pool))
    assert (reply.code, reply.answers) == (NXDOMAIN, ())
    assert (answer.name, answer.refused) == (name, refused)
    assert not pool.names()


# spec NET5: names of one label, and other PTR, are not told.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("wpad", dns.A),
        ("", dns.A),
        ("", 2),
        ("1.0.0.127.in-addr.arpa", dns.PTR),
        ("4.3.2.1.in-addr.arpa", dns.PTR),
        ("300.3.2.1.in-addr.arpa", dns.PTR),
        ("1.in-addr.arpa", dns.PTR),
        (f"{'0.' * 32}ip6.arpa", dns.PTR),
        ("evil.test", dns.PTR),
    ],
)
def test_what_is_not_told(name: str, kind: int) -> None:
    answer, reply = ask(dns.question(name, kind))
    assert (reply.code, reply.answers) == (NXDOMAIN, ())
    assert answer.refused is None


# spec NET5: HTTPS, SVCB, MX, TXT and all other types have no data.
@pytest.mark.parametrize(
    "kind",
    [2, 5, 6, dns.PTR, dns.MX, dns.TXT, 33, dns.SVCB, dns.HTTPS, dns.ANY, 0, 65535],
)
def test_other_types_of_a_granted_name_have_no_data(kind: int) -> None:
    pool = Pool()
    answer, reply = ask(dns.question("a.test", kind), server=NameServer(pool))
    assert (reply.code, reply.answers, answer.refused) == (NOERROR, (), None)
    assert not pool.names()


# spec NET5
@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "x.y.localhost"])
def test_localhost_is_the_loopback(name: str) -> None:
    assert ask(dns.question(name))[1].texts == ["127.0.0.1"]
    assert ask(dns.question(name, dns.AAAA))[1].texts == ["::1"]
    assert ask(dns.question(name, dns.TXT))[1].answers == ()


# spec NET5: PTR of a pool's address is its name, as long as that is granted.
@pytest.mark.parametrize(
    "name",
    [
        "2.0.18.198.in-addr.arpa",
        "2.0.18.198.IN-ADDR.arpa",
        REVERSE_V6,
    ],
)
def test_an_address_of_the_pool_has_its_name(name: str) -> None:
    server = NameServer(Pool(["x.b.test"]))
    _, reply = ask(dns.question(name, dns.PTR), server=server)
    assert (reply.code, reply.texts) == (NOERROR, ["x.b.test"])
    _, reply = ask(dns.question(name, dns.PTR), parse_rules(["a.test"]), server)
    assert reply.code == NXDOMAIN


# spec NET5: 4,096 names a child.
def test_when_the_pool_is_full_a_name_fails_and_is_told() -> None:
    server = NameServer(Pool(f"n{number}.test" for number in range(MAX_NAMES)))
    answer, reply = ask(dns.question("a.test"), server=server)
    assert (reply.code, reply.answers) == (SERVFAIL, ())
    assert answer.refused == NetworkRefusal(Reason.TOO_MANY_NAMES)
    everything = parse_rules(["*"])
    assert ask(dns.question("n7.test"), everything, server)[1].texts == ["198.18.0.9"]


# spec NET5: echoed byte for byte.
def test_the_question_is_echoed_as_it_was_written() -> None:
    packet = dns.question("A.tEsT")
    answer, reply = ask(packet)
    assert reply.question == packet[12:]
    assert reply.texts == ["198.18.0.2"]
    assert reply.answers[0].name == b"A.tEsT"
    assert answer.name == "a.test"
    packet = dns.question("EviL.test")
    assert ask(packet)[1].question == packet[12:]


# spec NET5: a label with a dot in it is not two labels.
@pytest.mark.parametrize(
    ("wire", "shown"),
    [
        (b"\6a.test\0", "a\\046test"),
        (b"\3a\0b\4test\0", "a\\000b.test"),
        (b"\2\xff\x0a\4test\0", "\\255\\010.test"),
        (b"\2a \1b\4test\0", "a\\032.b.test"),
        (b"\1*\1b\4test\0", "*.b.test"),
        (b"\x022-\1b\4test\0", "2-.b.test"),
    ],
)
def test_odd_bytes_are_no_name_of_a_rule(wire: bytes, shown: str) -> None:
    answer, reply = ask(dns.question(wire), parse_rules(["*", "*.b.test", "a.test"]))
    assert reply.code == NXDOMAIN
    assert answer.name == shown
    assert answer.name.isprintable()


# spec NET5: EDNS is answered.
def test_edns_is_answered() -> None:
    packet = dns.with_edns(dns.question("a.test"), ttl=0x8000, data=b"\0\x0a\0\2hi")
    _, reply = ask(packet)
    (opt,) = reply.others
    assert (opt.name, opt.type, opt.cls, opt.ttl) == (b"", dns.OPT, 1232, 0x8000)
    assert reply.texts == ["198.18.0.2"]
    assert ask(dns.question("a.test"))[1].others == ()
    _, reply = ask(dns.with_edns(dns.question("a.test"), ttl=1 << 16))
    assert (reply.code, reply.answers) == (BADVERS, ())


# spec NET5: other opcodes NOTIMP.
@pytest.mark.parametrize("opcode", [1, 2, 4, 5, 6, 15])
def test_another_opcode_is_not_implemented(opcode: int) -> None:
    _, reply = ask(dns.question("a.test", flags=opcode << 11))
    assert reply.code == NOTIMP
    assert reply.flags >> 11 & 0xF == opcode


@pytest.mark.parametrize("cls", [0, 3, 4, 254, 255])
def test_another_class_is_not_implemented(cls: int) -> None:
    assert ask(dns.question("a.test", cls=cls))[1].code == NOTIMP


def test_flags_of_the_client_come_back() -> None:
    assert ask(dns.question("a.test", flags=0x0110))[1].flags == 0x8190
    assert ask(dns.question("a.test", flags=0))[1].flags == 0x8080


GOOD = dns.question("a.test")
EDNS = dns.with_edns(GOOD)


def counted(packet: bytes, *counts: int) -> bytes:
    """Return a packet whose header counts other things."""
    return packet[:4] + struct.pack("!4H", *counts) + packet[12:]


# spec NET5: malformed FORMERR.
@pytest.mark.parametrize(
    "packet",
    [
        GOOD[:12],
        *(GOOD[:size] for size in range(13, len(GOOD))),
        GOOD + b"\0",
        counted(GOOD, 0, 0, 0, 0),
        counted(GOOD, 2, 0, 0, 0),
        counted(GOOD + GOOD[12:], 2, 0, 0, 0),
        counted(GOOD, 1, 1, 0, 0),
        counted(GOOD, 1, 0, 1, 0),
        counted(GOOD, 1, 0, 0, 1),
        counted(GOOD, 1, 0, 0, 65535),
        dns.question(b"\xc0\x0c"),
        dns.question(b"\1a\xc0\x0c"),
        dns.question(b"\x40" + b"a" * 64 + b"\0"),
        dns.question(b"\x80a\0"),
        dns.question((b"\1a" * 127) + b"\1b\0"),
        *(EDNS[:size] for size in range(len(GOOD) + 1, len(EDNS))),
        dns.with_edns(EDNS),
        counted(GOOD + b"\1x\0" + EDNS[len(GOOD) + 1 :], 1, 0, 0, 1),
        dns.with_edns(GOOD, data=b"abc")[:-1],
    ],
)
def test_a_packet_of_another_form_is_a_format_error(packet: bytes) -> None:
    _, reply = ask(packet)
    assert (reply.code, reply.question) == (FORMERR, b"")


# spec NET5: or nothing.
@pytest.mark.parametrize(
    "packet",
    [
        *(GOOD[:size] for size in range(12)),
        dns.question("a.test", flags=0x8000),
        GOOD + bytes(MAX_QUESTION_BYTES),
    ],
)
def test_what_is_no_question_is_not_answered(packet: bytes) -> None:
    assert NameServer(Pool()).answer(packet, RULES, 0.0) == DnsAnswer(None)


def test_records_beside_a_question_are_passed_over() -> None:
    signed = GOOD + b"\xc0\x0c" + struct.pack("!2HIH", 250, 255, 0, 3) + b"sig"
    assert ask(counted(signed, 1, 0, 0, 1))[1].texts == ["198.18.0.2"]
    packet = dns.with_edns(counted(signed, 1, 0, 0, 1))
    assert ask(packet)[1].others[0].type == dns.OPT


# spec NET5: no answer is truncated, for none is longer than what UDP always takes.
def test_the_longest_name_fits_into_an_answer() -> None:
    assert len(LONGEST) == 252
    rules = parse_rules([LONGEST])
    server = NameServer(Pool([LONGEST]))
    for kind in (dns.A, dns.AAAA):
        packet = dns.with_edns(dns.question(LONGEST, kind))
        _, reply = ask(packet, rules, server)
        assert len(reply.answers) == 1
    _, reply = ask(dns.with_edns(dns.question(REVERSE_V6, dns.PTR)), rules, server)
    assert reply.texts == [LONGEST]


# spec NET5: 1,000 questions a second, 400 at once; the rest is dropped.
def test_questions_beyond_the_rate_are_dropped() -> None:
    server = NameServer(Pool())

    def answered(count: int, now_s: float) -> int:
        answers = [server.answer(GOOD, RULES, now_s).packet for _ in range(count)]
        return sum(packet is not None for packet in answers)

    assert answered(1000, 5.0) == 400
    assert answered(1000, 5.125) == 125
    assert answered(1, 5.125) == 0
    assert answered(1000, 99.0) == 400


# spec NET5: TCP takes pipelined questions, however the stream is cut.
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_stream_is_cut_into_its_questions(size: int) -> None:
    packets = [GOOD, EDNS, dns.question(LONGEST), GOOD]
    stream = b"".join(map(frame, packets))
    reader = QuestionReader()
    found = []
    for at in range(0, len(stream), size):
        reader.receive(stream[at : at + size])
        while (packet := reader.next_question()) is not None:
            found.append(packet)
    assert found == packets


@pytest.mark.parametrize("size", [0, 11, MAX_QUESTION_BYTES + 1, 65535])
def test_a_length_that_no_question_has_ends_the_stream(size: int) -> None:
    reader = QuestionReader()
    reader.receive(size.to_bytes(2, "big"))
    with pytest.raises(ValueError, match=f"{size} bytes"):
        reader.next_question()
