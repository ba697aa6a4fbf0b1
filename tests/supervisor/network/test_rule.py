"""The grammar of rules, and the one form in which rules are compared."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.network.rule import MAX_RULE_LENGTH, Rule, RuleError, parse_rule
from tests.supervisor.network.strategies import rules


# spec NET1
@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("index.test", "index.test:443"),
        ("Index.Test.", "index.test:443"),
        ("index.test:443@tls=sni", "index.test:443"),
        ("a.test:80,443,80", "a.test:80,443"),
        ("a.test:8080,22", "a.test:22,8080"),
        ("*.a.test", "*.a.test:443"),
        ("*.A.TEST.:1", "*.a.test:1"),
        ("*", "*:443"),
        ("!*:65535", "!*:65535"),
        ("!a.test", "!a.test:443"),
        ("straße.de", "xn--strae-oqa.de:443"),
        ("*.Bücher.example", "*.xn--bcher-kva.example:443"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example:443"),
        ("_acme.my_bucket.test:80", "_acme.my_bucket.test:80"),
        ("db", "db:443"),
        ("a.test@private", "a.test:443@private"),
        ("a.test:80,443@tls=any,private", "a.test:80,443@private,tls=any"),
        ("a.test:80@tls=any", "a.test:80"),
        ("a.test:22@private,tls=sni", "a.test:22@private,tls=sni"),
        ("10.0.0.5", "10.0.0.5:443"),
        ("10.0.0.5/32:80", "10.0.0.5:80"),
        ("0.0.0.0/0:443", "0.0.0.0/0:443"),
        ("10.0.0.0/8@private,tls=any", "10.0.0.0/8:443@private"),
        ("[2001:DB8::1]", "[2001:db8::1]:443"),
        ("[2001:db8::]/32", "[2001:db8::/32]:443"),
        ("[2001:db8::/32]:80", "[2001:db8::/32]:80"),
        ("![::]/0:80,81", "![::/0]:80,81"),
        ("[64:ff9b::1.2.3.4/128]", "[64:ff9b::102:304]:443"),
    ],
)
def test_a_rule_has_one_form(text: str, canonical: str) -> None:
    rule = parse_rule(text)
    assert str(rule) == canonical
    assert rule.written == text
    assert parse_rule(canonical) == rule


# spec NET1: a rule that is refused is named, and what is wrong with it.
# attack 58
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "name is missing"),
        ("!", "name is missing"),
        (".", "no address"),
        ("*.", "name is missing"),
        (":443", "name is missing"),
        ("a..test", "label"),
        ("a.test..", "label"),
        ("-a.test", "label"),
        ("a-.test", "label"),
        ("a b.test", "label"),
        (" a.test", "label"),
        ("a.test\n", "label"),
        ("a\0.test", "label"),
        (f"{'a' * 64}.test", "label"),
        (".".join(["a" * 50] * 5), "longer than 253"),
        ("!!a.test", "label"),
        # ports
        ("a.test:0", "no port"),
        ("a.test:65536", "no port"),
        ("a.test:99999", "no port"),
        ("a.test:*", "'*' is no port"),
        ("a.test:1-9", "'1-9' is no port"),
        ("a.test:", "no port"),
        ("a.test:80,", "no port"),
        ("a.test:080", "no port"),
        ("a.test:+80", "no port"),
        ("a.test:\uff18\uff10", "no port"),
        ("a.test:80:90", "no port"),
        ("a.test:https", "no port"),
        # options
        ("a.test@", "no option"),
        ("a.test@tls", "no option"),
        ("a.test@Private", "no option"),
        ("a.test@private,", "no option"),
        ("jo@a.test", "no option"),
        ("a.test@private,private", "given twice"),
        ("a.test@tls=any,tls=sni", "given twice"),
        ("!a.test@private", "has no options"),
        ("10.0.0.5@tls=sni", "has no name"),
        # wildcards
        ("a.*.b", "first label"),
        ("*a.test", "first label"),
        ("*.*.test", "first label"),
        ("**", "first label"),
        ("*.10.0.0.1", "dotted decimal"),
        # addresses
        ("10.0.0.1/8", "write 10.0.0.0/8"),
        ("[2001:db8::1]/32", "write [2001:db8::/32]"),
        ("[2001:db8::1/32]", "write [2001:db8::/32]"),
        ("10.0.0.0/33", "length"),
        ("10.0.0.0/08", "length"),
        ("10.0.0.0/", "length"),
        ("10.0.0.0/255.0.0.0", "length"),
        ("[2001:db8::]/129", "length"),
        ("[2001:db8::/32]/32", "two lengths"),
        ("[fe80::1%lo]", "zone"),
        ("fe80::1%lo", "brackets"),
        ("2130706433", "dotted decimal"),
        ("0177.0.0.1", "dotted decimal"),
        ("0x7f.1", "dotted decimal"),
        ("0x7f000001", "dotted decimal"),
        ("10.5", "dotted decimal"),
        ("1.2.3.256", "dotted decimal"),
        ("1.2.3.4.5", "dotted decimal"),
        ("127.0.0.1.", "dotted decimal"),
        ("a.0x7", "dotted decimal"),
        ("\uff11\uff12\uff17.0.0.1", "dotted decimal"),
        ("::1", "brackets"),
        ("2001:db8::1", "brackets"),
        ("2001:db8::/32", "brackets"),
        ("[::1", "no v6 address"),
        ("[::1]x", "no v6 address"),
        ("[1.2.3.4]", "no v6 address"),
        ("[a.test]", "no v6 address"),
        ("[]", "no v6 address"),
        ("[::ffff:10.0.0.5]", "dotted decimal"),
        # URLs
        ("https://a.test", "URL"),
        ("http://a.test:80/b", "URL"),
        ("a.test/b", "path"),
        ("a.test:80/b", "no port"),
        ("\u2028.test", "IDNA"),
        ("a\u200bb\uff0fc.test", "IDNA"),
        ("x" * (MAX_RULE_LENGTH + 1), "longer than 1024"),
    ],
)
def test_a_rule_that_cannot_be_read_is_told_with_its_fault(
    text: str, reason: str
) -> None:
    with pytest.raises(RuleError, match=re.escape(reason)) as caught:
        parse_rule(text)
    message = str(caught.value)
    assert message.startswith("cannot read the rule '")
    assert message.isprintable()
    assert len(message) <= 160
    if len(text) <= 48 and text.isprintable():
        assert f"'{text}'" in message


# spec NET1
@given(rules())
def test_the_canonical_form_says_the_same(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule


@given(st.text(st.sampled_from("a.*:@!,/[]%0159xtesprivanl=-_ß\0\u3002 ")))
def test_any_text_is_a_rule_or_has_a_fault(text: str) -> None:
    try:
        rule = parse_rule(text)
    except RuleError as why:
        assert len(str(why)) <= 160  # noqa: PT017 - most texts are none
    else:
        assert parse_rule(str(rule)) == rule


# spec NET1: any depth below, and not the name itself.
@pytest.mark.parametrize(
    ("wide", "name", "is_covered"),
    [
        ("a.test", "a.test", True),
        ("a.test", "x.a.test", False),
        ("*.a.test", "a.test", False),
        ("*.a.test", "x.a.test", True),
        ("*.a.test", "z.y.x.a.test", True),
        ("*.a.test", "xa.test", False),
        ("*.a.test", "a.test.evil", False),
        ("*", "anything", True),
        ("10.0.0.0/8", "a.test", False),
        ("*", "10.0.0.1", False),
        ("10.0.0.0/8", "10.0.0.1", True),
        ("10.0.0.0/8", "[64:ff9b::10.0.0.1]", False),
        ("[2001:db8::/32]", "[2001:db8:1::/48]", True),
        ("[2001:db8:1::/48]", "[2001:db8::/32]", False),
        ("*.a.test", "*.a.test", True),
        ("*.a.test", "*.x.a.test", True),
        ("*.x.a.test", "*.a.test", False),
        ("*.a.test", "*", False),
        ("*", "*.a.test", True),
    ],
)
def test_a_rule_covers_what_is_below_it(
    wide: str, name: str, *, is_covered: bool
) -> None:
    assert parse_rule(wide).covers(parse_rule(name).target) is is_covered


# spec NET7: on 443 unless the rule says another thing, and never for an address.
@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("a.test:80,443", {443}),
        ("a.test:80,443@tls=any", set()),
        ("a.test:80,443@tls=sni", {80, 443}),
        ("10.0.0.1:80,443", set()),
    ],
)
def test_a_rule_says_where_a_client_hello_is_read(text: str, ports: set[int]) -> None:
    rule = parse_rule(text)
    assert {port for port in rule.ports if rule.checks_tls(port)} == ports


def test_a_rule_on_fewer_ports_keeps_the_options_that_matter_there() -> None:
    rule = parse_rule("a.test:80,443@private,tls=any")
    assert str(rule.on_ports([80])) == "a.test:80@private"
    assert str(rule.on_ports([443])) == "a.test:443@private,tls=any"
    assert str(parse_rule("a.test:80,443@tls=sni").on_ports([443])) == "a.test:443"
    assert rule.on_ports([443, 80]) is rule
