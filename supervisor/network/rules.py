"""The rules of one child as a table: the rights of a name or an address.

1. A look-up costs the labels of the name, or the different lengths of the networks, and
   not the number of rules and ports.
2. Rules that allow add up: a right is there if one rule has it. A refusal is stronger
   than any of them.
3. Rules never change; a child whose rules change gets another table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from supervisor.network.addresses import Network, Opening, held_addresses
from supervisor.network.hosts import Address, is_credential_name, shorten
from supervisor.network.reasons import NetworkRefusal, Reason
from supervisor.network.rule import TLS_PORT, Rule, RuleError, parse_rule, rule_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_PORTS = 64
"""Different ports of a child: each is a listener for v4 and one for v6."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The rules that allow one host and port.

    Attributes:
        port: of the connection.
        rules: those that allow it, the most specific one first.
    """

    port: int
    rules: tuple[Rule, ...]

    @property
    def rule(self) -> Rule:
        """The rule that is told as the one that decided."""
        return self.rules[0]

    @property
    def checks_tls(self) -> bool:
        """Whether the connection has to begin with a ClientHello for a granted name."""
        return all(rule.checks_tls(self.port) for rule in self.rules)

    def covers(self, name: str) -> bool:
        """Tell whether a rule that allows this connection is for another name as well."""
        return any(rule.covers(name) for rule in self.rules)

    def opening(self, *, outer_pool: bool = False) -> Opening:
        """Return what the rules open of the closed ranges.

        Args:
            outer_pool: the host's resolver is another sandhost's (`pool = "outer"`).
        """
        networks = tuple(
            rule.cut_from or rule.target
            for rule in self.rules
            if not isinstance(rule.target, str)
        )
        return Opening(any(rule.private for rule in self.rules), networks, outer_pool)


@dataclass(slots=True)
class _Entry:
    """The rules of one target, by port."""

    allowing: dict[int, list[Rule]] = field(default_factory=dict)
    refusing: dict[int, Rule] = field(default_factory=dict)


class _Prefix(NamedTuple):
    version: int
    length: int


class Rules:
    """A child's rules.

    Args:
        rules: in the order in which they are shown.

    Raises:
        RuleError: they have more ports than a child may have listeners.
    """

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._rules = tuple(dict.fromkeys(rules))
        self._names: dict[str, _Entry] = {}
        self._networks: dict[_Prefix, dict[int, _Entry]] = {}
        ports: set[int] = set()
        for rule in self._rules:
            self._add(rule)
            if not rule.is_refusal:
                ports.update(rule.ports)
            if len(ports) > MAX_PORTS:
                text = shorten(rule.written)
                raise RuleError(
                    f"cannot add the rule '{text}': a child has at most {MAX_PORTS}"
                    " different ports; leave some out"
                )
        self._ports = tuple(sorted(ports))
        # The longest first: the most specific rule is the one that is told.
        self._prefixes = sorted(self._networks, reverse=True)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)

    def __repr__(self) -> str:
        return f"Rules({', '.join(map(str, self._rules))})"

    def ports(self) -> tuple[int, ...]:
        """Return the ports to listen on, sorted."""
        return self._ports

    def networks(self) -> tuple[Network, ...]:
        """Return the networks that a child needs a route to."""
        return tuple(
            dict.fromkeys(
                rule.target
                for rule in self._rules
                if not rule.is_refusal and not isinstance(rule.target, str)
            )
        )

    def texts(self) -> tuple[str, ...]:
        """Return the rules as they were written."""
        return tuple(dict.fromkeys(rule.written for rule in self._rules))

    def decide(self, name: str, port: int) -> Grant | NetworkRefusal:
        """Return what the rules say of a name and a port.

        Args:
            name: as `parse_name` returns it.
            port: from 1 to 65535.
        """
        entries = (self._names.get(pattern) for pattern in _patterns(name))
        return _decide(name, port, [entry for entry in entries if entry is not None])

    def decide_any_port(self, name: str) -> NetworkRefusal | None:
        """Return why a name has no address: no port of it is allowed; None if one is."""
        allowed: set[int] = set()
        refusing: dict[int, Rule] = {}
        for pattern in _patterns(name):
            entry = self._names.get(pattern)
            if entry is not None:
                allowed.update(entry.allowing)
                refusing = entry.refusing | refusing
        if allowed - refusing.keys():
            return None
        if refusing:
            rule = refusing[min(allowed & refusing.keys() or refusing)]
            return NetworkRefusal(Reason.REFUSED_BY_RULE, rule.written)
        return NetworkRefusal(Reason.NO_RULE, _rule_that_allows(name, TLS_PORT))

    def decide_address(self, address: Address, port: int) -> Grant | NetworkRefusal:
        """Return what the rules say of an address that was named itself, and a port.

        Of the ranges that no name reaches `addresses.judge` decides afterwards.
        """
        refused = self.refuse_answer(address, port)
        if refused is not None:
            return refused
        return _decide(address, port, self._entries_of(address))

    def refuse_answer(self, address: Address, port: int) -> NetworkRefusal | None:
        """Return the refusal of an address that a granted name stands for, or None."""
        for held in (address, *held_addresses(address)):
            for entry in self._entries_of(held):
                if port in entry.refusing:
                    rule = entry.refusing[port].written
                    return NetworkRefusal(Reason.REFUSED_BY_RULE, rule)
        return None

    def check_sni(self, grant: Grant, sni: str) -> NetworkRefusal | None:
        """Return why a granted connection may not be for a ClientHello's name, or None.

        Args:
            grant: the rules that allow the connection.
            sni: the name, as `parse_name` returns it.
        """
        if not grant.covers(sni):
            return NetworkRefusal(Reason.TLS_OTHER_NAME, str(rule_for(sni, grant.port)))
        decision = self.decide(sni, grant.port)
        return decision if isinstance(decision, NetworkRefusal) else None

    def _entries_of(self, address: Address) -> list[_Entry]:
        bits = int(address)
        found = []
        for prefix in self._prefixes:
            if prefix.version == address.version:
                start = bits >> (address.max_prefixlen - prefix.length)
                entry = self._networks[prefix].get(start)
                if entry is not None:
                    found.append(entry)
        return found

    def _add(self, rule: Rule) -> None:
        entry = self._entry_for(rule.target)
        for port in rule.ports:
            if rule.is_refusal:
                entry.refusing.setdefault(port, rule)
            else:
                entry.allowing.setdefault(port, []).append(rule)

    def _entry_for(self, target: str | Network) -> _Entry:
        if isinstance(target, str):
            return self._names.setdefault(target, _Entry())
        prefix = _Prefix(target.version, target.prefixlen)
        start = int(target.network_address) >> (target.max_prefixlen - prefix.length)
        return self._networks.setdefault(prefix, {}).setdefault(start, _Entry())


def parse_rules(texts: Iterable[str]) -> Rules:
    """Return the table of rules that are written as texts.

    Raises:
        RuleError: one of them cannot be read, or they have too many ports.
    """
    return Rules(map(parse_rule, texts))


def _decide(
    host: str | Address, port: int, entries: Sequence[_Entry]
) -> Grant | NetworkRefusal:
    for entry in entries:
        if port in entry.refusing:
            return NetworkRefusal(Reason.REFUSED_BY_RULE, entry.refusing[port].written)
    rules = tuple(rule for entry in entries for rule in entry.allowing.get(port, ()))
    if not rules:
        return NetworkRefusal(Reason.NO_RULE, _rule_that_allows(host, port))
    return Grant(port, rules)


def _rule_that_allows(host: str | Address, port: int) -> str | None:
    """Return the narrowest rule for a host; None for what no rule of a policy allows."""
    if isinstance(host, str) and is_credential_name(host):
        return None
    return str(rule_for(host, port))


def _patterns(name: str) -> Iterator[str]:
    """Yield the targets that a name is covered by, the most specific one first."""
    yield name
    if is_credential_name(name):
        return  # granted by itself alone (spec NET15)
    dot = name.find(".")
    while dot >= 0:
        yield f"*{name[dot:]}"
        dot = name.find(".", dot + 1)
    yield "*"
