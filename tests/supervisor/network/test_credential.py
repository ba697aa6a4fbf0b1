"""The words of a credential, and which of them are refused."""

import pytest

from supervisor.network.contradictions import contradictions
from supervisor.network.credential import (
    CredentialError,
    faults,
    parse_header,
    parse_server,
    parse_terms,
    uses_faults,
)
from supervisor.network.rule import Rule, RuleError, parse_rule
from supervisor.network.rule_changes import narrow
from supervisor.network.rules import Grant, Rules, parse_rules
from supervisor.network.section import CredentialSection, NetworkSection
from supervisor.network.settings import SettingError, settings_from
from supervisor.network.settings import faults as network_faults

GOOD = CredentialSection(
    "API.example.com.", "Authorization: Bearer {file}", "/etc/api.key"
)
INNER = "api.example.com.sandhost"


# spec NET15: the name by which a child reaches the host, and the header.
def test_the_words_of_a_credential_are_read() -> None:
    assert not list(faults(GOOD))
    terms = parse_terms("api", GOOD)
    assert (terms.server, terms.port, terms.inner_name) == (
        "api.example.com",
        443,
        INNER,
    )
    assert (terms.header, terms.before, terms.after) == ("Authorization", "Bearer ", "")
    assert terms.inner_rule == Rule(INNER, (80,))
    assert parse_header("X-Key:{file}") == ("X-Key", "", "")
    assert parse_server("db.example.com:8443@private").private


# spec NET15: one name and one port, for which a certificate can be checked.
@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("10.1.0.5", "it is an address"),
        ("[2001:db8::1]:443", "it is an address"),
        ("10.5", "write dotted decimal"),
        ("*", "it stands for many names"),
        ("*.example.com", "it stands for many names"),
        ("!api.example.com", "it begins with !"),
        ("api.example.com:443,444", "it has several ports"),
        ("api.example.com:443@tls=any", "leave the option tls out"),
        ("api.example.com:80@tls=sni", "leave the option tls out"),
        ("https://api.example.com", "a URL is no rule"),
        ("api.example.com.sandhost", "no server outside has that name"),
        ("localhost", "no server outside has that name"),
        ("a." * 122 + "test", "it is too long"),
        ("api.example.com\r\nx", "a label has"),
        ("", "a name is missing"),
    ],
)
def test_a_host_that_is_none_is_refused(host: str, why: str) -> None:
    with pytest.raises(CredentialError, match=why) as caught:
        parse_server(host)
    assert "\n" not in str(caught.value)
    section = CredentialSection(host, GOOD.header, GOOD.file)
    assert [key for key, _ in faults(section)] == ["host"]


# spec NET15: one place for the secret, in a header that the child might send itself.
@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("Authorization", "it is no name and value"),
        ("", "it is no name and value"),
        (": {file}", "it is no name and value"),
        ("Two Words: {file}", "it is no name and value"),
        ("{file}: a", "it is no name and value"),
        ("Authorization: Bearer", "the secret has one place"),
        ("Authorization: {file} {file}", "the secret has one place"),
        ("X: {file}\r\nHost: other", "control characters"),
        ("X: {file}\nY: 1", "control characters"),
        ("X: \0{file}", "control characters"),
        ("X: \N{SNOWMAN}{file}", "others than ASCII"),
        ("Host: {file}", "the host writes that header itself"),
        ("content-length: {file}", "the host writes that header itself"),
        ("Transfer-Encoding: {file}", "the host writes that header itself"),
        ("Connection: {file}", "the host writes that header itself"),
        ("Accept-Encoding: {file}", "the host writes that header itself"),
    ],
)
def test_a_header_that_is_none_is_refused(header: str, why: str) -> None:
    with pytest.raises(CredentialError, match=why) as caught:
        parse_header(header)
    assert "\n" not in str(caught.value)
    section = CredentialSection(GOOD.host, header, GOOD.file)
    assert [key for key, _ in faults(section)] == ["header"]


# spec NET15: credentials of a child are known, and each host has one.
def test_credentials_that_a_child_cannot_have_together_are_told() -> None:
    other = CredentialSection("api.example.com:8443", "X-Key: {file}", "/etc/b.key")
    known = {"a": GOOD, "b": other, "bad": CredentialSection("10.5", "", "")}
    assert not list(uses_faults(["a"], known))
    assert not list(uses_faults(["bad"], known))  # told with the credential
    assert list(uses_faults(["a", "a", "b", "c"], known)) == [
        "'a' is named twice; leave one out",
        "'a' and 'b' are both for api.example.com; leave one out",
        "there is no credential 'c'; there are: a, b, bad",
    ]
    assert list(uses_faults(["c"], {})) == [
        "there is no credential 'c'; there are: none"
    ]


# spec NET15: without a net namespace there is no name; a granted port is the host's.
def test_what_a_credential_cannot_stand_beside_is_told() -> None:
    uses = ["api"]
    host = NetworkSection("host", credentials=uses)
    assert [key for key, _ in network_faults(host)] == ["credentials"]
    published = NetworkSection(publish=["80"], credentials=uses)
    assert [key for key, _ in network_faults(published)] == ["publish"]
    alone = NetworkSection(credentials=uses, proxy_env=True)
    assert not list(network_faults(alone))


# spec NET15: a credential is a rule of the child, and nothing else of its network.
def test_a_credential_is_a_rule_of_its_own() -> None:
    known = {"api": parse_terms("api", GOOD)}
    settings = settings_from(NetworkSection(credentials=["api"]), known)
    assert settings.mode == "rules"
    assert settings.rules.texts() == (f"{INNER}:80",)
    assert settings.rules.ports() == (80,)
    with pytest.raises(SettingError, match="the host has not read it"):
        settings_from(NetworkSection(credentials=["api"]))
    without = settings_from(NetworkSection(["*:80"]), known)
    assert not without.credentials
    assert without.rules.decide_any_port(INNER) is not None


# spec NET15: no rule for many names grants a credential, and no rule of a policy does.
# attack 62
def test_a_wide_rule_grants_no_credential() -> None:
    wide = parse_rules(["*:80", "*.com.sandhost:80", "*.example.com:80"])
    refused = wide.decide_any_port(INNER)
    assert refused is not None
    assert refused.rule is None
    assert not isinstance(wide.decide(INNER, 80), Grant)
    rules = [parse_rule(f"{INNER}:80"), parse_rule("*.sandhost:80")]
    told = list(contradictions(rules))
    assert len(told) == 2
    assert all("is for a credential" in text for text in told)


# spec NET2, NET15: a nested child has a credential if it asks for it and its parent has it.
def test_a_nested_child_has_its_parents_credential_by_name_alone() -> None:
    parent = Rules([parse_rule("*:80"), parse_rule(f"{INNER}:80")])
    asked = narrow(parent, [parse_rule(f"{INNER}:80")])
    assert isinstance(asked.decide(INNER, 80), Grant)
    assert not isinstance(narrow(parent, [parse_rule("*:80")]).decide(INNER, 80), Grant)
    with pytest.raises(RuleError, match="the parent has no rule"):
        narrow(parse_rules(["*:80"]), [parse_rule(f"{INNER}:80")])
