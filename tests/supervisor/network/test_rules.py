"""Decisions by the table are those of a walk over all rules."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.network.addresses import Opening, held_addresses
from supervisor.network.hosts import Address
from supervisor.network.reasons import NetworkRefusal, Reason
from supervisor.network.rule import Rule, RuleError
from supervisor.network.rules import Grant, Rules, parse_rules
from tests.supervisor.network.strategies import ADDRESSES, NAMES, PORTS, rule_lists


def granted(decision: Grant | NetworkRefusal) -> Grant:
    """Return a decision that allows."""
    assert isinstance(decision, Grant)
    return decision


def matching(
    rules: list[Rule], host: str | Address, port: int, *, refusals: bool
) -> list[Rule]:
    """Return the rules for a host and port, found by looking at each of them."""
    target = (
        host
        if isinstance(host, str)
        else IPv4Network(host)
        if isinstance(host, IPv4Address)
        else IPv6Network(host)
    )
    return [
        rule
        for rule in rules
        if rule.is_refusal is refusals and port in rule.ports and rule.covers(target)
    ]


# spec NET1: refusals win; a right is there if one rule has it.
@pytest.mark.slow
@given(rule_lists, st.sampled_from(NAMES), st.sampled_from(PORTS))
def test_the_table_decides_on_a_name_as_a_walk_does(
    rules: list[Rule], name: str, port: int
) -> None:
    decision = Rules(rules).decide(name, port)
    refusing = matching(rules, name, port, refusals=True)
    allowing = matching(rules, name, port, refusals=False)
    if refusing:
        assert isinstance(decision, NetworkRefusal)
        assert decision.reason is Reason.REFUSED_BY_RULE
        assert decision.rule in [rule.written for rule in refusing]
    elif not allowing:
        assert decision == NetworkRefusal(Reason.NO_RULE, f"{name}:{port}")
    else:
        grant = granted(decision)
        assert set(grant.rules) == set(allowing)
        assert grant.checks_tls is all(rule.checks_tls(port) for rule in allowing)
        assert grant.opening().private is any(rule.private for rule in allowing)


# spec NET1
@pytest.mark.slow
@given(rule_lists, st.sampled_from(ADDRESSES), st.sampled_from(PORTS))
def test_the_table_decides_on_an_address_as_a_walk_does(
    rules: list[Rule], address: Address, port: int
) -> None:
    decision = Rules(rules).decide_address(address, port)
    hosts = (address, *held_addresses(address))
    refusing = [
        rule for host in hosts for rule in matching(rules, host, port, refusals=True)
    ]
    allowing = matching(rules, address, port, refusals=False)
    if refusing:
        assert isinstance(decision, NetworkRefusal)
        assert decision.rule in [rule.written for rule in refusing]
    elif not allowing:
        assert isinstance(decision, NetworkRefusal)
        assert decision.reason is Reason.NO_RULE
    else:
        assert set(granted(decision).rules) == set(allowing)


# spec NET5: DNS knows a name if a connection to one of its ports is allowed.
@pytest.mark.slow
@given(rule_lists, st.sampled_from(NAMES))
def test_a_name_is_known_if_a_port_of_it_is_allowed(
    rules: list[Rule], name: str
) -> None:
    table = Rules(rules)
    is_allowed = any(isinstance(table.decide(name, port), Grant) for port in PORTS)
    assert (table.decide_any_port(name) is None) is is_allowed


def test_what_would_allow_a_name_is_told() -> None:
    rules = parse_rules(["a.test", "!b.test", "!*.c.test:80", "*.c.test:80"])
    assert rules.decide("a.test", 80) == NetworkRefusal(Reason.NO_RULE, "a.test:80")
    assert rules.decide("b.test", 443) == NetworkRefusal(
        Reason.REFUSED_BY_RULE, "!b.test"
    )
    assert rules.decide_any_port("d.test") == NetworkRefusal(
        Reason.NO_RULE, "d.test:443"
    )
    by_rule = NetworkRefusal(Reason.REFUSED_BY_RULE, "!b.test")
    assert rules.decide_any_port("b.test") == by_rule
    by_rule = NetworkRefusal(Reason.REFUSED_BY_RULE, "!*.c.test:80")
    assert rules.decide_any_port("x.c.test") == by_rule
    v6 = IPv6Address("2001:db8::1")
    told = NetworkRefusal(Reason.NO_RULE, "[2001:db8::1]:80")
    assert rules.decide_address(v6, 80) == told


def test_the_most_specific_rule_is_the_one_that_is_told() -> None:
    rules = parse_rules(["*", "*.test", "a.b.test", "*.b.test"])
    grant = granted(rules.decide("a.b.test", 443))
    assert [rule.text for rule in grant.rules] == [
        "a.b.test",
        "*.b.test",
        "*.test",
        "*",
    ]
    rules = parse_rules(["0.0.0.0/0", "10.0.0.5", "10.0.0.0/8"])
    grant = granted(rules.decide_address(IPv4Address("10.0.0.5"), 443))
    assert grant.rule.text == "10.0.0.5"
    assert len(grant.opening().networks) == 3


# spec NET1: each port is a listener.
def test_a_child_has_at_most_64_different_ports() -> None:
    ports = ",".join(map(str, range(1, 65)))
    rules = parse_rules([f"a.test:{ports}", "b.test:64,1", "!c.test:1000"])
    assert rules.ports() == tuple(range(1, 65))
    with pytest.raises(RuleError, match=r"'d\.test:65': a child has at most 64"):
        parse_rules([f"a.test:{ports}", "d.test:65"])
    with pytest.raises(RuleError, match="at most 64") as caught:
        parse_rules([f"a.test:{ports},65"])
    assert len(str(caught.value)) <= 160


def test_a_rule_that_is_given_twice_is_one() -> None:
    rules = parse_rules(["a.test", "A.test:443", "!b.test"])
    assert len(rules) == 2
    assert rules.texts() == ("a.test", "!b.test")
    assert rules == parse_rules(["a.test.", "!b.test:443"])
    assert hash(rules) == hash(parse_rules(["a.test", "!b.test"]))


def test_networks_are_those_that_are_allowed() -> None:
    rules = parse_rules(["10.0.0.0/8", "a.test", "!10.1.0.0/16", "[2001:db8::1]:80"])
    networks = (IPv4Network("10.0.0.0/8"), IPv6Network("2001:db8::1"))
    assert rules.networks() == networks


# spec NET1, NET3: a refused network stands against what a granted name stands for.
def test_an_answer_that_a_rule_refuses_is_found() -> None:
    rules = parse_rules(["*", "!203.0.113.0/24"])
    by_rule = NetworkRefusal(Reason.REFUSED_BY_RULE, "!203.0.113.0/24")
    assert rules.refuse_answer(IPv4Address("203.0.113.9"), 443) == by_rule
    assert rules.refuse_answer(IPv6Address("64:ff9b::cb00:7109"), 443) == by_rule
    assert rules.refuse_answer(IPv4Address("203.0.113.9"), 80) is None
    assert rules.refuse_answer(IPv4Address("203.0.114.9"), 443) is None


# spec NET7: the name itself, or one that the same rule covers.
def test_a_client_hello_may_be_for_what_the_same_rule_covers() -> None:
    rules = parse_rules(["*.a.test", "!bad.a.test", "b.test", "c.test", "c.test:80"])
    grant = granted(rules.decide("x.a.test", 443))
    assert grant.checks_tls
    assert rules.check_sni(grant, "x.a.test") is None
    assert rules.check_sni(grant, "y.a.test") is None
    other = NetworkRefusal(Reason.TLS_OTHER_NAME, "b.test:443")
    assert rules.check_sni(grant, "b.test") == other
    by_rule = NetworkRefusal(Reason.REFUSED_BY_RULE, "!bad.a.test")
    assert rules.check_sni(grant, "bad.a.test") == by_rule
    grant = granted(rules.decide("b.test", 443))
    assert rules.check_sni(grant, "b.test") is None
    other = NetworkRefusal(Reason.TLS_OTHER_NAME, "c.test:443")
    assert rules.check_sni(grant, "c.test") == other
    assert not granted(rules.decide("c.test", 80)).checks_tls


# spec NET7: ssh on 443 needs `tls=any`; a wide rule beside it does not take that away.
def test_one_rule_with_any_tls_is_enough() -> None:
    rules = parse_rules(["*", "*.git.test@tls=any"])
    assert not granted(rules.decide("ssh.git.test", 443)).checks_tls
    assert granted(rules.decide("git.test", 443)).checks_tls


def test_an_outer_pool_is_opened_by_a_setting_alone() -> None:
    grant = granted(parse_rules(["a.test"]).decide("a.test", 443))
    assert grant.opening() == Opening()
    assert grant.opening(outer_pool=True) == Opening(outer_pool=True)
