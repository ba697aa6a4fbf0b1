"""The network keys of a policy: their faults, and the settings of its children."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from supervisor.network import credential
from supervisor.network.contradictions import clashing_ports, contradictions
from supervisor.network.hosts import (
    HostError,
    format_host,
    parse_host,
    parse_port,
    shorten,
)
from supervisor.network.rule import RuleError, parse_rule
from supervisor.network.rule_changes import narrow
from supervisor.network.rules import Rules, parse_rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from supervisor.network.credential import Terms
    from supervisor.network.hosts import Address
    from supervisor.network.rule import Rule
    from supervisor.network.section import Mode, NetworkSection

DNS_PORT = 53
PROXY_PORT = 3128
OWN_PORTS = (DNS_PORT, PROXY_PORT)
"""Ports of 127.0.0.1 in a child's namespace that the host listens on."""
UPSTREAM_PORT = 80
NO_TERMS: Mapping[str, Terms] = MappingProxyType({})
"""The credentials of a host that has none."""

_PUBLICATION = re.compile(r"(?:(?P<host>[0-9]+):)?(?P<port>[0-9]+)")
_UPSTREAM = re.compile(
    r"http://(?P<host>\[[^\]]*\]|[^:/?#@]*)(?::(?P<port>[0-9]+))?/?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Publication:
    """A port of a child that is reached from the host's 127.0.0.1.

    Attributes:
        port: of the child.
        host_port: of the host; None for any free one.
    """

    port: int
    host_port: int | None = None


@dataclass(frozen=True, slots=True)
class Upstream:
    """The HTTP proxy that the host itself has to use."""

    host: str | Address
    port: int

    def __str__(self) -> str:
        return f"http://{format_host(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """The checked settings of a child's network.

    Attributes:
        mode: `rules` if they are listed; `learn` if they are a bound.
        rules: the allowing rules; empty in the modes `none` and `host`.
        publish: ports that are reached from the host.
        upstream: where connections are made through.
        proxy_env: the child's environment names the proxy.
        outer_pool: the host's resolver is another sandhost's.
        credentials: those that the child may use; their rules are among `rules`.
    """

    mode: Mode = "none"
    rules: Rules = field(default_factory=Rules)
    publish: tuple[Publication, ...] = ()
    upstream: Upstream | None = None
    proxy_env: bool = False
    outer_pool: bool = False
    credentials: tuple[Terms, ...] = ()


class SettingError(ValueError):
    """A value that a key cannot have; its text does not name the key."""


def faults(section: NetworkSection) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that a policy cannot have."""
    key, texts = _rules_of(section)
    rules = []
    for text in texts:
        try:
            rules.append(parse_rule(text))
        except RuleError as why:
            yield key, str(why)
    for fault in contradictions(rules):
        yield key, fault
    try:
        Rules(rules)
    except RuleError as why:
        yield key, str(why)
    yield from _bound_faults(section)
    yield from _publication_faults(section, rules)
    yield from _other_faults(section)


def settings_from(
    section: NetworkSection, known: Mapping[str, Terms] = NO_TERMS
) -> NetworkSettings:
    """Return what a section sets that has no faults.

    Raises:
        SettingError: the host does not have one of the section's credentials.
    """
    _, texts = _rules_of(section)
    upstream = section.upstream
    credentials = tuple(_known_terms(section.credentials, known))
    own = [terms.inner_rule for terms in credentials]
    return NetworkSettings(
        "rules" if credentials and section.mode == "none" else section.mode,
        Rules([*map(parse_rule, texts), *own]),
        tuple(map(parse_publication, section.publish)),
        None if upstream is None else parse_upstream(upstream),
        section.proxy_env,
        section.pool == "outer",
        credentials,
    )


def nested_settings(texts: Iterable[str], parent: str) -> NetworkSettings:
    """Return a nested child's network: a part of its parent's (spec NET2).

    The relay serves it, and dials by the parent's names: the host checks each of these
    against the parent's rules, too.

    Args:
        texts: the rules that it asks for.
        parent: the parent's network as its environment has it: `host`, its rules with
            spaces between them, or nothing.

    Raises:
        RuleError: a rule cannot be read, means nothing, or the parent lacks it.
    """
    asked = [parse_rule(text) for text in texts]
    if not parent:
        why = "this child has no network; leave it out"
        raise RuleError(f"cannot allow '{asked[0].written}': {why}")
    is_hosts = parent == "host"
    own = Rules() if is_hosts else parse_rules(parent.split())
    for fault in contradictions(asked, tuple(own)):
        raise RuleError(fault)
    rules = Rules(asked) if is_hosts else narrow(own, asked)
    return NetworkSettings("rules", rules, outer_pool=not is_hosts)


def _known_terms(names: Iterable[str], known: Mapping[str, Terms]) -> Iterator[Terms]:
    for name in names:
        if name not in known:
            problem = f"cannot use the credential '{shorten(name)}'"
            raise SettingError(f"{problem}: the host has not read it; restart the host")
        yield known[name]


def parse_publication(text: str) -> Publication:
    """Return the port that `[HOST:]CHILD` publishes.

    Raises:
        SettingError: it is another text.
    """
    match = _PUBLICATION.fullmatch(text)
    if match is None:
        raise SettingError(
            f"cannot publish '{shorten(text)}': it is no port; write '8000' or"
            " '18000:8000'"
        )
    host = match["host"]
    return Publication(
        _parse_port(match["port"], text),
        None if host is None else _parse_port(host, text),
    )


def parse_upstream(text: str) -> Upstream:
    """Return the proxy that a URL names.

    Raises:
        SettingError: it names none, or more than host and port.
    """
    match = _UPSTREAM.fullmatch(text)
    if match is None:
        raise SettingError(
            f"cannot use '{shorten(text)}': it is no http:// URL of host and port;"
            " write 'http://proxy.example.com:3128'"
        )
    try:
        host = parse_host(match["host"])
    except HostError as why:
        raise SettingError(f"cannot use '{shorten(text)}': {why}") from None
    port = UPSTREAM_PORT if match["port"] is None else _parse_port(match["port"], text)
    return Upstream(host, port)


def _parse_port(digits: str, text: str) -> int:
    port = parse_port(digits)
    if port is None:
        raise SettingError(
            f"cannot use '{shorten(text)}': a port is 1 to 65535; write one of them"
        )
    return port


def _rules_of(section: NetworkSection) -> tuple[str, list[str]]:
    """Return the rules that are in force, and their key."""
    if isinstance(section.network, list):
        return "network", section.network
    return "within", section.within


def _bound_faults(section: NetworkSection) -> Iterator[tuple[str, str]]:
    if section.network == "learn" and not section.within:
        why = "cannot learn without a bound: no rule is in it"
        yield "within", f"{why}; write what may be learned, ['*'] for all public names"
    if section.network != "learn" and section.within:
        why = "cannot use a bound: network is not 'learn'"
        yield "within", f"{why}; leave it out, or set network = 'learn'"


def _publication_faults(
    section: NetworkSection, rules: Sequence[Rule]
) -> Iterator[tuple[str, str]]:
    own = (*OWN_PORTS, credential.PORT) if section.credentials else OWN_PORTS
    seen: set[tuple[str, int]] = set()
    for text in section.publish:
        try:
            publication = parse_publication(text)
        except SettingError as why:
            yield "publish", str(why)
            continue
        port, host_port = publication.port, publication.host_port
        places = {("child", port), *([("host", host_port)] if host_port else [])}
        fault, how = "", "have the child listen on another port"
        if clashing_ports(rules, [port]):
            fault = f"a rule grants port {port}, and the host listens on it"
        elif port in own:
            fault = f"the host listens on port {port} of the child"
        elif places & seen:
            fault, how = "the port is published already", "leave one out"
        if fault:
            yield "publish", f"cannot publish '{shorten(text)}': {fault}; {how}"
        seen |= places
    if section.publish and section.network == "host":
        problem = "cannot publish: a child with network = 'host' listens there itself"
        yield "publish", f"{problem}; leave it out"


def _other_faults(section: NetworkSection) -> Iterator[tuple[str, str]]:
    if section.upstream is not None:
        try:
            parse_upstream(section.upstream)
        except SettingError as why:
            yield "upstream", str(why)
    if section.network == "host" and section.credentials:
        problem = "cannot use them: a child with network = 'host' has no own names"
        yield "credentials", f"{problem}; leave them out, or list rules"
    if section.network not in ("none", "host") or section.credentials:
        return
    is_set = {
        "upstream": section.upstream is not None,
        "proxy_env": section.proxy_env,
        "pool": section.pool != "own",
    }
    for key in (key for key, value in is_set.items() if value):
        problem = f"cannot use it: network = '{section.network}' has no rules"
        yield key, f"{problem}; leave it out, or list rules"
