"""A nested child has at most what its parent has; a running child's rules change."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from supervisor.network.addresses import judge
from supervisor.network.hosts import Address
from supervisor.network.reasons import NetworkRefusal, Reason
from supervisor.network.rule import Rule, RuleError, parse_rule, rule_for
from supervisor.network.rule_changes import change, narrow
from supervisor.network.rules import Grant, Rules, parse_rules
from tests.supervisor.network.strategies import ADDRESSES, NAMES, PORTS, rule_lists

HOSTS = (*NAMES, *ADDRESSES)
OWN = frozenset(ADDRESSES[::3])


def decide(rules: Rules, host: str | Address, port: int) -> Grant | NetworkRefusal:
    """Return what rules say of a name or an address."""
    if isinstance(host, str):
        return rules.decide(host, port)
    return rules.decide_address(host, port)


def rights(rules: Rules) -> frozenset[tuple[object, ...]]:
    """Return all that rules allow: what may be connected to, and what it may be for."""
    found: set[tuple[object, ...]] = set()
    for host, port in itertools.product(HOSTS, PORTS):
        grant = decide(rules, host, port)
        if isinstance(grant, Grant):
            found |= {(host, port, right) for right in rights_of(rules, host, grant)}
    return frozenset(found)


def rights_of(rules: Rules, host: str | Address, grant: Grant) -> Iterator[object]:
    """Yield the addresses and the names that one connection may be for."""
    for answer in ADDRESSES if isinstance(host, str) else [host]:
        if judge([answer], grant.opening(), OWN) is None:
            yield answer
    if not grant.checks_tls:
        yield "any TLS or none"
    for name in NAMES:
        if not grant.checks_tls or rules.check_sni(grant, name) is None:
            yield name


# spec NET2
@pytest.mark.slow
@given(rule_lists, st.data())
def test_narrowed_rules_allow_nothing_that_the_parents_do_not(
    parents: list[Rule], data: st.DataObject
) -> None:
    parent = Rules(parents)
    rules = parent
    for _ in range(2):  # a child of a child as well
        asked = [rule for rule in data.draw(rule_lists) if _is_granted_by(rules, rule)]
        rules = narrow(rules, asked)
        event(f"granted {min(3, sum(not rule.is_refusal for rule in asked))}")
        assert rights(rules) <= rights(parent)


def _is_granted_by(parent: Rules, rule: Rule) -> bool:
    with contextlib.suppress(RuleError):
        narrow(parent, [rule])
        return True
    return False


# spec NET2: what a parent has, its child can be given.
@pytest.mark.slow
@given(rule_lists)
def test_a_child_can_have_what_its_parent_has(parents: list[Rule]) -> None:
    parent = Rules(parents)
    asked = [rule for rule in parents if _is_granted_by(parent, rule)]
    assert rights(narrow(parent, asked)) == rights(parent)


# spec NET2: the rule that the parent lacks is named, and what it lacks of it.
# attack 62
@pytest.mark.parametrize(
    ("parent", "asked", "reason"),
    [
        ([], "a.test", "no rule for port 443"),
        (["a.test"], "a.test:443,80", "no rule for port 80"),
        (["a.test"], "x.a.test", "no rule"),
        (["*.a.test"], "a.test", "no rule"),
        (["*.a.test"], "*", "no rule"),
        (["*.x.a.test"], "*.a.test", "no rule"),
        (["*"], "10.0.0.1", "no rule"),
        (["0.0.0.0/0"], "a.test", "no rule"),
        (["10.0.0.0/9", "10.128.0.0/9"], "10.0.0.0/8", "no rule"),
        (["a.test"], "a.test@private", "without private"),
        (["a.test"], "a.test@tls=any", "without tls=any"),
        (["*:22@tls=sni"], "a.test:22", "without tls=any"),
        (["*", "!evil.test"], "evil.test", "'!evil.test' refuses it"),
        (["*", "!*.test"], "*.a.test", "'!*.test' refuses it"),
        (["a.test:80,443", "!*:80", "!a.test"], "a.test:80,443", "'!*:80' refuses it"),
        (["10.0.0.0/8", "!10.0.0.0/16"], "10.0.0.1", "refuses it"),
    ],
)
def test_what_the_parent_lacks_is_refused_by_name(
    parent: list[str], asked: str, reason: str
) -> None:
    with pytest.raises(
        RuleError, match=f"cannot allow '{asked.replace('*', '.')}'"
    ) as (caught):
        narrow(parse_rules(parent), map(parse_rule, ["!z.test", asked]))
    assert reason in str(caught.value)
    assert len(str(caught.value)) <= 160


# spec NET2
@pytest.mark.parametrize(
    ("parent", "asked"),
    [
        (["*"], "a.test"),
        (["*"], "*.a.test"),
        (["*.a.test"], "*.x.a.test"),
        (["a.test", "a.test:80"], "a.test:80,443"),
        (["*@private", "a.test@tls=any"], "a.test@private,tls=any"),
        (["*:22"], "a.test:22@tls=sni"),
        (["10.0.0.0/8"], "10.1.0.0/16"),
        (["10.0.0.0/8", "10.0.0.0/8@private"], "10.1.2.3@private,tls=any"),
        (["a.test:80,443", "!a.test:80"], "a.test:80,443"),
        (["[2001:db8::/32]"], "[2001:db8::1]"),
    ],
)
def test_what_the_parent_covers_is_granted(parent: list[str], asked: str) -> None:
    rules = narrow(parse_rules(parent), [parse_rule(asked)])
    assert rules.texts()[0] == asked


def test_a_parents_refusals_stay_in_force() -> None:
    parent = parse_rules(["*", "!evil.test"])
    rules = narrow(parent, [parse_rule("*.test"), parse_rule("!b.test")])
    by_rule = NetworkRefusal(Reason.REFUSED_BY_RULE, "!evil.test")
    assert rules.decide("evil.test", 443) == by_rule
    assert isinstance(rules.decide("b.test", 443), NetworkRefusal)
    assert isinstance(rules.decide("a.test", 443), Grant)
    deeper = narrow(rules, [parse_rule("a.test")])
    assert deeper.texts() == ("a.test", "!b.test", "!evil.test")


# spec NET2, NET3: a part opens no more than the whole does.
# attack 58
def test_an_address_cut_from_a_wide_network_opens_no_private_range() -> None:
    parent = parse_rules(["0.0.0.0/0", "10.0.0.0/8:80"])
    rules = narrow(parent, [parse_rule("10.1.2.3:80,443")])
    address = ADDRESSES[0]
    assert str(address) == "10.1.2.3"
    reasons = {}
    for port in (80, 443):
        grant = rules.decide_address(address, port)
        assert isinstance(grant, Grant)
        reasons[port] = judge([address], grant.opening(), frozenset())
    assert reasons == {80: None, 443: Reason.PRIVATE_ADDRESS}
    grant = rules.decide_address(address, 80)
    assert isinstance(grant, Grant)
    assert judge([address], grant.opening(), {address}) is Reason.OWN_ADDRESS


# spec NET2, NET3: of several networks that cover it, the smallest says what it opens.
def test_an_address_cut_from_several_networks_opens_what_the_smallest_does() -> None:
    parent = parse_rules(["10.1.0.0/16", "0.0.0.0/0", "10.0.0.0/8"])
    rules = narrow(parent, [parse_rule("10.1.2.3")])
    assert [rule.cut_from for rule in rules] == [parse_rule("10.1.0.0/16").target]
    assert rights(rules) <= rights(parent)
    same = narrow(parent, [parse_rule("10.1.0.0/16")])
    assert [rule.cut_from for rule in same] == [None]


def texts(rules: Rules) -> list[str]:
    """Return the canonical forms of rules."""
    return [str(rule) for rule in rules]


# spec NET12
@pytest.mark.parametrize(
    ("before", "allow", "deny", "after"),
    [
        ([], ["a.test"], [], ["a.test:443"]),
        (["!a.test"], ["a.test"], [], ["a.test:443"]),
        (["!a.test:80,443"], ["a.test"], [], ["!a.test:80", "a.test:443"]),
        (["a.test", "b.test"], [], ["a.test"], ["b.test:443", "!a.test:443"]),
        (["a.test@tls=any"], [], ["a.test"], ["!a.test:443"]),
        (
            ["a.test:80,443@tls=any"],
            [],
            ["a.test:443@private"],
            ["a.test:80", "!a.test:443"],
        ),
        (["*.test"], [], ["a.test"], ["*.test:443", "!a.test:443"]),
        (
            ["!10.0.0.0/8"],
            ["10.0.0.0/8"],
            ["10.1.0.0/16"],
            ["10.0.0.0/8:443", "!10.1.0.0/16:443"],
        ),
        (["a.test"], ["a.test@private"], [], ["a.test:443", "a.test:443@private"]),
        (["a.test"], ["a.test"], ["b.test"], ["a.test:443", "!b.test:443"]),
    ],
)
def test_rules_of_a_running_child_change(
    before: list[str], allow: list[str], deny: list[str], after: list[str]
) -> None:
    rules = parse_rules(before)
    changed = change(rules, [*map(parse_rule, allow)], [*map(parse_rule, deny)])
    assert texts(changed) == after
    assert rules == parse_rules(before)


# spec NET12: what was denied and is allowed again is as it was before.
def test_a_rule_that_is_denied_and_allowed_again_has_no_more_than_it_is_given() -> None:
    rules = parse_rules(["a.test@private,tls=any"])
    denied = change(rules, [], [parse_rule("a.test")])
    again = change(denied, [parse_rule("a.test")], [])
    assert texts(again) == ["a.test:443"]


# spec NET12: nothing is changed without effect.
@pytest.mark.parametrize(
    ("allow", "deny", "reason"),
    [
        (["!a.test"], [], "deny the rule without it"),
        ([], ["!a.test"], "deny the rule without it"),
        (["a.test"], ["a.test:443,80"], "denied in the same change"),
        (["a.test"], ["*.test"], "'!*.test:443' refuses it; allow '*.test'"),
    ],
)
def test_a_change_that_cannot_be_had_is_refused(
    allow: list[str], deny: list[str], reason: str
) -> None:
    rules = parse_rules(["b.test"])
    with pytest.raises(RuleError) as caught:
        change(rules, [*map(parse_rule, allow)], [*map(parse_rule, deny)])
    assert reason in str(caught.value)
    assert len(str(caught.value)) <= 160


# spec NET12: what is denied is refused from then on, whatever it was allowed by.
@pytest.mark.slow
@given(rule_lists, rule_lists, rule_lists)
def test_a_denied_rule_is_refused(
    first: list[Rule], allow: list[Rule], deny: list[Rule]
) -> None:
    allow = [rule for rule in allow if not rule.is_refusal]
    deny = [rule for rule in deny if not rule.is_refusal]
    try:
        changed = change(Rules(first), allow, deny)
    except RuleError:
        return
    event("changed")
    for rule in deny:
        hosts = [host for host in HOSTS if rule.covers(rule_for(host, 1).target)]
        for host, port in itertools.product(hosts, rule.ports):
            assert isinstance(decide(changed, host, port), NetworkRefusal)
