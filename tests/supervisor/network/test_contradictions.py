"""Rules that cannot mean what they say are told by `check-config`."""

import pytest

from supervisor.network.contradictions import contradictions
from supervisor.network.rule import parse_rule


# spec NET1, NET4
@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["a.test", "!a.test"], "'!a.test' refuses it"),
        (["a.test", "!*.test"], "'!*.test' refuses it"),
        (["*.a.test", "!*.test"], "'!*.test' refuses it"),
        (["a.test:80,443", "!a.test", "!*:80"], "'!a.test' and '!*:80' refuses it"),
        (["10.1.0.0/16", "!10.0.0.0/8"], "'!10.0.0.0/8' refuses it"),
        (["*:80", "!evil.test"], "write port 80, or drop it"),
        (["evil.test:80", "!*"], "write port 80, or drop it"),
        (["127.0.0.1:5432"], "is the child's own loopback"),
        (["127.0.0.0/16:80"], "is the child's own loopback"),
        (["[::1]:80"], "is the child's own loopback"),
        (["0.0.0.0:80"], "is the child itself"),
        (["localhost:80"], "is the child's own loopback"),
        (["db.localhost:80"], "is the child's own loopback"),
        (["*.localhost"], "is the child's own loopback"),
        (["198.18.0.0/15"], "holds the addresses of the child's names"),
        (["198.19.1.1"], "holds the addresses of the child's names"),
        (["[fd5a:6e64:686f::7]"], "holds the addresses of the child's names"),
    ],
)
def test_a_contradiction_is_told_once(texts: list[str], told: str) -> None:
    found = list(contradictions(map(parse_rule, texts)))
    assert len(found) == 1
    assert told in found[0]
    assert found[0].startswith("cannot ")
    assert len(found[0]) <= 160


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["a.test", "!b.test"],
        ["*", "!evil.test"],
        ["*.test", "!*.a.test"],
        ["a.test:80,443", "!a.test:80"],
        ["0.0.0.0/0", "!10.0.0.0/8"],
        ["126.0.0.0/7"],
        ["notlocalhost"],
        ["localhost.test"],
    ],
)
def test_rules_that_only_narrow_each_other_are_none(texts: list[str]) -> None:
    assert not list(contradictions(map(parse_rule, texts)))


def test_long_rules_are_told_in_short() -> None:
    name = ".".join(["a" * 60] * 4)
    texts = [f"{name}:80,443", f"!{name}:80", f"!{name}:443"]
    (found,) = contradictions(map(parse_rule, texts))
    assert len(found) <= 160
