"""The keys of a policy: what they set, and what is told of a value that is none."""

from ipaddress import IPv6Address

import msgspec
import pytest

from supervisor.network.rules import Rules, parse_rules
from supervisor.network.section import NetworkSection
from supervisor.network.settings import (
    NetworkSettings,
    Publication,
    Upstream,
    faults,
    settings_from,
)


def section(**keys: object) -> NetworkSection:
    """Return a section as it is read from a document."""
    return msgspec.convert(keys, NetworkSection)


# spec NET1, NET8, NET10, NET13
@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({}, NetworkSettings()),
        (
            {"network": "none", "publish": ["8000"]},
            NetworkSettings(publish=(Publication(8000),)),
        ),
        ({"network": "host"}, NetworkSettings("host")),
        ({"network": []}, NetworkSettings("rules")),
        (
            {
                "network": ["a.test", "!b.test:80"],
                "publish": ["8000", "18000:8001"],
                "upstream": "http://proxy.test:8080",
                "proxy_env": True,
                "pool": "outer",
            },
            NetworkSettings(
                "rules",
                parse_rules(["a.test", "!b.test:80"]),
                (Publication(8000), Publication(8001, 18000)),
                Upstream("proxy.test", 8080),
                proxy_env=True,
                outer_pool=True,
            ),
        ),
        (
            {"network": "learn", "within": ["*"], "upstream": "http://[2001:db8::1]/"},
            NetworkSettings(
                "learn",
                parse_rules(["*"]),
                upstream=Upstream(IPv6Address("2001:db8::1"), 80),
            ),
        ),
    ],
)
def test_a_section_without_faults_is_what_it_says(
    keys: dict[str, object], settings: NetworkSettings
) -> None:
    assert list(faults(section(**keys))) == []
    assert settings_from(section(**keys)) == settings
    assert isinstance(settings_from(section(**keys)).rules, Rules)


MANY = ["a.test:" + ",".join(map(str, range(1, 66)))]


# spec NET1, NET4, NET10, NET13: each fault is told with its key.
@pytest.mark.parametrize(
    ("keys", "key", "reason"),
    [
        ({"network": ["a.test", "a.*.b"]}, "network", "rule 'a.*.b': * stands alone"),
        ({"network": ["a.test", "!a.test"]}, "network", "'!a.test' refuses it"),
        ({"network": ["127.0.0.1:80"]}, "network", "the child's own loopback"),
        ({"network": MANY}, "network", "at most 64 different ports"),
        ({"network": "learn", "within": ["a:x"]}, "within", "'x' is no port"),
        ({"network": "learn"}, "within", "cannot learn without a bound"),
        ({"network": "none", "within": ["*"]}, "within", "network is not 'learn'"),
        ({"network": ["*"], "within": ["*"]}, "within", "network is not 'learn'"),
        ({"publish": ["http"]}, "publish", "'http': it is no port"),
        ({"publish": ["1:2:3"]}, "publish", "it is no port"),
        ({"publish": [":80"]}, "publish", "it is no port"),
        ({"publish": ["0"]}, "publish", "a port is 1 to 65535"),
        ({"publish": ["65536"]}, "publish", "a port is 1 to 65535"),
        ({"publish": ["0:80"]}, "publish", "a port is 1 to 65535"),
        ({"publish": ["080"]}, "publish", "a port is 1 to 65535"),
        ({"publish": ["9" * 5000]}, "publish", "a port is 1 to 65535"),
        ({"publish": ["8000", "81:8000"]}, "publish", "published already"),
        ({"publish": ["80:8000", "80:8001"]}, "publish", "published already"),
        ({"publish": ["53"]}, "publish", "the host listens on port 53"),
        ({"publish": ["1:3128"]}, "publish", "the host listens on port 3128"),
        ({"network": ["a.test:80"], "publish": ["80"]}, "publish", "grants port 80"),
        (
            {"network": "learn", "within": ["*:80"], "publish": ["1:80"]},
            "publish",
            "grants port 80",
        ),
        ({"network": "host", "publish": ["80"]}, "publish", "listens there itself"),
        (
            {"network": ["*"], "upstream": "https://a.test"},
            "upstream",
            "no http:// URL",
        ),
        ({"network": ["*"], "upstream": "http://u:p@a.test"}, "upstream", "no http://"),
        (
            {"network": ["*"], "upstream": "http://a.test/x"},
            "upstream",
            "no http:// URL",
        ),
        ({"network": ["*"], "upstream": "http://a.test:0"}, "upstream", "a port is 1"),
        ({"network": ["*"], "upstream": "http://0x7f.1"}, "upstream", "dotted decimal"),
        ({"network": ["*"], "upstream": "http://"}, "upstream", "a name is missing"),
        ({"upstream": "http://a.test"}, "upstream", "network = 'none' has no rules"),
        ({"network": "host", "proxy_env": True}, "proxy_env", "has no rules"),
        ({"pool": "outer"}, "pool", "network = 'none' has no rules"),
    ],
)
def test_a_fault_is_told_with_its_key(
    keys: dict[str, object], key: str, reason: str
) -> None:
    ((told_key, told),) = faults(section(**keys))
    assert told_key == key
    assert reason in told
    assert told.startswith("cannot ")
    assert len(told) <= 160


def test_a_refused_port_may_be_published() -> None:
    keys = {"network": ["a.test", "!a.test:80"], "publish": ["80"]}
    found = [key for key, _ in faults(section(**keys))]
    assert "publish" not in found


def test_all_faults_are_told_at_once() -> None:
    keys = {"network": ["a:x", "b:y"], "publish": ["x"], "upstream": "y"}
    found = [key for key, _ in faults(section(**keys))]
    assert found == ["network", "network", "publish", "upstream"]


@pytest.mark.parametrize(
    "keys",
    [
        {"network": "some"},
        {"network": [1]},
        {"pool": "inner"},
        {"proxy_env": "yes"},
        {"published": ["80"]},
    ],
)
def test_a_value_of_another_form_is_no_section(keys: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        section(**keys)
