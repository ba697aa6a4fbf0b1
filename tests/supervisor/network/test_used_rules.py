"""The used part of a bound is the smallest list that would have sufficed."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.network.rules import Grant, Rules
from supervisor.network.used_rules import MAX_USES, UsedRules
from tests.supervisor.network.strategies import ADDRESSES, NAMES, PORTS

USES = st.lists(
    st.tuples(
        st.sampled_from((*NAMES, *ADDRESSES)),
        st.sampled_from(PORTS),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
)


# spec NET13
def test_the_ports_of_a_host_share_a_rule() -> None:
    learned = UsedRules()
    for name, port in [
        ("b.test", 443),
        ("a.test", 80),
        ("a.test", 443),
        ("a.test", 80),
    ]:
        learned.add(name, port)
    learned.add(IPv4Address("10.0.0.5"), 5432, private=True)
    learned.add(IPv6Address("2001:db8::1"), 443, any_tls=True)
    assert [str(rule) for rule in learned.rules()] == [
        "10.0.0.5:5432",
        "[2001:db8::1]:443",
        "a.test:80,443",
        "b.test:443",
    ]


# spec NET13
def test_options_that_were_needed_are_in_the_list() -> None:
    learned = UsedRules()
    learned.add("git.test", 443, any_tls=True)
    learned.add("git.test", 443)
    learned.add("git.test", 80, any_tls=True)
    learned.add("db.test", 5432, private=True)
    learned.add("db.test", 80)
    assert [str(rule) for rule in learned.rules()] == [
        "db.test:5432@private",
        "db.test:80",
        "git.test:80,443@tls=any",
    ]


# spec NET13: it suffices, and allows nothing else.
@pytest.mark.slow
@given(USES)
def test_the_list_allows_what_was_used_and_nothing_else(
    uses: list[tuple[str | IPv4Address | IPv6Address, int, bool, bool]],
) -> None:
    learned = UsedRules()
    for host, port, private, any_tls in uses:
        learned.add(host, port, private=private, any_tls=any_tls)
    rules = Rules(learned.rules())
    used = {(host, port) for host, port, _, _ in uses}
    for host in (*NAMES, *ADDRESSES):
        for port in PORTS:
            if isinstance(host, str):
                decision = rules.decide(host, port)
            else:
                decision = rules.decide_address(host, port)
            assert isinstance(decision, Grant) is ((host, port) in used)
            if not isinstance(decision, Grant) or not isinstance(host, str):
                continue
            mine = [use for use in uses if use[:2] == (host, port)]
            assert decision.opening().private is any(use[2] for use in mine)
            needs_any = port != 443 or any(use[3] for use in mine)
            assert decision.checks_tls is not needs_any


@pytest.mark.slow
def test_there_is_a_bound_to_what_is_noted() -> None:
    learned = UsedRules()
    for number in range(MAX_USES + 2):
        learned.add(IPv4Address(number), 80)
    learned.add(IPv4Address(0), 80)
    assert len(learned.rules()) == MAX_USES
    assert learned.left_out == 2
