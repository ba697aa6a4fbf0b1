"""Odd packets to the DNS: 5,000 in the short form, 100,000 in the long one."""

import random

import pytest

from supervisor.network.dns import NameServer
from supervisor.network.pool import Pool
from supervisor.network.rules import parse_rules
from tests.helpers.rounds import LONG, SEED
from tests.supervisor.network.odd_packets import RULES, change_question, check_answer

PACKETS = 100_000 if LONG else 5_000


# spec NET5: packets of odd form to the DNS port
# attack 60
@pytest.mark.chaos
def test_no_packet_breaks_the_server_or_gets_more_than_its_name() -> None:
    seed = SEED or random.randrange(1 << 32)
    random_ = random.Random(seed)
    pool = Pool()
    rules = parse_rules([*RULES])
    server = NameServer(pool)
    answered = 0
    for number in range(PACKETS):
        sent = change_question(random_)
        answer = server.answer(sent, rules, float(number))
        if answer.packet is not None:
            answered += 1
            check_answer(sent, answer.packet, f"seed {seed}, packet {sent.hex()}")
    assert answered > PACKETS // 4
    names = set(pool.names())
    assert "a.test" in names
    assert all(name == "a.test" or name.endswith(".b.test") for name in names)
