"""The network of a nested child is a part of its parent's."""

import pytest

from supervisor.network.rule import RuleError
from supervisor.network.settings import nested_settings

PARENT = "a.example:80,443 *.b.example:443@private !x.b.example:443"


# spec NET2: what it asks for, with its parent's refusals, by its parent's addresses.
def test_a_nested_child_has_a_part_of_its_parents_rules() -> None:
    settings = nested_settings(["a.example:80", "c.b.example@private"], PARENT)
    assert settings.mode == "rules"
    assert settings.outer_pool
    assert [*map(str, settings.rules)] == [
        "a.example:80",
        "c.b.example:443@private",
        "!x.b.example:443",
    ]


# spec NET2: a rule or an option that the parent lacks is refused by name.
# attack 62
@pytest.mark.parametrize(
    ("rule", "parent"),
    [
        ("c.example", PARENT),
        ("a.example:8080", PARENT),
        ("a.example@private", PARENT),
        ("a.example@tls=any", PARENT),
        ("x.b.example", PARENT),
        ("a.example", ""),
        ("http://a.example", "host"),
        ("127.0.0.1:80", "host"),
        ("198.18.0.7", "host"),
        ("localhost:80", "host"),
        ("api.test.sandhost:80", "host"),
        ("127.0.0.1:80", "0.0.0.0/0:80"),
    ],
)
def test_a_rule_that_the_parent_lacks_is_refused_by_name(
    rule: str, parent: str
) -> None:
    with pytest.raises(RuleError) as refused:
        nested_settings([rule], parent)
    assert f"'{rule}'" in str(refused.value)


# spec NET2, NET15: a nested child has a credential of its parent.
def test_a_nested_child_has_a_credential_of_its_parent() -> None:
    rule = "api.test.sandhost:80"
    assert [*map(str, nested_settings([rule], f"a.example:443 {rule}").rules)] == [rule]


# spec NET2: a child with the host's network may leave any part of it.
def test_a_child_with_the_hosts_network_leaves_what_it_wants() -> None:
    settings = nested_settings(["a.example"], "host")
    assert [*map(str, settings.rules)] == ["a.example:443"]
    assert not settings.outer_pool
