"""Rules that are a part of a parent's, and changes of a running child's rules.

1. A child has at most what its parent has (spec NET2): each port of each rule has to be
   covered by one rule of the parent, and each option by a rule that covers it.
2. A part of a network is judged as the whole is: `10.0.0.5` cut from `0.0.0.0/0` does not
   open 10/8 (spec NET3), so the rule keeps the network that it was cut from.
3. A parent's refusals are its children's as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from supervisor.network.hosts import shorten
from supervisor.network.rule import Rule, RuleError, format_target
from supervisor.network.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from supervisor.network.addresses import Network


def narrow(parent: Rules, asked: Iterable[Rule]) -> Rules:
    """Return the rules of a nested child.

    Raises:
        RuleError: the parent lacks one of them, or an option of it.
    """
    cut = [part for rule in asked for part in _cut(parent, rule)]
    return Rules([*cut, *(rule for rule in parent if rule.is_refusal)])


def change(rules: Rules, allow: Sequence[Rule], deny: Sequence[Rule]) -> Rules:
    """Return the rules of a running child after a change (spec NET12).

    It is a child of the host: a relay changes no rules of nested ones (spec NET2).
    A new allowing rule removes the denying one of the same target and ports; a denying one
    removes the allowing rule, and refuses from then on.

    Args:
        rules: the child's rules.
        allow: rules to add, none of them a refusal.
        deny: rules to refuse, none of them a refusal.

    Raises:
        RuleError: nothing is changed, for the reason in the text.
    """
    _check_change(allow, deny)
    kept = list(rules)
    for rule in allow:
        kept = [part for old in kept for part in _without(old, rule, refusals=True)]
    for rule in deny:
        kept = [part for old in kept for part in _without(old, rule, refusals=False)]
    refused = [Rule(rule.target, rule.ports, is_refusal=True) for rule in deny]
    changed = Rules([*kept, *allow, *refused])
    for rule in allow:
        _check_effect(changed, rule)
    return changed


def _cut(parent: Rules, rule: Rule) -> Iterator[Rule]:
    """Yield a rule in the parts that a parent covers by different networks."""
    if rule.is_refusal:
        yield rule
        return
    refusals = [_refusal_of(parent, rule, port) for port in rule.ports]
    if refusals[0] is not None and None not in refusals:
        why = f"the parent's {_quoted(refusals[0])} refuses it"
        raise _not_allowed(rule, why)
    parts: dict[Network | None, list[int]] = {}
    for port in rule.ports:
        parts.setdefault(_origin(parent, rule, port), []).append(port)
    for origin, ports in parts.items():
        yield replace(rule.on_ports(ports), cut_from=origin)


def _origin(parent: Rules, rule: Rule, port: int) -> Network | None:
    """Return the network by which a parent covers one port of a rule.

    Returns:
        None for a name, and for a network that the parent has itself.

    Raises:
        RuleError: the parent does not cover it.
    """
    covering = [
        other
        for other in parent
        if not other.is_refusal and port in other.ports and other.covers(rule.target)
    ]
    if not covering:
        raise _not_allowed(rule, f"the parent has no rule for port {port} of it")
    if rule.private and not any(other.private for other in covering):
        raise _not_allowed(rule, "the parent has it without private")
    if not rule.checks_tls(port) and all(other.checks_tls(port) for other in covering):
        raise _not_allowed(rule, "the parent has it without tls=any")
    # All of them hold the rule's network, so that one is within the other: the smallest
    # opens what the others open.
    origin = max(map(_network_of, covering), key=_length, default=None)
    return None if origin == rule.target else origin


def _network_of(rule: Rule) -> Network | None:
    """Return the network that says what a rule opens; None if it is for a name."""
    return rule.cut_from or (None if isinstance(rule.target, str) else rule.target)


def _length(network: Network | None) -> int:
    return -1 if network is None else network.prefixlen


def _without(old: Rule, rule: Rule, *, refusals: bool) -> Iterator[Rule]:
    """Yield what is left of a rule when the ports of another one are taken away."""
    if old.is_refusal is not refusals or old.target != rule.target:
        yield old
        return
    left = [port for port in old.ports if port not in rule.ports]
    if left:
        yield old.on_ports(left)


def _refusal_of(rules: Rules, rule: Rule, port: int) -> Rule | None:
    """Return a refusal that leaves nothing of one port of a rule."""
    for other in rules:
        if other.is_refusal and port in other.ports and other.covers(rule.target):
            return other
    return None


def _check_change(allow: Sequence[Rule], deny: Sequence[Rule]) -> None:
    for rule in (*allow, *deny):
        if rule.is_refusal:
            text = f"cannot change the rule {_quoted(rule)}: it begins with !"
            raise RuleError(f"{text}; deny the rule without it")
    for rule in deny:
        for other in allow:
            if rule.target == other.target and {*rule.ports} & {*other.ports}:
                raise _not_allowed(other, "it is denied in the same change")


def _check_effect(rules: Rules, rule: Rule) -> None:
    for port in rule.ports:
        refusal = _refusal_of(rules, rule, port)
        if refusal is not None:
            target = shorten(format_target(refusal.target))
            text = f"cannot allow {_quoted(rule)}: {_quoted(refusal)} refuses it"
            raise RuleError(f"{text}; allow '{target}' to take that away")


def _not_allowed(rule: Rule, reason: str) -> RuleError:
    return RuleError(f"cannot allow {_quoted(rule)}: {reason}; leave it out")


def _quoted(rule: Rule) -> str:
    return f"'{shorten(rule.written, 36)}'"
